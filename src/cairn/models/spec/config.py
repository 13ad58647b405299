"""config.json, generation_config.json and tokenizer files, or the metadata of a GGUF file -> `ModelSpec`.

Field names and defaults are those of transformers' configuration classes (`configuration_llama.py` and its siblings,
`modeling_rope_utils.py`). Families are rows of one table. An unsupported family is refused by name, and so is any
unknown config field that would change a number.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from cairn.kernels.elementary import power_of
from cairn.models.families.activation_spec import activation
from cairn.models.families.config_keys import decoder_row, understood
from cairn.models.families.embedding_files import check_width, embedding_of, judge_of
from cairn.models.families.encoder_spec import encoder_spec, is_encoder
from cairn.models.families.families import family_of, sees_both, text_config
from cairn.models.families.family import Family
from cairn.models.families.latent_spec import latent_fields
from cairn.models.families.moe_spec import layer_count, mixture
from cairn.models.families.positions_spec import (
    by_type,
    check_divisors,
    global_positions,
    local_positions,
    long_rope,
    query_scaling,
    rope_scaling,
    rotary,
    stretched,
    unturned,
    unturned_scaling,
)
from cairn.models.families.recurrent_spec import mlp_layers, recurrence, with_state
from cairn.models.families.uneven_spec import one_width, proportional, uneven_fields
from cairn.models.files import Fields, is_gguf, read_json, reading
from cairn.models.gguf.encoder import gguf_encoder_spec
from cairn.models.gguf.reader import read_gguf
from cairn.models.gguf.spec import cache_groups, gguf_spec
from cairn.models.gguf.vocabulary import is_encoder as is_gguf_encoder
from cairn.models.hub.digests import file_digest
from cairn.models.hub.hub import model_name
from cairn.models.safetensors.coded_weights import CodedWeights
from cairn.models.safetensors.weights import has_own_head, open_weights, stored_scheme, weight_files
from cairn.models.spec.generation_config import end_ids, sampling_defaults
from cairn.models.spec.judge import with_judge
from cairn.models.spec.makers_sampling import makers_sampling
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    CacheGroup,
    Embedding,
    Experts,
    Kind,
    ModelSpec,
    RopeScaling,
    RotaryPositions,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_spec(folder: Path, *, identify: bool = True) -> ModelSpec:
    """Return the spec of the model in a folder or a GGUF file.

    With `identify`, every file is read once to compute the model's identity. Raise `ModelFileError` for a missing or
    wrong file or field, `ModelError` for an unsupported architecture or option.
    """
    with reading(folder):
        spec = with_judge(_load_gguf(folder) if is_gguf(folder) else _load(folder), folder)
        spec = msgspec.structs.replace(spec, makers=makers_sampling(spec, folder))
        return identified(spec, folder) if identify else spec


def _load_gguf(path: Path) -> ModelSpec:
    gguf = read_gguf(path)
    return gguf_encoder_spec(gguf) if is_gguf_encoder(gguf) else gguf_spec(gguf)


def check_decodes(spec: ModelSpec) -> ModelSpec:
    """Return the spec if it is a decoder's; raise `ModelError` for an encoder or an embedding model."""
    if spec.whole:
        named = f"an encoder ({spec.architecture})" if spec.encoder is not None else "made for embeddings"
        raise ModelError(f"{spec.name} is {named}: it generates nothing and keeps no KV")
    return spec


def identified(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the spec with the identity of the model's files. Reads every file once."""
    with reading(folder):
        return msgspec.structs.replace(spec, identity=identity_of(spec, folder))


def _load(folder: Path) -> ModelSpec:
    if not folder.is_dir():
        raise ModelFileError(
            f"{folder}: expected a .gguf file, or a folder with config.json, a tokenizer and safetensors files"
        )
    config = Fields(read_json(folder / "config.json"), folder / "config.json")
    if is_encoder(config):
        return encoder_spec(config, folder)
    modules = embedding_of(folder)
    judge = judge_of(folder)
    kind: Kind = "rerank" if judge is not None else "chat" if modules is None else "embed"
    architecture, family = family_of(config, bare=modules is not None)
    config = understood(text_config(config, family), architecture, decoder_row(architecture))
    heads = config.integer("num_attention_heads", 1, 1 << 14)
    hidden = config.integer("hidden_size", 1, 1 << 20)
    layers = layer_count(config, family)
    vocab = config.integer("vocab_size", 1, MAX_VOCAB)
    scaled = family.sinks or family.activation == "xielu"  # transformers' default scaling of these is not plain
    if scaled and not (config.has("rope_scaling") or config.has("rope_parameters")):
        raise ModelError(f"{config.path}: rope_scaling is missing")
    rope, theta, context = _positions(config, family)
    if rope.kind == "yarn" and _bias(config, family.plain_norm):  # the norm after the rotation cancels the factor
        rope = msgspec.structs.replace(rope, attention_factor=1.0)
    if family.local_rope:
        context = config.integer("max_position_embeddings", 2, MAX_CONTEXT)  # already the scaled length
    head_dim = 2 if family.latent else config.integer("head_dim", 2, MAX_HEAD_DIM, family.head_dim or hidden // heads)
    kept = recurrence(config, family, layers, hidden)
    alone = (mlp_layers(config, layers) if family.mixture else ()) if family.alone else None
    experts = mixture(config, family, layers)
    spec = ModelSpec(
        name=model_name(folder),
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", 1, heads, _kv_heads(config, family) or heads),
        head_dim=head_dim,
        ffn=_ffn(config, family, experts),
        vocab=vocab,
        context=context,
        norm_eps=config.number(family.eps or _eps(config), 0.0, 1.0, 1e-6),
        layer_norms=family.norms != "rms",
        norm_bias=family.norms == "layer, bias",
        rope_theta=theta * power_of(stretched(config, family), head_dim / max(1, head_dim - 2)),
        rope_scaling=rope,
        long_rope=long_rope(config, family),
        activation=activation(config, family),
        qk_norm=_bias(config, family.qk_norm),
        qk_norm_whole=family.qk_norm_whole,
        qk_norm_apart=family.qk_norm_apart and _bias(config, family.qk_norm),
        late_norms=family.late_norms,
        pre_norms=family.pre_norms,
        sinks=family.sinks,
        experts=experts,
        unturned=_unturned(config, family, layers),
        query_scaling=query_scaling(config) if family.query_scaling else None,
        unturned_scaling=unturned_scaling(config) if family.window == "unturned" else None,
        plain_norm=_bias(config, family.plain_norm),
        rotary=rotary(config, head_dim) if family.rotary else None,
        qkv_bias=_bias(config, family.qkv_bias),
        out_bias=_bias(config, family.out_bias),
        mlp_bias=_bias(config, family.mlp_bias),
        **_multiplied(config, family, hidden, head_dim),
        both=sees_both(config),
        # An embedding model's files have no head, whatever its config says.
        tied=config.flag(_tied(config), False) or kind == "embed",
        groups=with_state(
            _groups(config, family, layers, context, RotaryPositions(theta=theta, scaling=rope)), kept, alone or ()
        ),
        recurrence=kept,
        mlp_layers=alone,
        mlp_gated=family.mlp_gated,
        parallel=family.parallel if not family.parallel_if or config.flag(family.parallel_if, False) else "",
        head_bias=family.head_bias,
        output_gate=family.output_gate,
        eos_ids=end_ids(config, folder, vocab),
        bos_id=next(iter(config.ids("bos_token_id", vocab, absent=True)), None),
        defaults=sampling_defaults(folder, vocab),
        kind=kind,
        embedding=modules or Embedding(),
        judge=judge,
    )
    own = latent_fields(config, family, layers, rope) | uneven_fields(config, family, spec.groups, layers)
    if own and kind != "chat":
        raise ModelError(f"{config.path}: a {architecture} that makes embeddings is not supported")
    spec = msgspec.structs.replace(spec, **own)
    if kind != "embed" and has_own_head(folder, spec):
        spec = msgspec.structs.replace(spec, tied=False)
    check_width(spec.embedding, hidden, folder)
    if family.long_rope:
        check_divisors(config, (rope, spec.long_rope), spec.turned)
    if spec.heads % spec.kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if spec.head_dim % 2:
        raise config.error("head_dim", "an even number, because rotary positions rotate pairs")
    return spec


def _positions(config: Fields, family: Family) -> tuple[RopeScaling, float, int]:
    """Return rope scaling, theta and context length of the layers without a window."""
    if family.uneven:
        return proportional(config, family)
    return rope_scaling(global_positions(config) if family.local_rope or family.unscaled else config, family)


def _eps(config: Fields) -> str:
    """Return the name of the field with the norms' epsilon."""
    return next((name for name in ("norm_eps", "layer_norm_epsilon") if config.has(name)), "rms_norm_eps")


def _tied(config: Fields) -> str:
    """Return the name of the field that ties the head to the embedding."""
    return "tie_embedding" if config.has("tie_embedding") else "tie_word_embeddings"


def _kv_heads(config: Fields, family: Family) -> int | None:
    """Return the family's default if the key is absent; an explicit null means as many as heads."""
    return None if "num_key_value_heads" in config.values else family.kv_heads


def _ffn(config: Fields, family: Family, experts: Experts | None) -> int:
    """Return the width of the dense MLP."""
    if family.streams:
        return one_width(config)
    if family.mixture == "granite" and experts is None:
        return config.integer("shared_intermediate_size", 1, 1 << 22)
    key = next((name for name in ("block_ff_dim", "intermediate_size_mlp") if config.has(name)), "intermediate_size")
    width = config.integer(key, 1, 1 << 22, experts.ffn if experts else None)
    if family.recurrence != "conv" or family.mixture or not config.flag("block_auto_adjust_ff_dim", True):
        return width
    part, step = (
        config.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0),
        config.integer("block_multiple_of", 1, 1 << 16, 256),
    )
    return -(-int(part * int(2 * width / 3)) // step) * step


def _unturned(config: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    if family.positions:
        named = config.text(family.positions, "nope")
        if named not in ("nope", "rope"):
            raise config.error(family.positions, "rope or nope")
        return tuple(range(layers)) if named == "nope" else ()
    if isinstance(family.unturned, str):
        all_alike: range | tuple[()] = range(layers) if family.unturned == "by window" else ()
        limited = _window_layers(config, family, layers) if _by_layer(config, family) else all_alike
        return tuple(layer for layer in range(layers) if layer not in limited)
    return unturned(config, layers) if family.unturned else ()


def _bias(config: Fields, rule: bool | str) -> bool:
    return config.flag(rule, False) if isinstance(rule, str) else rule


def _multiplied(config: Fields, family: Family, hidden: int, head_dim: int) -> dict[str, Any]:
    """Return the multipliers and post norms that differ from the plain decoder, as spec fields."""
    if family.gemma:
        return _gemma(config, family, hidden, head_dim)
    if family.logit_scale:
        return {"logit_scale": config.number("logit_scale", 1e-6, 1e6, 1.0)}
    if not family.multipliers:
        return {"post_norms": family.post_norms}
    return {
        "embedding_scale": config.number("embedding_multiplier", 1e-6, 1e6, 1.0),
        "attention_scale": config.number("attention_multiplier", 1e-6, 1e6, 1.0),
        "residual_scale": config.number("residual_multiplier", 1e-6, 1e6, 1.0),
        "logit_scale": 1 / config.number("logits_scaling", 1e-6, 1e6, 1.0),
    }


def _gemma(config: Fields, family: Family, hidden: int, head_dim: int) -> dict[str, Any]:
    """Return Gemma's spec fields that differ from the plain decoder."""
    scale = 1 / math.sqrt(config.number("query_pre_attn_scalar", 1e-6, 1e6))
    return {
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": scale if scale != 1 / math.sqrt(head_dim) else None,
        # A config may state it beside q and k norms, which replaced it: transformers then ignores it.
        "attention_softcap": 0.0 if family.qk_norm else config.number_or_zero("attn_logit_softcapping", 1e-3, 1e6, 0.0),
        "logit_softcap": config.number_or_zero("final_logit_softcapping", 1e-3, 1e6, 0.0),
    }


def _groups(
    config: Fields, family: Family, layers: int, context: int, positions: RotaryPositions
) -> tuple[CacheGroup, ...]:
    """Group layers by cache kind. A window as long as the context counts as full attention."""
    limited: list[int] = []
    window = 0
    if family.window == "all":
        if not _no_window(config):
            window = config.integer("sliding_window", 1, MAX_CONTEXT, 4096)
            limited = list(range(layers))
    elif family.window == "unturned":
        window, limited = _pieces(config, layers, context)
    elif _by_layer(config, family):
        window = config.integer("sliding_window", 1, MAX_CONTEXT, None if family.period else 4096)
        if sees_both(config):  # the config counts the tokens on both sides
            window = window // 2 + 1
        limited = _window_layers(config, family, layers)
    own = local_positions(config, family) if family.local_rope else None
    if family.unscaled:
        own = local_positions(config, family) if by_type(config) else RotaryPositions(theta=positions.theta)
        own = None if own == positions else own
    pieces = family.window == "unturned"
    return cache_groups(layers, limited, min(window, context), context, own, pieces=pieces)


def _pieces(config: Fields, layers: int, context: int) -> tuple[int, list[int]]:
    """Return the chunk size of chunked attention, and the layers that use it."""
    if "attention_chunk_size" in config.values and not config.has("attention_chunk_size"):
        return context, []
    whole = frozenset(unturned(config, layers))
    turned = [layer for layer in range(layers) if layer not in whole]
    if config.has("layer_types"):
        kinds = config.values["layer_types"]
        known = ("full_attention", "chunked_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise config.error("layer_types", f"a list of {layers} entries, each full_attention or chunked_attention")
        turned = [layer for layer, kind in enumerate(kinds) if kind == "chunked_attention"]
    return config.integer("attention_chunk_size", 1, MAX_CONTEXT, 8192), turned


def _by_layer(config: Fields, family: Family) -> bool:
    """Return whether some layers have a window."""
    if family.window == "by type":
        kinds = config.values.get("layer_types")
        return not _no_window(config) or not isinstance(kinds, list) or "sliding_attention" in kinds
    return family.window == "by layer" and config.flag("use_sliding_window", False) and not _no_window(config)


def _no_window(config: Fields) -> bool:
    """Return whether the window is an explicit null, which means full attention; a missing field means the default."""
    return "sliding_window" in config.values and not config.has("sliding_window")


def _window_layers(config: Fields, family: Family, layers: int) -> list[int]:
    if not config.has("layer_types") and family.period:
        period = config.integer("sliding_window_pattern", 1, 1 << 12, family.period)
        return [
            layer
            for layer in range(layers)
            if (layer + 1) % period and not (family.uneven and not family.streams and layer == layers - 1)
        ]
    if not config.has("layer_types"):
        return list(range(config.integer("max_window_layers", 0, 1 << 12, 28), layers))
    kinds = config.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.error("layer_types", f"a list of {layers} entries, each full_attention or sliding_attention")
    if family.uneven and not family.streams and kinds[-1] != "full_attention":
        raise config.error("layer_types", "a list whose last entry is full_attention")
    return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


_LATER: dict[str, Any] = {
    **{"post_norms": False, "embedding_scale": 1.0, "attention_scale": None},
    **{"attention_softcap": 0.0, "logit_softcap": 0.0, "encoder": None},
    **{"pre_norms": True, "qk_norm_whole": False, "rotary": None, "unturned": (), "query_scaling": None},
    **{"sinks": False, "residual_scale": 1.0, "logit_scale": 1.0, "experts": None},
    **{"both": False, "long_rope": None, "latent": None, "late_norms": False, "uneven": None},
    **{"recurrence": None, "output_gate": False, "mlp_layers": None, "mlp_gated": True},
    **{"unturned_scaling": None, "plain_norm": False},
    **{"layer_norms": False, "norm_bias": False, "qk_norm_apart": False, "parallel": "", "head_bias": False},
}
"""Facts added to specs later -> their neutral value."""


_LATER_OF_EXPERTS: dict[str, Any] = {"gated": True, "beside": False, "weighs_input": False}
_LATER_OF_GROUPS: dict[str, Any] = {
    "rope": None,
    "kv_heads": None,
    "head_dim": None,
    "once": False,
    "numbers": 0,
    "pieces": False,
}


def _facts(spec: ModelSpec) -> dict[str, Any]:
    """Return a spec's facts without neutral values of later additions.

    So models keep the identity they had before a fact was added, and with it their stored KV.
    """
    found: dict[str, Any] = msgspec.to_builtins(spec)
    for name, plain in _LATER.items():
        if found[name] == plain:
            del found[name]
    del found["long"], found["kind"], found["embedding"], found["judge"], found["makers"], found["asked"]
    del found["ahead"]
    if found.get("experts"):
        for name, plain in _LATER_OF_EXPERTS.items():
            if found["experts"][name] == plain:
                del found["experts"][name]
    if found.get("uneven") and found["uneven"]["streams"] is None:
        del found["uneven"]["streams"]
    for group in found["groups"]:
        for name, plain in _LATER_OF_GROUPS.items():
            if group[name] == plain:
                del group[name]
    return found


def identity_of(spec: ModelSpec, folder: Path) -> bytes:
    """Return the SHA-256 of the spec's facts, the weights and the tokenizer.

    Name, sampling defaults and EOS are left out: they change no KV. A folder's files have fixed names that say what
    each holds; a GGUF file may have any name.
    """
    facts = _facts(msgspec.structs.replace(spec, name="", defaults={}, eos_ids=(), identity=b""))
    digest = hashlib.sha256(b"cairn-model-1\0")
    digest.update(hashlib.sha256(msgspec.json.encode(facts, order="sorted")).digest())
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for number, path in enumerate([*weight_files(folder), *tokenizer]):
        # The index is left out: it only maps tensors to files.
        name = str(number) if is_gguf(folder) else path.name
        digest.update(name.encode() + b"\0" + file_digest(path))
    if (scheme := stored_scheme(folder, spec)) is not None:  # decides how the bytes are decoded
        digest.update(repr(scheme).encode())
    return digest.digest()


_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def bytes_by_format(place: Path, spec: ModelSpec) -> Counter[str]:
    """Return the bytes of the tensors by number format; raise CairnError if they cannot be read."""
    found: Counter[str] = Counter()
    if is_gguf(place):
        for tensor in read_gguf(place).tensors.values():
            found[tensor.kind.name] += tensor.size
    else:
        weights = open_weights(place, spec)
        if isinstance(weights, CodedWeights):
            for kind, size in map(weights.stored, weights):
                found[kind] += size
            return found
        for array in weights.values():
            found[_KINDS.get(array.dtype.name, array.dtype.name)] += array.nbytes
    return found
