"""The metadata of a GGUF file -> `ModelSpec`.

Keys are those of the format's own list (https://github.com/ggml-org/ggml, docs/gguf.md). Architectures are rows of one
table. An unsupported architecture is refused by name, and so is an unknown key of an architecture whose value is not
neutral.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from cairn.kernels.elementary import log_of
from cairn.models.families.end_tokens import ENDS, known_ends
from cairn.models.families.latent_spec import spec_fields
from cairn.models.families.recurrent_spec import with_state
from cairn.models.files import Fields
from cairn.models.gguf.architectures import ARCHITECTURES, EXPERT_KEYS, Architecture, experts
from cairn.models.gguf.architectures import layers as layers_of
from cairn.models.gguf.encoder import KEYS as PURPOSE
from cairn.models.gguf.encoder import purpose
from cairn.models.gguf.reader import Gguf, vocab_rows
from cairn.models.gguf.recurrent import KEYS as RECURRENT
from cairn.models.gguf.recurrent import by_heads, mlp_layers, only_states, recurrence
from cairn.models.gguf.uneven import KEYS as UNEVEN
from cairn.models.gguf.uneven import by_layer, head_length, uneven_spec
from cairn.models.gguf.vocabulary import CONTROL, ENCODERS, named_ids
from cairn.models.hub.hub import model_name
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    NEVER,
    CacheGroup,
    Latent,
    ModelSpec,
    RopeScaling,
    RotaryPositions,
)
from cairn.types.request import SAMPLING_RANGES

FACTORS = "rope_freqs.weight"
"""Tensor that divides the rotary frequencies, in models with llama3's rope scaling."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""The same for models with separate factors for short and for long contexts."""


def factors(gguf: Gguf, turned: int, name: str = FACTORS) -> tuple[float, ...]:
    """Return a tensor's factors, one for each pair of the `turned` rotary dimensions; () if the tensor is missing."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.kind.name != "F32" or tensor.shape != (turned // 2,):
        raise ModelFileError(f"{tensor.path}: {name} must be F32 of shape [{turned // 2}]")
    values = gguf.blocks(name).view("<f4").reshape(-1)
    # NEVER marks pairs that are not rotated.
    if not (((values >= 1e-3) & (values <= 1e6)) | np.isclose(values, NEVER)).all():
        raise ModelFileError(f"{tensor.path}: {name} must hold numbers from 0.001 to 1e+06")
    return tuple(NEVER if one > 1e6 else one for one in values.tolist())


def long_rope(keys: Fields, gguf: Gguf, turned: int) -> dict[str, Any]:
    """Return the spec fields of a short- and long-context rope scaling; {} if the file has no such factors."""
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


_KEYS = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        *PURPOSE,
    )
)
_GEMMA_KEYS = frozenset(
    (
        *("attention.sliding_window_pattern", "rope.freq_base_swa"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    )
)
"""Metadata keys understood, without the architecture's prefix."""

_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.yarn_attn_factor"), 1.0)
}
"""Neutral values of keys that are not supported. 0, false and "" are neutral too, except for `_ZERO_COUNTS`."""
_EXTENDED = "rope.scaling.yarn_ext_factor"
_ZERO_COUNTS = frozenset({"rope.scaling.yarn_attn_factor", _EXTENDED})
"""Keys for which 0 is a setting: unscaled scores, yarn without extrapolation."""

SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Sampling option -> its key below `general.sampling.`."""

_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""End-of-answer tokens that a file may name: `tokenizer.ggml.NAME_token_id`."""


def architecture(gguf: Gguf) -> Architecture:
    """Return the row of the file's architecture; raise `ModelError` for an unsupported one."""
    name = gguf.fields.text("general.architecture", "")
    if not name:
        raise gguf.fields.error("general.architecture", "the name of an architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted([*ARCHITECTURES, *ENCODERS]))
        raise ModelError(f"{gguf.paths[0]}: the architecture {name[:80]!r} is not supported; supported are {known}")
    return ARCHITECTURES[name]


def gguf_spec(gguf: Gguf) -> ModelSpec:
    """Return the spec of the model in a GGUF file, without its identity.

    Raise `ModelFileError` for a missing or wrong key, `ModelError` for an unsupported architecture or option.
    """
    family = architecture(gguf)
    keys = _keys(gguf, family)
    hidden = keys.integer("embedding_length", 1, 1 << 20)
    heads = keys.integer("attention.head_count", 1, 1 << 14)
    layers = layers_of(keys, family)
    head_dim = keys.integer(_head_length(family), 2, MAX_HEAD_DIM, None if family.latent else hidden // heads)
    turned = keys.integer("rope.dimension_count", 2, head_dim, head_dim) if family.rotary else head_dim
    if family.uneven:  # the file's factors belong to layers without a window
        turned = keys.integer("attention.key_length", 2, MAX_HEAD_DIM)
    long = long_rope(keys, gguf, turned) if family.long_rope else {}
    if long:
        rope, context = long["rope_scaling"], keys.integer("context_length", 2, MAX_CONTEXT)
    else:
        rope, context = _rope(keys, gguf, turned, family)
    if family.local_rope:
        context = keys.integer("context_length", 2, MAX_CONTEXT)  # already the scaled length
    vocab = vocab_rows(gguf, hidden)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors)
    mixture = experts(keys, family, layers, corrected)
    kept = recurrence(keys, family.recurrence, layers, hidden, gguf.tensors, tiled=family.tiled)
    spec = ModelSpec(
        name=model_name(gguf.paths[0]),
        architecture=family.mixture_name or family.name if mixture else family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", 1, heads, heads),
        head_dim=head_dim,
        ffn=keys.integer("feed_forward_length", 1, 1 << 22, mixture.ffn if mixture else None),
        vocab=vocab,
        context=context,
        norm_eps=keys.number(f"attention.layer_norm_{'' if family.layer_norms else 'rms_'}epsilon", 0.0, 1.0),
        rope_theta=keys.number("rope.freq_base", 1.0, 1e15, 1e6 if family.local_rope else 10000.0),
        **{"rope_scaling": rope, "rotary": None if turned == head_dim else turned, **long},
        **_multiplied(keys, family, hidden, heads, head_dim, layers),
        **_normed(keys, family, gguf),
        query_scaling=_query_scaling(keys, family),
        unturned_scaling=family.unturned_scaling,
        plain_norm=bool(family.plain_norm_but) and (mixture is None or mixture.count != family.plain_norm_but),
        qk_norm_whole=family.qk_norm_whole,
        late_norms=family.late_norms,
        pre_norms=family.pre_norms,
        unturned=_unturned(keys, family, layers),
        sinks=family.sinks,
        experts=mixture,
        qkv_bias=any(f"blk.{layer}.attn_{one}.bias" in gguf.tensors for layer in range(layers) for one in ("q", "qkv")),
        out_bias=any(f"blk.{layer}.attn_output.bias" in gguf.tensors for layer in range(layers)),
        mlp_bias=any(f"blk.{layer}.ffn_down.bias" in gguf.tensors for layer in range(layers)),
        tied="output.weight" not in gguf.tensors,
        groups=with_state(_groups(keys, family, layers, context, rope), kept, mlp_layers(keys, layers) or ()),
        mlp_layers=mlp_layers(keys, layers),
        mlp_gated=family.mlp_gated,
        recurrence=kept,
        output_gate=family.output_gate,
        eos_ids=_ends(gguf, vocab),
        bos_id=next(iter(named_ids(gguf, "bos", vocab, absent=True)), None),
        defaults=_defaults(gguf.fields),
        both=family.both,
        **purpose(keys, gguf, hidden, family.both),
    )
    if family.latent:
        return _with_latents(keys, spec, turned)
    if family.uneven:
        return uneven_spec(keys, gguf, spec, family.uneven)
    if spec.heads % spec.kv_heads:
        raise keys.error("attention.head_count_kv", f"a divisor of the head count ({heads})")
    if spec.head_dim % 2 or turned % 2:
        raise keys.error("attention.key_length", "an even number, because rotary positions rotate pairs")
    for name, expected in (("attention.value_length", head_dim), ("rope.dimension_count", turned)):
        if keys.integer(name, 0, 1 << 20, expected) != expected:
            raise ModelError(f"{keys.path}: {keys.prefix}{name} other than the head size {expected} is not supported")
    return spec


def _normed(keys: Fields, family: Architecture, gguf: Gguf) -> dict[str, Any]:
    """Return the spec fields about kinds of norms, and about what they come before."""
    normed = "blk.0.attn_q_norm.weight" in gguf.tensors if family.qk_norm is None else bool(family.qk_norm)
    one_after_the_other = not keys.flag("use_parallel_residual", True) or (
        family.parallel == "one norm" and "blk.0.ffn_norm.weight" in gguf.tensors
    )
    return {
        "qk_norm": normed,
        "qk_norm_apart": normed and family.qk_norm_apart,
        "layer_norms": family.layer_norms,
        "norm_bias": family.layer_norms and "output_norm.bias" in gguf.tensors,
        "parallel": "" if one_after_the_other else family.parallel,
        "head_bias": "output.bias" in gguf.tensors,
    }


def _head_length(family: Architecture) -> str:
    """Return the key of the head size."""
    if family.uneven:
        return head_length(family.uneven)
    return "attention.key_length_mla" if family.latent else "attention.key_length"


def _unturned(keys: Fields, family: Architecture, layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    if family.recurrence == "mamba2" and not keys.flag("rope.scaling.finetuned", True):
        return tuple(range(layers))
    if isinstance(family.unturned, str):
        windows = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0) > 0
        all_alike: range | tuple[()] = range(layers) if family.unturned == "by window" else ()
        limited = _limited(keys, family, layers) if windows else all_alike
        return tuple(layer for layer in range(layers) if layer not in limited)
    return tuple(layer for layer in range(layers) if family.unturned and not (layer + 1) % family.unturned)


def _with_latents(keys: Fields, spec: ModelSpec, turned: int) -> ModelSpec:
    """Return the spec with the file's latent-attention sizes."""
    keys.check_by_layer("heads", "attention.head_count", spec.heads, "block_count", spec.layers)
    latent = Latent(
        rank=keys.integer("attention.kv_lora_rank", 1, MAX_HEAD_DIM),
        query_rank=keys.integer("attention.q_lora_rank", 0, 1 << 20, 0),
        plain=keys.integer("attention.key_length_mla", turned + 1, MAX_HEAD_DIM) - turned,
        value=keys.integer("attention.value_length_mla", 1, MAX_HEAD_DIM),
        bias=spec.out_bias,
    )
    corrected = spec.experts is not None and spec.experts.scores == "sigmoid"
    name = "DeepseekV3ForCausalLM" if corrected else spec.architecture
    own = spec_fields(keys, latent, turned, spec.layers, spec.rope_scaling)
    return msgspec.structs.replace(spec, architecture=name, **own)


def _keys(gguf: Gguf, family: Architecture) -> Fields:
    """Return the keys below the architecture's name. A list with equal values for all layers becomes that value."""
    done = _NEUTRAL | {"tensor_data_layout": "Meta AI original pth" if family.interleaved else "reference"}
    prefix, understood = gguf.metadata["general.architecture"] + ".", _understood(family)
    found: dict[str, Any] = {}
    others: dict[str, tuple[str, Any]] = {}
    for key, value in gguf.metadata.items():
        if not key.startswith(prefix):
            continue
        name, plain = key.removeprefix(prefix), value
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            plain = value[0].item()
        if name in family.ignored:
            continue
        if name in understood:
            found[name] = plain
        else:
            others[name] = key, plain
    _listed(found, family)
    keys = Fields(found, gguf.paths[0], prefix)
    if keys.has("embedding_length") and keys.has("attention.head_count"):
        heads = keys.integer("attention.head_count", 1, 1 << 14)
        size = keys.integer(
            "attention.key_length", 2, MAX_HEAD_DIM, keys.integer("embedding_length", 1, 1 << 20) // heads
        )
        done["attention.scale"] = 1 / math.sqrt(size)
        if family.by_width and keys.values.get("block_count") == family.by_width:
            done["attention.scale"] = 1 / math.sqrt(keys.integer("embedding_length", 1, 1 << 20) / heads)
    yarn = found.get("rope.scaling.type") == "yarn"
    done[_EXTENDED] = 1.0 if yarn else 0.0
    if others.get(_EXTENDED, ("", 0.0))[1] == -1:  # llama.cpp's "not set"
        del others[_EXTENDED]
    for name, (key, plain) in others.items():
        if _says_more(name, plain, done.get(name)):
            raise ModelError(f"{gguf.paths[0]}: {key[:120]} is set, which is not supported")
    if not family.both and not keys.flag("attention.causal", True):
        raise ModelError(f"{gguf.paths[0]}: {prefix}attention.causal is false; such a model does not generate text")
    return keys


def _listed(found: dict[str, Any], family: Architecture) -> None:
    """Translate per-layer lists, and models without heads, into the keys of plain decoders."""
    by_heads(found, family.recurrence)
    if family.uneven:
        by_layer(found)
    if family.only_states:
        found |= only_states(found)


def _understood(family: Architecture) -> frozenset[str]:
    """Return the keys supported for an architecture."""
    own = (*(_GEMMA_KEYS if family.gemma else ()), *(UNEVEN if family.uneven else ()))
    return frozenset((*_KEYS, *EXPERT_KEYS, *family.keys, *RECURRENT[family.recurrence], *own))


def _says_more(name: str, value: Any, neutral: Any) -> bool:
    """Return whether an unsupported key has a value that is not neutral."""
    if isinstance(value, np.ndarray):
        return True
    return (bool(value) or name in _ZERO_COUNTS) and not _same(value, neutral)


def _same(value: Any, neutral: Any) -> bool:
    """Return whether a setting has its neutral value; floats were rounded when they were written."""
    if isinstance(value, int | float) and isinstance(neutral, float):
        return math.isclose(value, neutral, rel_tol=1e-6)
    return bool(value == neutral)


def _query_scaling(keys: Fields, family: Architecture) -> tuple[float, float] | None:
    """Return `ModelSpec.query_scaling`."""
    beta = keys.number("attention.temperature_scale", 0.0, 1e3, 0.0) if family.query_scaling else 0.0
    if not beta:
        return None
    named = "attention.temperature_length"
    place = named if keys.has(named) else "rope.scaling.original_context_length"
    return beta, float(keys.integer(place, 1, MAX_CONTEXT))


def _rope(keys: Fields, gguf: Gguf, head_dim: int, family: Architecture) -> tuple[RopeScaling, int]:
    """Return the rope scaling, and the context length that it gives."""
    trained = keys.integer("context_length", 2, MAX_CONTEXT)
    kind: Literal["none", "linear", "yarn"] = "none"
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, keys.number("rope.scale_linear", 0.0, 1e6, 0.0))
    named = keys.text("rope.scaling.type", "linear" if factor else "none")
    if named not in ("none", "linear", "yarn"):
        raise ModelError(f"{keys.path}: rope scaling {named[:80]!r} is not supported; supported are linear, yarn")
    if named != "none" and factor not in (0.0, 1.0):
        kind = "linear" if named == "linear" else "yarn"
    weight = keys.number("rope.scaling.attn_factor", 1e-6, 1e6, 1.0)
    if weight != 1 and (kind != "yarn" or factor <= 1):
        raise ModelError(
            f"{keys.path}: {keys.prefix}rope.scaling.attn_factor is {weight:g}, which is supported only "
            "with yarn scaling by more than 1"
        )
    divisors = factors(gguf, head_dim)
    if kind == "none":
        return RopeScaling(factors=divisors), trained
    if factor < 1e-3:
        raise keys.error("rope.scaling.factor", "a number from 0.001 to 1e+06")
    original = (
        trained if kind == "linear" else keys.integer("rope.scaling.original_context_length", 1, 1 << 24, trained)
    )
    # Round to float32's digits, so that the product is the original number again.
    all_dims = round(keys.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, 0.0) * family.log_multiplier, 6)
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        factors=divisors,
        original_context=original,
        beta_fast=keys.number_or_zero("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=keys.number_or_zero("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
        truncate=not family.untruncated,
        mscale=(all_dims if family.latent else 1.0) if all_dims else None,
        mscale_all_dim=all_dims or None,
        attention_factor=weight * (0.1 * log_of(factor) + 1) if weight != 1 else None,
    )
    if kind == "yarn" and keys.number("rope.freq_base", 1.0, 1e15, 10000.0) <= 1:
        raise keys.error("rope.freq_base", "more than 1 for yarn")
    return scaling, min(max(trained, math.floor(original * factor)), MAX_CONTEXT)


def _multiplied(
    keys: Fields, family: Architecture, hidden: int, heads: int, head_dim: int, layers: int
) -> dict[str, Any]:
    """Return the activation, post norms and multipliers that differ from the plain decoder, as spec fields."""
    if family.gemma:
        return _gemma(keys, family, hidden, heads, head_dim, layers)
    found: dict[str, Any] = {"activation": family.activation, "post_norms": family.post_norms}
    if family.logit_scale:
        found["logit_scale"] = keys.number("logit_scale", 1e-6, 1e6, 1.0)
    if family.multipliers:
        found |= {
            "embedding_scale": keys.number_or_zero("embedding_scale", 1e-6, 1e6, 1.0) or 1.0,
            "attention_scale": keys.number_or_zero("attention.scale", 1e-6, 1e6, 0.0) or None,
            "residual_scale": keys.number_or_zero("residual_scale", 1e-6, 1e6, 1.0) or 1.0,
            "logit_scale": 1 / (keys.number_or_zero("logit_scale", 1e-6, 1e6, 1.0) or 1.0),
        }
    return found


def _gemma(keys: Fields, family: Architecture, hidden: int, heads: int, head_dim: int, layers: int) -> dict[str, Any]:
    """Return Gemma's spec fields that differ from the plain decoder."""
    scale = 1 / math.sqrt(hidden / heads if layers == family.by_width else head_dim)
    attention, logits = family.softcaps
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": scale if scale != 1 / math.sqrt(head_dim) else None,
        "attention_softcap": 0.0
        if family.qk_norm
        else keys.number_or_zero("attn_logit_softcapping", 1e-3, 1e6, attention),
        "logit_softcap": keys.number_or_zero("final_logit_softcapping", 1e-3, 1e6, logits),
    }


def _groups(
    keys: Fields, family: Architecture, layers: int, context: int, scaling: RopeScaling
) -> tuple[CacheGroup, ...]:
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    if family.pieces:
        if keys.has("attention.sliding_window") and not window:
            raise ModelError(f"{keys.path}: {keys.prefix}attention.sliding_window of 0 is not supported")
        whole = frozenset(_unturned(keys, family, layers))
        limited = [layer for layer in range(layers) if layer not in whole]
        return cache_groups(layers, limited, min(family.pieces, context), context, pieces=True)
    if family.window_period and window:
        own = RotaryPositions(theta=keys.number("rope.freq_base", 1.0, 1e15, 10000.0))
        alike = scaling.kind == "none" or bool(family.unturned)
        return cache_groups(layers, _limited(keys, family, layers), window, context, None if alike else own)
    if not family.period:
        return cache_groups(layers, range(layers) if window else (), window, context)
    if not window:
        raise keys.error("attention.sliding_window", f"a whole number from 1 to {MAX_CONTEXT}")
    if family.both:
        window = window // 2 + 1
    rope = None
    if family.local_rope:
        rope = RotaryPositions(theta=keys.number("rope.freq_base_swa", 1.0, 1e15, 10000.0))
    return cache_groups(layers, _limited(keys, family, layers), window, context, rope)


def _limited(keys: Fields, family: Architecture, layers: int) -> list[int]:
    """Return the layers with a window: from a list, or all but every period-th."""
    listed = keys.values.get("attention.sliding_window_pattern")
    if isinstance(listed, np.ndarray):
        if len(listed) != layers:
            raise keys.error("attention.sliding_window_pattern", f"a whole number, or a list of {layers}")
        return [layer for layer, limited in enumerate(listed.tolist()) if limited]
    usual = family.period or family.window_period
    period = keys.integer("attention.sliding_window_pattern", 1, 1 << 12, usual)
    return [layer for layer in range(layers) if (layer + 1) % period]


def cache_groups(
    layers: int,
    limited: Sequence[int],
    window: int,
    context: int,
    rope: RotaryPositions | None = None,
    *,
    pieces: bool = False,
) -> tuple[CacheGroup, ...]:
    """Group layers by cache kind.

    `limited` layers have the window and, for positions, `rope`; `pieces` is as in `CacheGroup`. A window as long as the
    context counts as full attention.
    """
    apart = set(limited) if rope is not None or window < context else set[int]()
    full = tuple(layer for layer in range(layers) if layer not in apart)
    groups = [CacheGroup(kind="full", layers=full)] if full else []
    if apart:
        own = tuple(sorted(apart))
        narrow = window < context
        groups.append(
            CacheGroup(
                kind="window" if narrow else "full",
                layers=own,
                window=window if narrow else 0,
                rope=rope,
                pieces=narrow and pieces,
            )
        )
    return tuple(groups)


def _ends(gguf: Gguf, vocab: int) -> tuple[int, ...]:
    """Return the ids that end an answer: named by the file, or known end tokens of the vocabulary."""
    found = [i for name in _NAMED_ENDS for i in named_ids(gguf, name, vocab, absent=name != "eos")]
    found += gguf.fields.ids("tokenizer.ggml.eos_token_ids", vocab, absent=True)
    tokens, kinds = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list):
        numbered = {text: i for i, text in reversed(list(enumerate(tokens))) if text in ENDS}
        marked: set[int] = set()
        if isinstance(kinds, np.ndarray) and kinds.shape == (len(tokens),):
            marked = {i for i in numbered.values() if kinds[i] == CONTROL}
        found += known_ends(numbered.get, marked.__contains__)
    return tuple(dict.fromkeys(found))


def suggested(fields: Fields, keys: Mapping[str, str]) -> dict[str, float]:
    """Return the sampling defaults that a file suggests: option -> value; `keys` maps options to field names.

    Values out of range by rounding are clamped, a temperature below 0 is greedy (as in llama.cpp), and other values out
    of range are ignored.
    """
    found = {}
    for name, key in keys.items():
        if not fields.has(key):
            continue
        low, high = SAMPLING_RANGES[name]
        value = fields.number(key, -sys.float_info.max, sys.float_info.max)
        near = min(max(value, low), high)
        if near == value or math.isclose(near, value, rel_tol=1e-5, abs_tol=1e-5) or (name, near) == ("temperature", 0):
            found[name] = float(near)
    return found


def _defaults(fields: Fields) -> dict[str, float]:
    return suggested(fields, {name: f"general.sampling.{key}" for name, key in SAMPLING.items()})
