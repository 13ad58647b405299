"""GGUF files mutated within their structure: a load succeeds or is a `ModelError`, and is quick."""

from __future__ import annotations

import copy
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.models.gguf.weights import GgufWeights, _Part
from cairn.models.spec.config import load_spec
from cairn.text.chat.templates import load_templates
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError
from cairn.types.step import Row
from tests.gguf_files import write_gguf
from tests.models.gguf.test_reader import ARRAY, BOOL, F32, STRING, U32, U64, described, entry, header, text
from tests.models.test_file_fuzz import TINY, bend_text
from tests.text.text_models import LLAMA2_CONFIG, QWEN_CONFIG, byte_level, sentencepiece
from tests.text.text_models import write_model as write_text
from tests.tiny_models import GREEDY, LLAMA3, write_model

NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 255, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
TEXTS = (b"", b"x", b"llama", b"qwen3", b"gpt2", b"default", b"\xff\xfe", "é".encode() * 3000, b"\0", b"yarn", b"a b")
NAMES = ("", "blk.0.attn_q.weight", "rope_freqs.weight", "x" * 70_000, "output.weight")


class File:
    """A parsed file: entries as (key, kind, value bytes), tensors as (name, shape, kind, offset), data."""

    def __init__(self, path: Path) -> None:
        read = gguf.GGUFReader(path)
        whole = path.read_bytes()
        self.entries: list[tuple[str, int, bytes]] = []
        for key, field in read.fields.items():
            if key.startswith("GGUF."):
                continue
            begin = field.offset + 8 + len(key) + 4
            size = sum(part.nbytes for part in field.parts) - 8 - len(key) - 4
            self.entries.append((key, int(field.types[0]), whole[begin : begin + size]))
        start = min(tensor.data_offset for tensor in read.tensors)
        self.tensors: list[tuple[str, tuple[int, ...], int, int]] = [
            (tensor.name, tuple(tensor.shape.tolist()), int(tensor.tensor_type), tensor.data_offset - start)
            for tensor in read.tensors
        ]
        self.data = whole[start:]

    def __copy__(self) -> File:
        other = File.__new__(File)
        other.entries, other.tensors, other.data = list(self.entries), list(self.tensors), self.data
        return other

    def bytes(self) -> bytes:
        head = header([entry(*tensor) for tensor in self.entries], [described(*tensor) for tensor in self.tensors])
        return head + bytes(-len(head) % 32) + self.data


def bent_entry(one: tuple[str, int, bytes], rng: random.Random) -> tuple[str, int, bytes]:
    key, _, value = one
    number = rng.choice(NUMBERS)
    kind = rng.randrange(8)
    if kind == 0:
        return key, U32, struct.pack("<I", number & 0xFFFFFFFF)
    if kind == 1:
        return key, F32, struct.pack("<f", rng.choice((0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), 3.5)))
    if kind == 2:
        return key, STRING, text(rng.choice(TEXTS))
    if kind == 3:
        return key, BOOL, bytes([rng.choice((0, 1, 2, 255))])
    if kind == 4:
        return key, U64, struct.pack("<Q", number)
    if kind == 5:
        items = b"".join(text(rng.choice(TEXTS)) for _ in range(3))
        return key, ARRAY, struct.pack("<IQ", STRING, rng.choice((3, 3, number))) + items
    if kind == 6:
        return key, ARRAY, struct.pack("<IQ", rng.choice((U32, F32, ARRAY, 13)), number) + value[:64]
    return key, rng.randrange(14), bend_text(value, rng)


def bend(file: File, rng: random.Random) -> bytes:
    """Return the file with a few mutations; `file` is changed."""
    if rng.random() < 0.2:
        return bend_text(file.bytes(), rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.6:
            at = rng.randrange(len(file.entries))
            kind = rng.randrange(6)
            if kind == 0:
                del file.entries[at]
            elif kind == 1:
                file.entries.append(file.entries[at])
            elif kind == 2:
                other = rng.randrange(len(file.entries))
                file.entries[at] = (file.entries[at][0], *file.entries[other][1:])
            else:
                file.entries[at] = bent_entry(file.entries[at], rng)
        else:
            at = rng.randrange(len(file.tensors))
            name, shape, number, offset = file.tensors[at]
            new: Any = [
                (rng.choice(NAMES), shape, number, offset),
                (name, tuple(rng.choice((*NUMBERS, size)) for size in shape), number, offset),
                (name, shape[::-1], number, offset),
                (name, shape + (1,) * rng.randrange(6), number, offset),
                (name, shape, rng.randrange(42), offset),
                (name, shape, number, rng.choice((*NUMBERS, offset + 32, len(file.data)))),
            ]
            file.tensors[at] = rng.choice(new)
    return file.bytes()


def load_and_run(path: Path) -> str:
    """Load everything in the file and run one step. Return the outcome; raise only what must not happen."""
    config = Config(kv_gb=0.002, threads=1, step_tokens=16, max_running=2, context=64)
    outcome = "loaded"
    try:
        spec = load_spec(path)
        engine = RecordedEngine.load(spec, path, config)
        engine.prefill([Row([0, 0], 0, 2, tuple([0] for _ in engine.info.groups), 1, 2, GREEDY, 0)]).wait()
        engine.close()
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        outcome = "model refused"
    try:
        load_templates(path)
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("Hello <|im_end|> </s> Größe 12"))
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        outcome = "text refused" if outcome == "loaded" else "both refused"
    return outcome


def originals(folder: Path) -> list[Path]:
    """Return a llama with SentencePiece and rope factors, and a qwen 3 with byte-level BPE in Q8_0."""
    llama = write_text(folder / "llama", sentencepiece(), LLAMA2_CONFIG, "{{ messages }}")
    size = Tokenizer.load(llama).vocab_size
    fields = {**TINY, "hidden_size": 8, "rope_scaling": LLAMA3}
    write_model(llama, "LlamaForCausalLM", **{**fields, "vocab_size": size, "rope_theta": 100.0})
    qwen = write_text(folder / "qwen", byte_level(), QWEN_CONFIG, "{{ messages }}")
    fields = {**TINY, "hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    write_model(qwen, "Qwen3ForCausalLM", **{**fields, "vocab_size": Tokenizer.load(qwen).vocab_size})
    return [write_gguf(llama, folder / "llama.gguf"), write_gguf(qwen, folder / "qwen.gguf", kind=Type.Q8_0)]


def test_bent_gguf_files(
    tmp_path: Path, prove: bool, figure: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ModelError` only, in at most a second, and never an allocation that the file cannot fill (known failure 30)."""
    monkeypatch.setattr("cairn.engine.memory.memory_available", lambda: 1 << 28)
    whole = {path: path.read_bytes() for path in originals(tmp_path)}
    for path, data in whole.items():
        assert load_and_run(path) == "loaded" and File(path).bytes() == data
    files = [File(path) for path in whole]
    counts = {"loaded": 0, "model refused": 0, "text refused": 0, "both refused": 0}
    total, slowest, rng = 50_000 if prove else 1_250, 0.0, random.Random(11)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target = tmp_path / "bent.gguf"
    for number in range(total):
        target.write_bytes(bend(copy.copy(files[number % len(files)]), rng))
        begun = time.process_time()
        counts[load_and_run(target)] += 1
        slowest = max(slowest, time.process_time() - begun)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figure("bent GGUF files", f"{total}: {counts}, slowest {slowest:.2f} s, memory grew by {grown:.0f} MiB")
    assert slowest <= 1.0 and grown < 300
    assert min(counts.values()) > total // 300, "the mutations no longer reach every outcome"


def test_the_harness_sees_a_reader_that_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the fuzz itself: with the check of shapes removed it fails."""
    monkeypatch.setattr(
        GgufWeights, "_put", lambda self, names, tensor, _: self._found.update({names[0]: _Part(tensor, tensor.shape)})
    )
    monkeypatch.setattr("cairn.engine.memory.memory_available", lambda: 1 << 28)
    file, rng, target = File(originals(tmp_path)[1]), random.Random(1), tmp_path / "bent.gguf"
    with pytest.raises((ValueError, IndexError, TypeError)):
        for _ in range(1_000):
            target.write_bytes(bend(copy.copy(file), rng))
            load_and_run(target)
