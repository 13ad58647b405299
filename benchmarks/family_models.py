"""GGUF files of today's families in real shapes, with random weights drawn as packed blocks.

The bytes of the blocks are random; their scales give the weights the deviation 1 / sqrt(inputs). The types are those of
files in circulation: llama.cpp's Q4_K_M mixture for Qwen, Q4_0 as Google publishes Gemma, MXFP4 experts beside Q8_0 for
gpt-oss. Routers, convolutions and the parameters of recurrent states are F32. A cut shape has fewer layers and is
otherwise whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from cairn.models.packing.gguf_writer import put
from random_models import add_tokenizer

Tensor = tuple[str, tuple[int, ...], str]
"""A GGUF tensor: name, shape with the outputs first, and type."""
NEVER = 1e30
"""Divisor for the frequency of a pair that is not rotated."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One model: its GGUF architecture, its widths, and the particulars of its layers."""

    architecture: str
    kind: str
    """Quantisation mixture, as in file names."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    size: int
    """Numbers per head."""
    ffn: int
    vocab: int
    theta: float
    context: int
    more: dict[str, Any]
    """Further keys below the architecture's name."""
    tied: bool = True
    of_layers: int = 0
    """Layers of the whole model, where this is a part of it."""


SHAPES = {
    "qwen3-30b-a3b": Shape(
        *("qwen3moe", "Q4_K_M", 8, 2048, 32, 4, 128, 6144, 151_936, 1e6, 40_960),
        {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
        tied=False,
        of_layers=48,
    ),
    "qwen3.5-0.8b": Shape(
        *("qwen35", "Q4_K_M", 24, 1024, 8, 2, 256, 3584, 248_320, 1e7, 262_144),
        {"ssm.group_count": 16, "ssm.time_step_rank": 16},
    ),
    "qwen3.5-4b": Shape(
        *("qwen35", "Q4_K_M", 32, 2560, 16, 4, 256, 9216, 248_320, 1e7, 262_144),
        {"ssm.group_count": 16, "ssm.time_step_rank": 32},
    ),
    "gpt-oss-20b": Shape(
        *("gpt-oss", "MXFP4", 6, 2880, 64, 8, 64, 2880, 201_088, 1.5e5, 131_072),
        {
            **{"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880},
            "attention.sliding_window": 128,
        },
        tied=False,
        of_layers=24,
    ),
    "gemma4-e2b": Shape(
        *("gemma4", "Q4_0", 35, 1536, 8, 1, 512, 6144, 262_144, 1e6, 131_072),
        {
            **{"rope.freq_base_swa": 1e4, "attention.sliding_window": 512, "attention.shared_kv_layers": 20},
            **{"embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0},
        },
    ),
}
"""Widths are those of the published models."""
SWA_SIZE = 256
"""Numbers per head in Gemma's layers with a sliding window."""
STATE = 128
"""Numbers in a key and in a value of a head with a recurrent state."""


def write_family(path: Path, name: str) -> None:
    """Write the shape with random weights."""
    shape = SHAPES[name]
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in _keys(shape).items():
        put(writer, f"{shape.architecture}.{key}", value)
    put(writer, "general.name", name)
    add_tokenizer(writer, shape.vocab)
    tensors = list(_tensors(shape))
    for own, size, kind in tensors:
        number = Type[kind]
        values, taken = gguf.GGML_QUANT_SIZES[number]
        stored = (*size[:-1], size[-1] // values * taken)
        count = math.prod(stored)
        writer.add_tensor_info(own, stored, np.dtype(np.uint8), count, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for own, size, kind in tensors:
        writer.write_tensor_data(_drawn(own, size, kind))
    writer.close()


def _keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata keys below the architecture's name."""
    results: dict[str, Any] = {
        **{"block_count": shape.layers, "context_length": shape.context, "embedding_length": shape.hidden},
        **{"attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads},
        **{"attention.key_length": shape.size, "attention.value_length": shape.size},
        **{"feed_forward_length": shape.ffn, "vocab_size": shape.vocab, "rope.freq_base": shape.theta},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": shape.size},
        **shape.more,
    }
    if shape.architecture == "qwen35":
        results |= {
            **{"ssm.conv_kernel": 4, "ssm.state_size": STATE, "full_attention_interval": 4},
            **{"ssm.inner_size": STATE * shape.more["ssm.time_step_rank"], "rope.dimension_count": shape.size // 4},
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    if shape.architecture == "gemma4":
        swa = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
        first = shape.layers - shape.more["attention.shared_kv_layers"]
        results |= {
            **dict.fromkeys(swa, SWA_SIZE),
            "attention.sliding_window_pattern": [_limited(layer) for layer in range(shape.layers)],
            # Layers that read the keys of earlier ones have an MLP twice as wide.
            "feed_forward_length": [shape.ffn * (1 if layer < first else 2) for layer in range(shape.layers)],
        }
    return results


def _limited(layer: int) -> bool:
    """Return whether a layer of Gemma has a sliding window."""
    return (layer + 1) % 5 != 0


def _tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield every tensor of a file."""
    table, plain, _ = _kinds(shape, 0)
    yield "token_embd.weight", (shape.vocab, shape.hidden), table if shape.tied else plain
    yield "output_norm.weight", (shape.hidden,), "F32"
    if not shape.tied:
        yield "output.weight", (shape.vocab, shape.hidden), table
    if shape.architecture == "gemma4":
        inputs = shape.layers * shape.more["embedding_length_per_layer_input"]
        yield "per_layer_token_embd.weight", (shape.vocab, inputs), plain
        yield "per_layer_model_proj.weight", (inputs, shape.hidden), "BF16"
        yield "per_layer_proj_norm.weight", (256,), "F32"
        yield "rope_freqs.weight", (shape.size // 2,), "F32"
    parts = {"qwen3moe": _qwen_moe, "qwen35": _qwen_hybrid, "gpt-oss": _gpt_oss, "gemma4": _gemma}
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight", (shape.hidden,), "F32"
        for name, size, kind in parts[shape.architecture](shape, layer):
            yield f"blk.{layer}.{name}", size, kind


def _kinds(shape: Shape, layer: int) -> tuple[str, str, str]:
    """Return the types of the output, of most matrices, and of a layer's value and down projections."""
    if shape.kind == "MXFP4":
        return "Q8_0", "Q8_0", "Q8_0"
    if shape.kind != "Q4_K_M":
        return "Q6_K", shape.kind, shape.kind
    first, last = shape.layers // 8, 7 * shape.layers // 8
    finer = layer < first or layer >= last or (layer - first) % 3 == 2
    return "Q6_K", "Q4_K", "Q6_K" if finer else "Q4_K"


def _attention(shape: Shape, layer: int, size: int, gates: int = 1, own: bool = True) -> Iterator[Tensor]:
    """Yield the projections of a layer, with keys and values if they are its `own`;

    `gates` is 2 if queries have gates.
    """
    _, plain, finer = _kinds(shape, layer)
    yield "attn_q.weight", (shape.heads * size * gates, shape.hidden), plain
    if own:
        yield "attn_k.weight", (shape.kv_heads * size, shape.hidden), plain
        yield "attn_v.weight", (shape.kv_heads * size, shape.hidden), finer
    yield "attn_output.weight", (shape.hidden, shape.heads * size), plain


def _head_norms(size: int, own: bool = True) -> Iterator[Tensor]:
    for part in "qk" if own else "q":
        yield f"attn_{part}_norm.weight", (size,), "F32"


def _mlp(shape: Shape, layer: int, ffn: int) -> Iterator[Tensor]:
    _, plain, finer = _kinds(shape, layer)
    yield "ffn_gate.weight", (ffn, shape.hidden), plain
    yield "ffn_up.weight", (ffn, shape.hidden), plain
    yield "ffn_down.weight", (shape.hidden, ffn), finer


def _experts(shape: Shape, plain: str, finer: str) -> Iterator[Tensor]:
    count, ffn = shape.more["expert_count"], shape.more["expert_feed_forward_length"]
    yield "ffn_gate_inp.weight", (count, shape.hidden), "F32"
    yield "ffn_gate_exps.weight", (count, ffn, shape.hidden), plain
    yield "ffn_up_exps.weight", (count, ffn, shape.hidden), plain
    yield "ffn_down_exps.weight", (count, shape.hidden, ffn), finer


def _qwen_moe(shape: Shape, layer: int) -> Iterator[Tensor]:
    yield from _attention(shape, layer, shape.size)
    yield from _head_norms(shape.size)
    yield "ffn_norm.weight", (shape.hidden,), "F32"
    yield from _experts(shape, *_kinds(shape, layer)[1:])


def _qwen_hybrid(shape: Shape, layer: int) -> Iterator[Tensor]:
    if (layer + 1) % 4:
        heads, keys = shape.more["ssm.time_step_rank"], shape.more["ssm.group_count"]
        channels = (heads + 2 * keys) * STATE
        plain = _kinds(shape, layer)[1]
        yield "attn_qkv.weight", (channels, shape.hidden), "Q5_K"
        yield "attn_gate.weight", (heads * STATE, shape.hidden), plain
        for part in ("alpha", "beta"):
            yield f"ssm_{part}.weight", (heads, shape.hidden), "F32"
        yield "ssm_conv1d.weight", (channels, 4), "F32"
        yield "ssm_a", (heads,), "F32"
        yield "ssm_dt.bias", (heads,), "F32"
        yield "ssm_norm.weight", (STATE,), "F32"
        yield "ssm_out.weight", (shape.hidden, heads * STATE), plain
    else:
        yield from _attention(shape, layer, shape.size, gates=2)
        yield from _head_norms(shape.size)
    yield "post_attention_norm.weight", (shape.hidden,), "F32"
    yield from _mlp(shape, layer, shape.ffn)


def _gpt_oss(shape: Shape, layer: int) -> Iterator[Tensor]:
    for name, size, kind in _attention(shape, layer, shape.size):
        yield name, size, kind
        yield name.replace(".weight", ".bias"), size[:1], "F32"
    yield "attn_sinks.weight", (shape.heads,), "F32"
    yield "post_attention_norm.weight", (shape.hidden,), "F32"
    for name, size, kind in _experts(shape, "MXFP4", "MXFP4"):
        yield name, size, kind
        yield name.replace(".weight", ".bias"), size[:-1], "F32"


def _gemma(shape: Shape, layer: int) -> Iterator[Tensor]:
    own = layer < shape.layers - shape.more["attention.shared_kv_layers"]
    size = SWA_SIZE if _limited(layer) else shape.size
    yield from _attention(shape, layer, size, own=own)
    yield from _head_norms(size, own)
    for name in ("post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
        yield f"{name}.weight", (shape.hidden,), "F32"
    yield from _mlp(shape, layer, shape.ffn * (1 if own else 2))
    yield "inp_gate.weight", (256, shape.hidden), "BF16"
    yield "proj.weight", (shape.hidden, 256), "BF16"
    yield "layer_output_scale.weight", (1,), "F32"


def _drawn(name: str, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return a tensor's bytes, the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if kind in ("F32", "BF16"):
        values = _numbers(rng, name, shape)
        return values if kind == "F32" else gguf.quants.quantize(values, Type.BF16)
    number = Type[kind]
    each, taken = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (math.prod(shape) // each, taken), np.uint8)
    wanted = 1 / math.sqrt(shape[-1])
    if kind == "MXFP4":  # its values have the deviation 2.93 times the scale, a power of two
        blocks[:, 0] = round(127 + math.log2(wanted / 2.93)) + rng.integers(-1, 2, len(blocks))
        return blocks.reshape(*shape[:-1], -1)
    _scale(rng, number, blocks, wanted)
    return blocks.reshape(*shape[:-1], -1)


_SCALES = {"Q4_0": {0: 1.0}, "Q8_0": {0: 1.0}, "Q6_K": {208: 1.0}, "Q4_K": {0: 1.0, 2: 7.5}, "Q5_K": {0: 1.0, 2: 15.5}}
"""Offsets of a block's scale and, where there is one, of the minimum's, which puts the mean at zero."""


def _scale(rng: np.random.Generator, number: Type, blocks: NDArray[np.uint8], wanted: float) -> None:
    """Write scales that give random blocks the deviation `wanted`, each up to a quarter more or less."""
    sample = blocks[: 1 << 12].copy()
    places = _SCALES[number.name]
    for at, factor in places.items():
        sample[:, at : at + 2] = np.array([factor], "<f2").view(np.uint8)
    step = wanted / float(gguf.quants.dequantize(sample, number).std())
    each = step * rng.uniform(0.75, 1.25, (len(blocks), 1)).astype(np.float32)
    for at, factor in places.items():
        blocks[:, at : at + 2] = (factor * each).astype("<f2").view(np.uint8)


def _numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name == "rope_freqs.weight":  # a quarter of the head is rotated
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1, NEVER).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(values)
    if "norm" in name or "scale" in name:
        return 1 + np.float32(0.1) * values
    if name.endswith("bias") or len(shape) == 1:
        return np.float32(0.1) * values
    return values * np.float32(1 / math.sqrt(shape[-1]))
