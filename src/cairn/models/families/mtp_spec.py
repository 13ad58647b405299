"""A model's MTP head (multi-token prediction): one layer after the model's last, as files have it.

It takes the hidden state of a place after the model's last norm and the embedding of the token that follows, joins them
and runs one layer of the model's own kind, a norm and the model's output: the logits of the token after that one. For
each further token it takes its own hidden state after its norm, and the token that it gave.

Two layouts of safetensors are known: `mtp.*` (Qwen3-Next, Qwen3.5) and layer number `num_hidden_layers` (DeepSeek V3,
GLM-4.5). GGUF files have that layer, too, and its own tensors as `blk.N.nextn.*`. Files may repeat the embedding and
the output in it, which are the model's. Of several such layers the first is used.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cairn.types.model_spec import Embedding, ModelSpec

JOIN, EMBEDDING_NORM, STATE_NORM = (f"ahead.{name}.weight" for name in ("join", "embedding_norm", "state_norm"))
"""Matrix [H, 2 H] over the normed embedding beside the normed state, and the two norms."""
_NORM = "model.norm.weight"

_APART = {
    "fc.weight": JOIN,
    "pre_fc_norm_embedding.weight": EMBEDDING_NORM,
    "pre_fc_norm_hidden.weight": STATE_NORM,
    "norm.weight": _NORM,
}
"""Tensors of the layout `mtp.*` outside of its layer."""
_BEHIND = {
    "eh_proj.weight": JOIN,
    "enorm.weight": EMBEDDING_NORM,
    "hnorm.weight": STATE_NORM,
    "shared_head.norm.weight": _NORM,
}
"""The head's own tensors in a layer behind the last."""
_NEXTN = {
    "nextn.eh_proj.weight": JOIN,
    "nextn.enorm.weight": EMBEDDING_NORM,
    "nextn.hnorm.weight": STATE_NORM,
    "nextn.shared_head_norm.weight": _NORM,
}
"""The same in GGUF files."""
_SHARED = frozenset(
    (
        *("embed_tokens.weight", "shared_head.head.weight"),
        *("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"),
    )
)


def one_layer_name(name: str, layers: int) -> str:
    """Return the name of a stored tensor of the head as if it were a model of one layer; "" for all others.

    `layers`: those of the model.
    """
    apart, behind = name.removeprefix("mtp."), name.removeprefix(f"model.layers.{layers}.")
    if apart != name:
        return _APART.get(apart) or (f"model.{apart}" if apart.startswith("layers.0.") else "")
    return "" if behind == name or behind in _SHARED else _BEHIND.get(behind, f"model.layers.0.{behind}")


def one_layer_gguf_name(name: str, layers: int, *, normed: bool) -> tuple[str, bool]:
    """Return a GGUF tensor's name as `one_layer_name` does, and whether that is ours already, not GGUF's.

    `normed`: whether the head has a last norm of its own; otherwise it is the model's.
    """
    if name == "output_norm.weight" and not normed:
        return _NORM, True
    behind = name.removeprefix(f"blk.{layers}.")
    if behind == name or behind in _SHARED:
        return "", False
    return (_NEXTN[behind], True) if behind in _NEXTN else (f"blk.0.{behind}", False)


def ahead_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the head's tensors outside of its layer."""
    hidden = spec.hidden
    return {_NORM: (hidden,), JOIN: (hidden, 2 * hidden), EMBEDDING_NORM: (hidden,), STATE_NORM: (hidden,)}


def mtp_spec(spec: ModelSpec, names: Iterable[str], *, gguf: bool) -> ModelSpec | str | None:
    """Return the spec of the head among a model's stored tensors; None if there is none.

    A sentence if there is one that cannot be used.
    """
    known = set(names)
    if not gguf:
        prefix = "mtp." if any(name.startswith("mtp.") for name in known) else f"model.layers.{spec.layers}."
        join = "fc.weight" if prefix == "mtp." else "eh_proj.weight"
        layer, router = ("layers.0." if prefix == "mtp." else ""), "mlp.gate.weight"
    else:
        prefix, join, layer, router = f"blk.{spec.layers}.", "nextn.eh_proj.weight", "", "ffn_gate_inp.weight"
    if spec.encoder is not None or not any(name.startswith(prefix) for name in known):
        return None
    full = next((group for group in spec.groups if group.kind == "full"), None)
    if full is None or spec.uneven is not None or spec.mlp_layers is not None or not _has(known, prefix + join):
        return f"{spec.name}: its layers for further tokens (MTP) are set aside: their form is not supported"
    sparse = spec.experts is not None and _has(known, f"{prefix}{layer}{router}")
    return msgspec.structs.replace(
        spec,
        name=f"{spec.name} (MTP)",
        layers=1,
        groups=(msgspec.structs.replace(full, layers=(0,)),),
        experts=msgspec.structs.replace(spec.experts, layers=(0,)) if spec.experts is not None and sparse else None,
        recurrence=None,
        unturned=(0,) if full.layers[-1] in spec.unturned else (),
        kind="chat",
        embedding=Embedding(),
        judge=None,
        identity=spec.identity + b" ahead",
        ahead=spec.layers,
    )


def _has(names: set[str], wanted: str) -> bool:
    """Tell whether a tensor is there, plain or in the parts of a quantised one."""
    stem = wanted.removesuffix("weight")
    return wanted in names or any(name.startswith(stem) for name in names)
