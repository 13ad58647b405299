"""Samplers beyond the usual ones, as clients ask for them -> `SamplingExtras`. Ranges, names and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from cairn.types.errors import InvalidRequest, Unsupported
from cairn.types.sampling_params import SamplingExtras

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
"""The temperature before the cuts, as in transformers and vLLM, or after them."""

_FIELD = "samplers"
_WHOLE: Mapping[SamplerOrder, tuple[str, ...]] = {
    "default": ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    "llama": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
}
"""The same with the samplers that are off unless a parameter turns them on."""
_MOST = 64
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p"},
    **{"x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p"},
}
_SYNONYMS = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "nucleus": "top_p"}
_BEYOND = tuple(SWITCHES.values())
_OFF = ("adaptive_p", "tfs_z")
"""Samplers that are not built, and that a parameter turns on: which the table of accepted fields refuses."""
_CHAIN = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")
"""In which order samplers apply, the temperature aside; top_k and min_p keep the same tokens in either."""
_LOOK = frozenset({"typ_p", "top_p", "min_p", "xtc"})
"""Those that look at probabilities, so that it matters whether the temperature comes before."""


class Arranged(NamedTuple):
    """Sampling parameters by name, and how they are applied."""

    values: Mapping[str, float]
    """Neutral where the sampler is not in the list."""
    temperature_last: bool
    """Where that makes a difference."""


def arrange(values: Mapping[str, float], samplers: object = None, default: SamplerOrder = "default") -> Arranged:
    """`values`, of every name in `NEUTRAL` and of `sampling_extras.NUMBERS`, as the samplers that a request lists apply
    them; None: in the order `default`. InvalidRequest or Unsupported for a list that cannot be followed."""
    listed = _WHOLE[default] if samplers is None else _names(samplers)
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
    return Arranged(values, late)


def _before(place: Mapping[str, int], one: str, other: str) -> bool:
    return one in place and other in place and place[one] < place[other]


def _owner(name: str) -> str | None:
    """The sampler that a parameter belongs to, or that it turns on; None where it belongs to one that others do."""
    if name in _PENALTIES:
        return "penalties"
    return name if name in NEUTRAL else SWITCHES.get(name)


def _neutral(name: str) -> float:
    return NEUTRAL[name] if name in NEUTRAL else NUMBERS[name].default


def _works(sampler: str, values: Mapping[str, float]) -> bool:
    """Whether a sampler changes anything; where the likeliest token is taken, no cut does."""
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


def _names(given: object) -> list[str]:
    """The samplers of a list, by the names used here. Each at most once."""
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidRequest("samplers must be a list of names, or a text of their letters", field=_FIELD)
    if len(given) > _MOST:
        raise InvalidRequest(f"samplers holds {len(given)} samplers; the limit is {_MOST}", field=_FIELD)
    found: list[str] = []
    for one in given:
        if not isinstance(one, str):
            raise InvalidRequest("samplers must hold names of samplers, which are texts", field=_FIELD)
        name = _LETTERS.get(one, "") if isinstance(given, str) else one[:_MOST].lower().replace("-", "_")
        name = _SYNONYMS.get(name, name)
        if name == "infill":
            raise Unsupported("samplers names infill, and this sampler is not built", field=_FIELD)
        known_names = (*ORDERS["default"], *_BEYOND, *_OFF)
        if name not in known_names:
            known = "the letters edskypmxt" if isinstance(given, str) else ", ".join(known_names)
            raise InvalidRequest(f"samplers holds {one[:_MOST]!r}, expected {known}", field=_FIELD)
        if name in found:
            raise Unsupported(f"samplers names {name} twice; a sampler applies once", field=_FIELD)
        found.append(name)
    return found
