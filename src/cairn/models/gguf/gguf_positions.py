"""The lists that divide the rotary frequencies of a GGUF file's model."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from cairn.models.files import Fields
from cairn.models.gguf.reader import Gguf
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import MAX_CONTEXT, NEVER, RopeScaling

FACTORS = "rope_freqs.weight"
"""The tensor that divides the rotary frequencies, as models with llama3's scaling have it."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Those of models that have one for contexts as long as they were first trained for, and one for longer contexts."""


def factors(gguf: Gguf, turned: int, name: str = FACTORS) -> tuple[float, ...]:
    """A tensor's numbers, one for each pair of the `turned` numbers of a head; () where there is none."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.kind.name != "F32" or tensor.shape != (turned // 2,):
        raise ModelFileError(f"{tensor.path}: {name} must be F32 of shape [{turned // 2}]")
    values = gguf.blocks(name).view("<f4").reshape(-1)
    # What is divided by the last is not turned at all.
    if not (((values >= 1e-3) & (values <= 1e6)) | np.isclose(values, NEVER)).all():
        raise ModelFileError(f"{tensor.path}: {name} must hold numbers from 0.001 to 1e+06")
    return tuple(NEVER if one > 1e6 else one for one in values.tolist())


def long_rope(keys: Fields, gguf: Gguf, turned: int) -> dict[str, Any]:
    """The scalings of a spec that has one for long contexts; {} where the file has no such factors."""
    short, long = factors(gguf, turned, SHORT), factors(gguf, turned, LONG)
    if not (short or long):
        return {}
    if not (short and long):
        raise ModelFileError(f"{keys.path}: of {SHORT} and {LONG} one is missing")
    scaling = RopeScaling(
        factors=short,
        original_context=keys.integer("rope.scaling.original_context_length", 2, MAX_CONTEXT),
        attention_factor=keys.number("rope.scaling.attn_factor", 1e-6, 1e6, 1.0),
    )
    return {"rope_scaling": scaling, "long_rope": msgspec.structs.replace(scaling, factors=long)}
