"""How a model is sampled where a request says nothing: each value, and where it comes from.

Cairn's own defaults are those that small models talk sense with. What a model's files (generation_config.json,
`general.sampling.*` of GGUF) say comes before them:

    a cut is named (top_k, top_p, min_p)    the makers' whole recipe: the other cuts are off, a temperature that is not
                                            named is 1, as in the libraries in which they found their values
    only a temperature, or greedy           it applies, with Cairn's cuts, as where a request names a temperature alone
    neither                                 Cairn's defaults; a penalty alone says nothing of the draw
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Literal, NamedTuple

from cairn.types import ModelSpec

Source = Literal["model", "default"]

DRAW = {"temperature": 0.8, "top_k": 40.0, "top_p": 0.95, "min_p": 0.05}
"""Cairn's own, in the order in which people name them."""
CUTS = ("top_k", "top_p", "min_p")
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
_OWNERS: dict[Source, str] = {"model": "the model's own", "default": "Cairn's defaults"}


class Applied(NamedTuple):
    """One sampling parameter as it applies where a request does not name it."""

    value: float
    source: Source
    """`model`: its own files say so, or leave it out of their recipe; `default`: Cairn's."""


def sampling_defaults(spec: ModelSpec) -> dict[str, Applied]:
    """Every sampling parameter of a model by name, in a fixed order."""
    said = spec.defaults
    recipe = any(name in said for name in CUTS)
    found = {}
    for name, neutral in NEUTRAL.items():
        if name in said:
            found[name] = Applied(said[name], "model")
        elif recipe and name in DRAW:
            found[name] = Applied(neutral, "model")
        else:
            found[name] = Applied(DRAW.get(name, neutral), "default")
    return found


def sentence(applied: Mapping[str, Applied]) -> str:
    """What applies, in a line: `temperature 0.6, top_p 0.9 (the model's own)`. What is off is left out."""
    greedy = applied["temperature"].value == 0
    parts: list[tuple[str, Source]] = []
    for name, (value, source) in applied.items():
        if name == "temperature" and greedy:
            parts.append(("greedy", source))
        elif name == "temperature" or (not off(name, value) and not (greedy and name in CUTS)):
            parts.append((f"{name} {value:g}", source))
    grouped = groupby(parts, key=lambda part: part[1])
    return ", ".join(f"{', '.join(text for text, _ in some)} ({_OWNERS[source]})" for source, some in grouped)


def off(name: str, value: float) -> bool:
    """Whether a parameter changes nothing at this value."""
    return value == NEUTRAL[name] or (name == "top_k" and value <= 0)
