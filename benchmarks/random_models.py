"""GGUF files with random weights of real shapes, for benchmarks and tests beside llama.cpp.

The numbers never repeat, so that no two tokens have the same logits. The tokenizer is byte-level: each of the 256 bytes
is a token, every other place of the vocabulary has a text of its own that no merge reaches. So a text of n ASCII
letters is n tokens, and whatever is sampled has a text.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from cairn.models.gguf_weights import gguf_name
from cairn.models.gguf_writer import metadata, put
from cairn.models.weights import expected_tensors
from cairn.types import ModelSpec

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
PLAIN, CONTROL = 1, 3


def write_random(path: Path, spec: ModelSpec) -> None:
    """The spec with random weights, matrices in BF16 and vectors in F32."""
    name = ARCHITECTURES[spec.architecture]
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata(spec, name).items():
        put(writer, key, value)
    _add_tokenizer(writer, spec.vocab)
    for known, shape in expected_tensors(spec).items():
        values = _drawn(known, shape)
        if len(shape) == 1:
            writer.add_tensor(gguf_name(known), values)
        else:
            bits = values.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(gguf_name(known), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
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


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """256 bytes, one pair of them that can merge (readers want at least one), other texts, and the end of an answer."""
    tokens = list(_byte_letters())
    tokens.append(tokens[0] + tokens[1])
    kinds = [PLAIN] * vocab
    while len(tokens) < vocab - 1:
        tokens.append("Ġ" + _word(len(tokens)))
    tokens.append("<|endoftext|>")
    kinds[-1] = CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_add_bos_token(False)


def _word(number: int) -> str:
    """Five letters, another word for each number."""
    letters = ""
    for _ in range(5):
        number, rest = divmod(number, 26)
        letters += chr(ord("a") + rest)
    return letters


def _byte_letters() -> Iterator[str]:
    """The letter that stands for each byte in a byte-level vocabulary: printable ones for themselves, others moved."""
    moved = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(256 + moved)
            moved += 1
