"""What a GGUF file says that its model was made for: pooling, matrices behind it, judging.

Files number poolings (`pooling_type`): 0 none, 1 mean, 2 first token, 3 last token, 4 ranking.
"""

from __future__ import annotations

from typing import Any

from cairn.models.files import Fields
from cairn.models.gguf.reader import Gguf
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import Dense, Embedding, JudgeSpec, Pooling

ENCODERS = ("bert", "modern-bert", "nomic-bert")
"""`general.architecture` of encoders; what each means is in `encoder`."""
POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
NO_POOLING, RANK = 0, 4
JUDGE = "cls.output.weight"
"""The two rows of the output by which a decoder judges, yes first."""
DENSE = ("dense_2", "dense_3")
KEYS = ("pooling_type", "classifier.output_labels", *(f"{one}_feat_{way}" for one in DENSE for way in ("in", "out")))
"""What is understood of this below an architecture's name."""
LABELS = ["yes", "no"]


def pooling_of(keys: Fields) -> Pooling | None:
    """How a file says that states are pooled; None where it says nothing of it, or that they are not."""
    number = keys.integer("pooling_type", 0, 1 << 16, NO_POOLING)
    if number == NO_POOLING:
        return None
    if number not in POOLINGS:
        known = ", ".join(f"{one} ({name})" for one, name in POOLINGS.items())
        raise ModelError(f"{keys.path}: {keys.prefix}pooling_type {number} is not supported; supported are {known}")
    return POOLINGS[number]


def ranks(keys: Fields) -> bool:
    """Whether a file says that its model judges pairs."""
    return keys.integer("pooling_type", 0, 1 << 16, NO_POOLING) == RANK


def purpose(keys: Fields, gguf: Gguf, hidden: int, both: bool) -> dict[str, Any]:
    """A decoder's `kind`, `embedding` and `judge`. `both`: its tokens see what follows them too."""
    if ranks(keys):
        return {"kind": "rerank", "judge": _judge(keys, gguf, hidden)}
    pooling = pooling_of(keys) or ("mean" if both else None)
    if pooling is None:
        return {}
    return {"kind": "embed", "embedding": Embedding(pooling=pooling, dense=_dense(gguf, hidden))}


def _judge(keys: Fields, gguf: Gguf, hidden: int) -> JudgeSpec:
    tensor = gguf.tensors.get(JUDGE)
    if tensor is None or tensor.shape != (2, hidden) or keys.values.get("classifier.output_labels", LABELS) != LABELS:
        raise ModelError(
            f"{keys.path}: {keys.prefix}pooling_type is ranking, for which {JUDGE} of shape [2, {hidden}] with the "
            "labels yes and no is supported"
        )
    return JudgeSpec(yes=0, no=1, apart=True)


def _dense(gguf: Gguf, hidden: int) -> tuple[Dense, ...]:
    found, given = list[Dense](), hidden
    for name in DENSE:
        tensor = gguf.tensors.get(f"{name}.weight")
        if tensor is None:
            continue
        if len(tensor.shape) != 2 or tensor.shape[1] != given:
            raise ModelFileError(
                f"{tensor.path}: the tensor {tensor.name} must be [out, {given}], found the shape {list(tensor.shape)}"
            )
        given = tensor.shape[0]
        found.append(Dense(place=name, inputs=tensor.shape[1], outputs=given, bias=False, inside=True))
    return tuple(found)
