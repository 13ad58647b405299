"""GGUF files with random weights of real shapes, for benchmarks and tests beside llama.cpp.

The numbers never repeat, so that no two tokens have the same logits. The tokenizer is byte-level and as large as a real
one: each of the 256 bytes is a token, and every other place of the vocabulary has a merge of capitals and digits. So a
text of n small letters is n tokens, and every sampled token has a text.
"""

from __future__ import annotations

import itertools
import math
import string
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from cairn.models.gguf.weights import gguf_name
from cairn.models.packing.gguf_writer import metadata, put
from cairn.models.safetensors.weights import expected_tensors
from cairn.types.model_spec import ModelSpec

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
PLAIN, CONTROL = 1, 3


def write_random(path: Path, spec: ModelSpec, kind: str = "BF16") -> None:
    """Write the spec with random weights: vectors in F32, matrices in BF16 or another GGUF type.

    In another type every bit except the scales is random. The embedding is in Q8_0, and a matrix keeps the variance of
    its input.
    """
    name = ARCHITECTURES[spec.architecture]
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata(spec, name).items():
        put(writer, key, value)
    add_tokenizer(writer, spec.vocab)
    for known, shape in expected_tensors(spec).items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(known), _drawn(known, shape))
        elif kind == "BF16":
            bits = _drawn(known, shape).astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(gguf_name(known), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            own = gguf.GGMLQuantizationType["Q8_0" if "embed" in known else kind]
            writer.add_tensor(gguf_name(known), _blocks(known, shape, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return 1 + np.float32(0.1) * values
    values *= np.float32(1 / math.sqrt(shape[-1]))
    return values


def _blocks(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of a type whose blocks begin with a float16 scale."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = rng.integers(0, 256, (math.prod(shape) // values, size), np.uint8)
    some = blocks[:4096].copy()
    some[:, :2] = np.array([1.0], "<f2").view(np.uint8)
    scale = 1 / math.sqrt(shape[-1]) / float(gguf.quants.dequantize(some, kind).std())
    blocks[:, :2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Add 256 bytes, merges of capitals and digits, and an end token."""
    merges = list(itertools.islice(_merges(), vocab - 257))
    tokens = [*_byte_letters(), *(a + b for a, b in merges), "<|endoftext|>"]
    kinds = [PLAIN] * (vocab - 1) + [CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(vocab - 1)
    writer.add_add_bos_token(False)


def _merges() -> Iterator[tuple[str, str]]:
    """Return merges that make ever longer words, each by one more letter."""
    letters = string.ascii_uppercase + string.digits
    words = list(letters)
    for word in words:  # the list grows meanwhile
        for letter in letters:
            yield word, letter
            words.append(word + letter)


def _byte_letters() -> Iterator[str]:
    """Return the letter for each byte in a byte-level vocabulary: printable bytes stand for themselves, others move."""
    moved = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(256 + moved)
            moved += 1
