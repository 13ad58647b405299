"""In which order samplers apply, as llama.cpp's clients send it: a list of names, or a text of their letters.

Names and letters are those of llama.cpp's tools/server/README.md and of its option `--sampler-seq`. As there, what is
not in the list does not apply. What changes nothing may stand anywhere in it. The rest must stand in one of two orders,
or so that the same tokens are kept: top_k may change places with the temperature and with min_p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from cairn.frontend.sampling_extras import NUMBERS, SWITCHES, is_off
from cairn.types.errors import InvalidRequest, Unsupported

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
