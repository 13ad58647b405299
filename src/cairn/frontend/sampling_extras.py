"""Samplers beyond the usual ones, and their order: checks of client options, with ranges, names and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from cairn.types.errors import InvalidRequest, Unsupported
from cairn.types.request import SamplingExtras

MAX_BIAS = 1024
MAX_WORDS = 1024
MAX_WORD_TOKENS = 64
MAX_ALLOWED = 4096
MAX_BREAKERS = 64
MAX_CHARACTERS = 256
"""Most characters of a text that names tokens: it is encoded when the request is checked."""
Encode = Callable[[str], Sequence[int]]


class _Range(NamedTuple):
    """Least, greatest and default value of a parameter."""

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
"""The options that are parsed here."""
SWITCHES: Mapping[str, str] = {
    "dry_multiplier": "dry",
    "top_n_sigma": "top_n_sigma",
    "typical_p": "typ_p",
    "xtc_probability": "xtc",
}
"""Parameter that turns a sampler on -> the sampler's name in a list of samplers."""
BREAKERS = ("\n", ":", '"', "*")
"""Default sequence breakers, as in llama.cpp."""


def is_off(name: str, value: float) -> bool:
    """Return whether a switch leaves its sampler off."""
    return value <= 0 if name == "top_n_sigma" else value == NUMBERS[name].default


def numbers(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the checked values of `NUMBERS`, with defaults. Raise InvalidRequest."""
    values: dict[str, float] = {}
    for name, (low, high, default) in NUMBERS.items():
        value = options.get(name)
        value = default if value is None else value
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidRequest(f"{name} must be a finite number", field=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}; it is {shown(value)}", field=name)
        if name in WHOLE and value != int(value):
            raise InvalidRequest(f"{name} must be a whole number", field=name)
        values[name] = float(value)
    return values


def shown(value: float) -> str:
    """Format a number for an error message; abbreviate whole numbers of more than 64 bits."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if abs(value) < 1 << 64 else f"a number of {value.bit_length()} bits"


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
    """Return all of them, checked; None if no sampler is on.

    `values`: those of `numbers`. `ends`: tokens that break a repetition too.
    """
    extras = SamplingExtras(
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
    return extras if extras.any else None


def bias_of(value: Any, encode: Encode | None) -> Mapping[int, float] | None:
    """Return `logit_bias` as a mapping.

    llama.cpp's clients send a list of [token, bias], where a token is an id or a text, all of whose tokens get the
    bias; false means that a token never comes.
    """
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_BIAS:
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, or list at most {MAX_BIAS} pairs of a token and a number",
            field="logit_bias",
        )
    biases: dict[int, float] = {}
    for pair in value:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest("logit_bias must list pairs of a token and a number", field="logit_bias")
        token, bias = pair
        bias = NEVER if bias is False else bias
        for one in _tokens(token, encode, "logit_bias") if isinstance(token, str) else [token]:
            biases[one] = bias
    return biases


NEVER = -100.0
"""A bias with which a token does not come."""


def _tokens(text: str, encode: Encode | None, field: str) -> Sequence[int]:
    if encode is None:
        raise InvalidRequest(f"{field} takes only token ids here, not texts", field=field)
    if len(text) > MAX_CHARACTERS + 1:  # a word may have a space before it
        raise InvalidRequest(f"{field}: a text has {len(text)} characters; the limit is {MAX_CHARACTERS}", field=field)
    return encode(text)


def _texts(value: Any, most: int, field: str) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, Sequence) and len(texts) <= most
    if not good or not all(isinstance(one, str) and 0 < len(one) <= MAX_CHARACTERS for one in texts):
        raise InvalidRequest(
            f"{field} must be a list of at most {most} texts of 1 to {MAX_CHARACTERS} characters", field=field
        )
    return list(texts)


def _breakers(value: Sequence[str] | None, ends: Sequence[int], encode: Encode | None) -> tuple[int, ...]:
    """Return the tokens spelt like a breaker, alone or after a space, and those that end an answer."""
    if value is None:
        texts: Sequence[str] = BREAKERS if encode is not None else ()
    else:
        texts = _texts(value, MAX_BREAKERS, "dry_sequence_breakers")
    tokens = dict.fromkeys(ends)
    for text in texts:
        for spelt in (text, " " + text):
            ids = _tokens(spelt, encode, "dry_sequence_breakers")
            if len(ids) == 1:
                tokens[ids[0]] = None
    return tuple(tokens)


def _allowed(value: Sequence[int] | None, vocab: int) -> tuple[int, ...]:
    if value is None:
        return ()
    field = "allowed_token_ids"
    whole = isinstance(value, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    if not whole or not 0 < len(value) <= MAX_ALLOWED or not all(0 <= one < vocab for one in value):
        raise InvalidRequest(f"{field} must be a list of 1 to {MAX_ALLOWED} token ids below {vocab}", field=field)
    return tuple(dict.fromkeys(value))


def _words(value: Sequence[str] | None, encode: Encode | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the beginning of a text and after a space."""
    if value is None:
        return ()
    words: dict[tuple[int, ...], None] = {}
    for text in _texts(value, MAX_WORDS, "bad_words"):
        for spelt in (text, " " + text.lstrip()):
            ids = tuple(_tokens(spelt, encode, "bad_words"))
            if not 0 < len(ids) <= MAX_WORD_TOKENS:
                raise InvalidRequest(f"bad_words: a word may have at most {MAX_WORD_TOKENS} tokens", field="bad_words")
            words[ids] = None
    return tuple(words)


NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Values that change nothing."""

SamplerOrder = Literal["default", "llama"]
ORDERS: Mapping[SamplerOrder, tuple[str, ...]] = {
    "default": ("penalties", "temperature", "top_k", "top_p", "min_p"),
    "llama": ("penalties", "top_k", "top_p", "min_p", "temperature"),
}
"""The orders of samplers: the temperature before the cuts, as in transformers and vLLM, or after them."""

_FIELD = "samplers"
_WHOLE: Mapping[SamplerOrder, tuple[str, ...]] = {
    "default": ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    "llama": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
}
"""The same orders with the samplers that are off unless a parameter turns them on."""
_MOST = 64
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p"},
    **{"x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p"},
}
_SYNONYMS = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "nucleus": "top_p"}
_BEYOND = tuple(SWITCHES.values())
_OFF = ("adaptive_p", "tfs_z")
"""Samplers that are not supported; the table of accepted fields refuses the parameters that turn them on."""
_CHAIN = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")
"""The order in which samplers apply, apart from the temperature; top_k and min_p keep the same tokens in either
order."""
_LOOK = frozenset({"typ_p", "top_p", "min_p", "xtc"})
"""Samplers that look at probabilities, so that it matters whether the temperature comes before."""


class Arranged(NamedTuple):
    """Sampling parameters by name, and the place of the temperature."""

    values: Mapping[str, float]
    """Neutral if the sampler is not in the list."""
    temperature_last: bool
    """Whether the temperature comes last; only where that makes a difference."""


def arrange(values: Mapping[str, float], samplers: object = None, default: SamplerOrder = "default") -> Arranged:
    """Return `values` as the samplers that a request lists apply them.

    `values`: of every name in `NEUTRAL` and `NUMBERS`. `samplers`: None for the order `default`. Raise InvalidRequest
    or Unsupported for a list that cannot be followed.
    """
    if samplers is None:
        return _in_order(tuple(values.items()), default)
    return _arranged(values, _names(samplers))


@lru_cache(256)
def _in_order(values: tuple[tuple[str, float], ...], order: SamplerOrder) -> Arranged:
    """Return `arrange` of an order of ours. Most requests name the same few values, or none."""
    return _arranged(dict(values), _WHOLE[order])


def _arranged(values: Mapping[str, float], listed: Sequence[str]) -> Arranged:
    values = {name: value if _owner(name) in (None, *listed) else _neutral(name) for name, value in values.items()}
    working = [name for name in listed if _works(name, values)]
    place = {name: at for at, name in enumerate(working)}
    late = any(_before(place, name, "temperature") for name in _LOOK)
    early = any(_before(place, "temperature", name) for name in _LOOK)
    pairs = [pair for pair in combinations(_CHAIN, 2) if pair != ("top_k", "min_p")]
    first = place.get("penalties", 0) > 0 or _before(place, "temperature", "dry")
    misplaced = first or (late and early) or any(_before(place, after, before) for before, after in pairs)
    if misplaced:
        orders = "; or ".join(", ".join(order) for order in ORDERS.values())
        raise Unsupported(
            f"samplers cannot apply in the order {', '.join(working)}; there are two orders: {orders}", field=_FIELD
        )
    return Arranged(MappingProxyType(values), late)


def _before(place: Mapping[str, int], one: str, other: str) -> bool:
    return one in place and other in place and place[one] < place[other]


def _owner(name: str) -> str | None:
    """Return the sampler that a parameter belongs to or turns on; None if another parameter turns it on."""
    if name in _PENALTIES:
        return "penalties"
    return name if name in NEUTRAL else SWITCHES.get(name)


def _neutral(name: str) -> float:
    return NEUTRAL[name] if name in NEUTRAL else NUMBERS[name].default


def _works(sampler: str, values: Mapping[str, float]) -> bool:
    """Return whether a sampler changes anything; no cut does if the likeliest token is taken."""
    if sampler == "penalties":
        return any(values[name] != NEUTRAL[name] for name in _PENALTIES)
    if sampler == "temperature":
        return values[sampler] != NEUTRAL[sampler] or values.get("dynatemp_range", 0.0) > 0
    switch = next((name for name, owner in SWITCHES.items() if owner == sampler), None)
    if switch is not None:
        return not is_off(switch, values[switch]) and (sampler == "dry" or values["temperature"] != 0)
    if sampler not in values or values["temperature"] == 0:
        return False
    return values[sampler] > 0 if sampler == "top_k" else values[sampler] != NEUTRAL[sampler]


def _names(value: object) -> list[str]:
    """Return the samplers of a list by the names used here. Raise if one occurs twice."""
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise InvalidRequest("samplers must be a list of names, or a text of their letters", field=_FIELD)
    if len(value) > _MOST:
        raise InvalidRequest(f"samplers holds {len(value)} samplers; the limit is {_MOST}", field=_FIELD)
    names: list[str] = []
    for one in value:
        if not isinstance(one, str):
            raise InvalidRequest("samplers must hold names of samplers, which are texts", field=_FIELD)
        name = _LETTERS.get(one, "") if isinstance(value, str) else one[:_MOST].lower().replace("-", "_")
        name = _SYNONYMS.get(name, name)
        if name == "infill":
            raise Unsupported("samplers names infill, and this sampler is not supported", field=_FIELD)
        known_names = (*ORDERS["default"], *_BEYOND, *_OFF)
        if name not in known_names:
            known = "the letters edskypmxt" if isinstance(value, str) else ", ".join(known_names)
            raise InvalidRequest(f"samplers holds {one[:_MOST]!r}, expected {known}", field=_FIELD)
        if name in names:
            raise Unsupported(f"samplers names {name} twice; a sampler applies once", field=_FIELD)
        names.append(name)
    return names
