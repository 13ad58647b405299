"""Samplers beyond the usual ones, as clients ask for them -> `SamplingExtras`. Ranges, names and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.types.errors import InvalidRequest
from cairn.types.request import SamplingExtras

MAX_BIAS = 1024
MAX_WORDS = 1024
MAX_WORD_TOKENS = 64
MAX_ALLOWED = 4096
MAX_BREAKERS = 64
MAX_CHARACTERS = 256
"""Characters of a text that stands for tokens: it is encoded where the request is checked."""
Encode = Callable[[str], Sequence[int]]


class _Range(NamedTuple):
    """Least and greatest value of a parameter, and what it is where it is not given."""

    low: float
    high: float
    default: float


NUMBERS: Mapping[str, _Range] = {
    "typical_p": _Range(0, 1, 1.0),
    "top_n_sigma": _Range(-1, 100, 0.0),
    "xtc_probability": _Range(0, 1, 0.0),
    "xtc_threshold": _Range(0, 1, 0.1),
    "dry_multiplier": _Range(0, 100, 0.0),
    "dry_base": _Range(1, 10, 1.75),
    "dry_allowed_length": _Range(1, 1 << 20, 2),
    "dry_penalty_last_n": _Range(-1, 1 << 24, -1),
    "dynatemp_range": _Range(0, 10, 0.0),
    "dynatemp_exponent": _Range(0.01, 100, 1.0),
    "mirostat": _Range(0, 2, 0),
    "mirostat_tau": _Range(0, 100, 5.0),
    "mirostat_eta": _Range(0, 1, 0.1),
}
WHOLE = frozenset({"dry_allowed_length", "dry_penalty_last_n", "mirostat"})
BEYOND = (*NUMBERS, "dry_sequence_breakers", "allowed_token_ids", "bad_words")
"""The options that are read here."""
SWITCHES: Mapping[str, str] = {
    "dry_multiplier": "dry",
    "top_n_sigma": "top_n_sigma",
    "typical_p": "typ_p",
    "xtc_probability": "xtc",
}
"""What turns a sampler on -> its name in a list of samplers."""
BREAKERS = ("\n", ":", '"', "*")
"""What ends a repetition where a request does not say, as in llama.cpp."""


def is_off(name: str, value: float) -> bool:
    """Whether a switch leaves its sampler off."""
    return value <= 0 if name == "top_n_sigma" else value == NUMBERS[name].default


def numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `NUMBERS`, checked, with defaults. InvalidRequest."""
    found: dict[str, float] = {}
    for name, (low, high, default) in NUMBERS.items():
        value = given.get(name)
        value = default if value is None else value
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidRequest(f"{name} must be a finite number", field=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}; it is {value:.20g}", field=name)
        if name in WHOLE and value != int(value):
            raise InvalidRequest(f"{name} must be a whole number", field=name)
        found[name] = float(value)
    return found


def extras_of(
    values: Mapping[str, float],
    *,
    breakers: Sequence[str] | None,
    allowed: Sequence[int] | None,
    bad_words: Sequence[str] | None,
    vocab: int,
    ends: Sequence[int],
    encode: Encode | None,
) -> SamplingExtras | None:
    """All of them, checked; None where nothing is on. `values`: those of `numbers`; `ends` break a repetition, too."""
    found = SamplingExtras(
        typical_p=values["typical_p"],
        top_n_sigma=max(0.0, values["top_n_sigma"]),
        xtc_probability=values["xtc_probability"],
        xtc_threshold=values["xtc_threshold"],
        dry_multiplier=values["dry_multiplier"] if values["dry_penalty_last_n"] else 0.0,
        dry_base=values["dry_base"],
        dry_allowed_length=int(values["dry_allowed_length"]),
        dry_penalty_last_n=int(values["dry_penalty_last_n"]),
        dry_breakers=_breakers(breakers, ends, encode) if values["dry_multiplier"] else (),
        dynatemp_range=values["dynatemp_range"],
        dynatemp_exponent=values["dynatemp_exponent"],
        mirostat=int(values["mirostat"]),
        mirostat_tau=values["mirostat_tau"],
        mirostat_eta=values["mirostat_eta"],
        allowed_token_ids=_allowed(allowed, vocab),
        bad_words=_words(bad_words, encode),
    )
    return found if found.any else None


def bias_of(given: Any, encode: Encode | None) -> Mapping[int, float] | None:
    """`logit_bias` as a mapping: llama.cpp's clients send a list of [token, bias], of a token's id or of a text, whose
    tokens all have it; false is that a token never comes."""
    if given is None or isinstance(given, Mapping):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > MAX_BIAS:
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, or list at most {MAX_BIAS} pairs of a token and a number",
            field="logit_bias",
        )
    found: dict[int, float] = {}
    for pair in given:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest("logit_bias must list pairs of a token and a number", field="logit_bias")
        token, bias = pair
        bias = NEVER if bias is False else bias
        for one in _tokens(token, encode, "logit_bias") if isinstance(token, str) else [token]:
            found[one] = bias
    return found


NEVER = -100.0
"""A bias with which a token does not come."""


def _tokens(text: str, encode: Encode | None, field: str) -> Sequence[int]:
    if encode is None:
        raise InvalidRequest(f"{field} takes no texts here, only token ids", field=field)
    if len(text) > MAX_CHARACTERS + 1:  # of a word behind a space
        raise InvalidRequest(f"{field}: a text has {len(text)} characters; the limit is {MAX_CHARACTERS}", field=field)
    return encode(text)


def _texts(given: Any, most: int, field: str) -> Sequence[str]:
    texts = [given] if isinstance(given, str) else given
    good = isinstance(texts, Sequence) and len(texts) <= most
    if not good or not all(isinstance(one, str) and 0 < len(one) <= MAX_CHARACTERS for one in texts):
        raise InvalidRequest(
            f"{field} must be a list of at most {most} texts of 1 to {MAX_CHARACTERS} characters", field=field
        )
    return list(texts)


def _breakers(given: Sequence[str] | None, ends: Sequence[int], encode: Encode | None) -> tuple[int, ...]:
    """The tokens that are spelt as the breakers are, alone or behind a space; and what ends an answer."""
    if given is None:
        texts: Sequence[str] = BREAKERS if encode is not None else ()
    else:
        texts = _texts(given, MAX_BREAKERS, "dry_sequence_breakers")
    found = dict.fromkeys(ends)
    for text in texts:
        for spelt in (text, " " + text):
            ids = _tokens(spelt, encode, "dry_sequence_breakers")
            if len(ids) == 1:
                found[ids[0]] = None
    return tuple(found)


def _allowed(given: Sequence[int] | None, vocab: int) -> tuple[int, ...]:
    if given is None:
        return ()
    field = "allowed_token_ids"
    whole = isinstance(given, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in given)
    if not whole or not 0 < len(given) <= MAX_ALLOWED or not all(0 <= one < vocab for one in given):
        raise InvalidRequest(f"{field} must be a list of 1 to {MAX_ALLOWED} token ids below {vocab}", field=field)
    return tuple(dict.fromkeys(given))


def _words(given: Sequence[str] | None, encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and behind a space."""
    if given is None:
        return ()
    found: dict[tuple[int, ...], None] = {}
    for text in _texts(given, MAX_WORDS, "bad_words"):
        for spelt in (text, " " + text.lstrip()):
            ids = tuple(_tokens(spelt, encode, "bad_words"))
            if not 0 < len(ids) <= MAX_WORD_TOKENS:
                raise InvalidRequest(f"bad_words: a word may have at most {MAX_WORD_TOKENS} tokens", field="bad_words")
            found[ids] = None
    return tuple(found)
