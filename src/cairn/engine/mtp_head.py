"""Whether a model's MTP head, which predicts further tokens, is loaded beside it, and what memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.config.config import Config
from cairn.engine.memory import WeightMemory, beside_weights, kernels_of, weight_memory
from cairn.kernels.devices import KEEPS_ANSWERS, MLX, resolved
from cairn.models.families.families import FAMILIES
from cairn.models.families.mtp_spec import mtp_spec
from cairn.models.files import is_gguf
from cairn.models.packing.weight_format import Form, HeldWeights
from cairn.models.safetensors.weights import open_weights, stored_names
from cairn.types.errors import ModelError
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec

STEP_TOKENS = 256
"""Most tokens that a head reads at once."""
_ASKED = 3
_POOL_TOKENS = 1 << 14
"""Tokens of all sequences together for which a head has KV."""


class FittedHead(NamedTuple):
    """A head whose files were checked."""

    spec: ModelSpec
    weights: HeldWeights
    memory: WeightMemory
    blocks: tuple[int, ...]
    config: Config

    @property
    def bytes(self) -> int:
        """Bytes of its weights, KV and buffers."""
        return self.memory.held + sum(beside_weights(self.spec, self.config, self.blocks))


def guesses(config: Config) -> bool:
    """Return whether sequences may speculate; with `auto` only where guesses never change a bit of an answer."""
    if config.speculate == "auto" and config.engine != "fake":
        return resolved(config.device) in KEEPS_ANSWERS
    return config.speculate != "off"


def guess_note(config: Config) -> str:
    """Return a sentence about guesses, for a device where they may change the last bits of an answer; else ""."""
    device = resolved(config.device)
    if config.engine == "fake" or device in KEEPS_ANSWERS or config.speculate == "off":
        return ""
    moves = f"on {device} a step of several tokens of a sequence may move the last bits of its answer"
    if config.speculate == "auto":
        return f"guessed tokens are off: {moves}; --speculate {_ASKED} turns them on nevertheless"
    return f"guessed tokens are on, and {moves}; --speculate off keeps it"


def parallel_note(spec: ModelSpec, folder: Path, config: Config) -> str:
    """Return a sentence if the model has an MTP head, which is not loaded with several ranks; else ""."""
    if config.speculate == "off" or _found(spec, folder) is None:
        return ""
    return f"{spec.name}: its head for further tokens (MTP) is set aside: ranks (--tp) do not share it"


def _found(spec: ModelSpec, folder: Path) -> ModelSpec | str | None:
    """Return the result of `mtp_spec`; None, without reading files, for a family that has no such heads."""
    gguf = is_gguf(folder)
    family = FAMILIES.get(spec.architecture)
    if not gguf and (family is None or not family.ahead):
        return None
    return mtp_spec(spec, stored_names(folder), gguf=gguf)


def fit_head(spec: ModelSpec, folder: Path, config: Config, form: Form) -> FittedHead | str | None:
    """Return the MTP head in a model's files; None if there is none, or it is not wanted.

    Return a sentence if it cannot be used: its form is unknown, or its tensors are not the expected ones. Only headers
    are read. `form`: that of the model's weights.
    """
    if not guesses(config) or config.draft_model is not None or spec.kind != "chat":
        return None
    found = _found(spec, folder)
    if found is None or isinstance(found, str):
        return found
    aside = f"{spec.name}: its head for further tokens (MTP) is set aside"
    if kernels_of(config) == MLX:
        return f"{aside}: it does not run with MLX"
    try:
        weights = HeldWeights(open_weights(folder, found), form)
    except ModelError as error:
        return f"{aside}: {error}"
    limited = msgspec.structs.replace(config, max_running=1, step_tokens=min(config.step_tokens, STEP_TOKENS))
    blocks = (_POOL_TOKENS // BLOCK_TOKENS,)
    return FittedHead(found, weights, weight_memory(found, weights, kernels_of(config)), blocks, limited)
