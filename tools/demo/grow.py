"""A trained network made deeper or narrower without changing much of what it says, so that training goes on from it."""

import re

import torch
from torch import Tensor

from .network import Shape

LAYER = re.compile(r"layers\.(\d+)\.(.+)")
Weights = dict[str, Tensor]


def grown(weights: Weights, shape: Shape) -> Weights:
    """The weights (names of `Network`) in another depth and feed-forward width.

    Added layers stand evenly between the old ones, each a copy of the one before it whose two outputs are zero, so that
    it says nothing at first. Of the feed-forward neurons those stay whose weights are the largest.
    """
    layers: dict[int, Weights] = {}
    for name, tensor in weights.items():
        if found := LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
    count, before = shape.num_hidden_layers, -1
    result = {name: tensor for name, tensor in weights.items() if not LAYER.fullmatch(name)}
    for index in range(count):
        source = index * len(layers) // count
        layer = _narrowed(layers[source], shape.intermediate_size)
        if source == before:
            silent = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            layer = {name: torch.zeros_like(t) if name in silent else t.clone() for name, t in layer.items()}
        before = source
        result |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return result


def _narrowed(layer: Weights, width: int) -> Weights:
    gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.argsort(descending=True)[:width].sort().values
    return layer | {
        "mlp.gate_proj.weight": gate[kept],
        "mlp.up_proj.weight": up[kept],
        "mlp.down_proj.weight": down[:, kept],
    }
