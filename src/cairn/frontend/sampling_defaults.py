"""The sampling defaults of a model: what applies to a parameter that a request does not set, and why."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from cairn.config.config import Config
from cairn.frontend.sampling_extras import NEUTRAL
from cairn.types.model_spec import ModelSpec

Source = Literal["option", "model", "makers", "default"]

DRAW = {"temperature": 0.8, "top_k": 40.0, "top_p": 0.95, "min_p": 0.05}
"""Cairn's own defaults, in the order in which people name them."""
CUTS = ("top_k", "top_p", "min_p")
_OWNERS: dict[Source, str] = {
    "option": "the server's options",
    "model": "the model's own",
    "makers": "its makers' card",
    "default": "Cairn's defaults",
}


class Applied(NamedTuple):
    """The value of a sampling parameter that a request does not name."""

    value: float
    source: Source
    """`option`: an option of the server; `model`: the model's files, which also turn off what their recipe leaves out;
    `makers`: the makers' model card; `default`: Cairn's own value."""


def with_options(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with the sampling defaults that options name."""
    named = {name: getattr(config, f"default_{name}") for name in DRAW}
    asked = {name: float(value) for name, value in named.items() if value is not None}
    return msgspec.structs.replace(spec, asked=asked)


def sampling_defaults(spec: ModelSpec, *, thinking: bool = False) -> dict[str, Applied]:
    """Return the default of every sampling parameter of a model by name, in a fixed order.

    `thinking`: for an answer with reasoning, for which some makers recommend other values.

    Cairn's own defaults suit small models. Each option (`with_options`) comes before everything else. Next come the
    model's files (generation_config.json, `general.sampling.*` of GGUF), by what they set:

        top_k, top_p or min_p           they are the makers' whole recipe: those of the three that are missing are off,
                                        a missing temperature is 1, as in the libraries that the makers use
        only a temperature, or greedy   it applies together with Cairn's top_k, top_p and min_p
        none of these                   the makers' model card (`MakersSampling`) applies, or else Cairn's defaults

    Some cards have values for answers with reasoning and others for those without. Files that only repeat one of the
    two do not replace the other.
    """
    card, own = _card(spec, thinking), spec.defaults
    if card:
        own = {name: value for name, value in own.items() if name not in DRAW}
    recipe = any(name in own for name in CUTS)
    defaults = {}
    for name, neutral in NEUTRAL.items():
        if name in spec.asked:
            defaults[name] = Applied(spec.asked[name], "option")
        elif name in own:
            defaults[name] = Applied(own[name], "model")
        elif name in card:
            defaults[name] = Applied(card[name], "makers")
        elif recipe and name in DRAW:
            defaults[name] = Applied(neutral, "model")
        else:
            defaults[name] = Applied(DRAW.get(name, neutral), "default")
    return defaults


def _card(spec: ModelSpec, thinking: bool) -> dict[str, float]:
    """Return the values of the makers' card for all of `DRAW`; empty if the model's files come first."""
    if spec.makers is None:
        return {}
    draw = {name: neutral for name, neutral in NEUTRAL.items() if name in DRAW}
    rows = draw | spec.makers.values, draw | (spec.makers.thinking or spec.makers.values)
    row, other = (rows[1], rows[0]) if thinking else rows
    said = {name: value for name, value in spec.defaults.items() if name in DRAW}
    repeats = spec.makers.thinking and draw | said == {name: other[name] for name in DRAW}
    return row if not said or repeats else {}


def described(spec: ModelSpec) -> str:
    """Describe a model's defaults in a line; those for answers with reasoning behind them, if they differ."""
    plain, thinking = (sentence(sampling_defaults(spec, thinking=on)) for on in (False, True))
    return plain if plain == thinking else f"{plain}; with reasoning: {thinking}"


def sentence(applied: Mapping[str, Applied]) -> str:
    """Describe the parameters in a line: `temperature 0.6, top_p 0.9 (the model's own)`, without those that are off."""
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
    """Return whether a parameter changes nothing at this value."""
    return value == NEUTRAL[name] or (name == "top_k" and value <= 0)
