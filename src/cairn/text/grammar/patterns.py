"""Patterns of JSON Schema formats, and rewriting of patterns with look-ahead, which llguidance does not support.

Fractions of a second and numbers of a duration have a bounded length: a model that may write digits for ever does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)  # fmt: skip
_N = "[0-9]{1,6}"
_SECONDS = rf"{_N}(?:\.[0-9]{{1,9}})?S"
_SPAN_OF_DAY = f"T(?:{_N}H(?:{_N}M(?:{_SECONDS})?)?|{_N}M(?:{_SECONDS})?|{_SECONDS})"
_SPAN_OF_DATE = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_SPAN_OF_DATE}(?:{_SPAN_OF_DAY})?|{_SPAN_OF_DAY}|{_N}W)$",
    "uuid": "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
}
"""Formats that are enforced by a pattern."""
KNOWN_FORMATS = frozenset({*FORMATS, "email", "hostname", "ipv4", "ipv6", "uri"})
"""Formats that are enforced; others are ignored."""

_SAME: Mapping[str, str] = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:TIME)?|TIME)$".replace(
            "TIME",
            r"T(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+(?:[.,][0-9]+)?S)?|[0-9]+M(?:[0-9]+(?:[.,][0-9]+)?S)?"
            r"|[0-9]+(?:[.,][0-9]+)?S)",
        )
    ),
}
"""Patterns with look-ahead that libraries write for decimals, addresses and durations -> the same without it."""
MOST_AHEAD = 16
"""Most look-aheads at the beginning of a pattern."""
_LOOK = re.compile(r"\(\?(?:[=!]|<[=!])|\\(?:[1-9]|k<)")
"""A look-ahead, a look-behind or a back-reference."""


def without_look_ahead(pattern: str) -> list[str] | None:
    """Return patterns without look-ahead whose conjunction equals `pattern`; None if there are none.

    Look-aheads at the beginning (`^(?=A)B`) become patterns of their own: `^(?:A)` and `^B`.
    """
    if pattern in _SAME:
        return [_SAME[pattern]]
    parts: list[str] = []
    at = 1
    while pattern.startswith("^(?=") and pattern.startswith("(?=", at):
        end = _closing(pattern, at)
        if end is None or len(parts) == MOST_AHEAD:
            return None
        parts.append(f"^(?:{pattern[at + 3 : end]})")
        at = end + 1
    rest = f"^{pattern[at:]}" if parts else pattern
    if any(map(_looks, (rest, *parts))) or (parts and _has_choice(rest)):
        return None
    return [rest, *parts]


def _looks(pattern: str) -> bool:
    return any(_LOOK.match(pattern, place) for sign, place in _signs(pattern, 0) if sign in "(\\")


def _closing(pattern: str, at: int) -> int | None:
    """Return the index of the bracket that closes the group at `at`; None if it is not closed."""
    depth = 0
    for sign, place in _signs(pattern, at):
        depth += 1 if sign == "(" else -1 if sign == ")" else 0
        if depth == 0:
            return place
    return None


def _has_choice(pattern: str) -> bool:
    """Return whether the pattern is a choice at top level; a look-ahead before it then belongs to its first part."""
    depth = 0
    for sign, _ in _signs(pattern, 0):
        depth += 1 if sign == "(" else -1 if sign == ")" else 0
        if sign == "|" and depth == 0:
            return True
    return False


def _signs(pattern: str, at: int) -> Iterator[tuple[str, int]]:
    """Yield (sign, index) of round brackets, bars and backslashes from `at` on, outside character classes."""
    listed = False
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            if not listed:
                yield one, at
            at += 1
        elif listed:
            listed = one != "]"
        elif one == "[":
            listed = True
            at += 1 + (pattern[at + 1 : at + 2] == "^")  # a bracket that comes first stands for itself
            continue
        elif one in "()|":
            yield one, at
        at += 1
