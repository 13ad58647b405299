"""The activation of MLPs that a config.json names."""

from __future__ import annotations

from typing import Literal

from cairn.models.families.family import Family
from cairn.models.files import Fields
from cairn.types.errors import ModelError

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "gelu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""`hidden_act` in configs -> the kernels' name."""


def activation(
    config: Fields, family: Family
) -> Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu2", "xielu"]:
    """Return `ModelSpec.activation`; raise `ModelError` for one that is not supported."""
    if family.activation is not None:
        if family.activation == "xielu" and config.text("hidden_act", "xielu") != "xielu":
            raise ModelError(f"{config.path}: hidden_act other than xielu is not supported")
        return family.activation
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    name = config.text(key, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{config.path}: {key} {name[:80]!r} is not supported; supported are {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]
