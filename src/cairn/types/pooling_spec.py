"""What a model is beyond a decoder that generates, as data: vectors made of hidden states, judges, encoders."""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.types.layer_spec import RotaryPositions

Pooling = Literal["cls", "mean", "last"]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix that a pooled state is multiplied with, and what follows it."""

    place: str
    """Where its weights are: a folder in the model's own."""
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["", "tanh"] = ""
    inside: bool = False
    """Whether its weights are among the model's own, under the name of its place."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """How a text's vector is made of its tokens' hidden states."""

    pooling: Pooling = "last"
    """The first token's, the mean of all, or the last token's."""
    max_tokens: int | None = None
    """Longest text in tokens, where that is less than the model's context."""
    prompts: dict[str, str] = {}
    """Words that stand before a text, by the names of what it is for."""
    prompt: str | None = None
    """The name of those that every text gets that names no others."""
    dense: tuple[Dense, ...] = ()
    """What the pooled state goes through, in order."""


class JudgeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a decoder judges a pair of texts: by what it would say, the logit of `yes` less that of `no`."""

    yes: int
    no: int
    """Rows of the output's matrix: token ids."""
    apart: bool = False
    """Whether the two rows are a matrix of their own."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an encoder of a transformer: every token sees all of its text, and nothing is kept."""

    positions: Literal["learned", "rotary"] = "learned"
    first_position: int = 0
    """Row of the learned positions' table that the first token has."""
    position_rows: int = 0
    type_rows: int = 0
    """Rows of the tables of positions and of token types; 0 where there is none."""
    norm_first: bool = False
    """Whether norms stand before attention and MLP, and one at the end, and not behind each."""
    norm_bias: bool = True
    fused: bool = False
    """Whether queries, keys and values are one matrix, and gates and what they let through another."""
    gated: bool = False
    windows: tuple[int, ...] = ()
    """Of each layer: how far a token sees to both sides, itself counted; 0: all. () for all layers."""
    local: RotaryPositions | None = None
    """The positions of layers with a window, where they have their own."""
    labels: int = 0
    """Scores of the head of a model that judges texts; 0 where there is none."""
    head: Literal["", "tanh", "norm"] = ""
    """What stands between the pooled state and its scores: a matrix and tanh, or a matrix, GELU and a norm."""
    head_bias: bool = True

    def window(self, layer: int) -> int:
        """A layer's window."""
        return self.windows[layer] if self.windows else 0
