"""Malicious model files, each made from a few lines, and a process with limits that reads them.

`python -m tests.models.hostile_files FOLDER NAME...` prints a line of JSON for each: the outcome and the resources.
Each file is read by a process of its own, so that the system stops what would fill the memory or never end.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.models.files import is_gguf
from cairn.models.gguf.reader import read_gguf
from cairn.models.hub.hub import demo_folder
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.text.chat.templates import load_templates
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError

CPU_SECONDS = 60
WALL_SECONDS = 100
MEMORY = 4 << 30
"""Address space of the reading process in bytes; it ends at this limit, and fails the test."""

_U32, _STRING, _ARRAY = 4, 8, 9


@dataclass(frozen=True)
class Hostile:
    """One kind of file, and its expected outcome."""

    make: Callable[[Path], Path]
    """Creates it in an empty folder, and returns what a user would name as the model."""
    says: str
    """Text of the refusal; "loaded" if it is bounded and no reason to refuse."""
    seconds: float = 3.0
    """Most CPU seconds, all processes together; a header at its limits is read three times."""
    mebibytes: int = 100
    """Most memory beyond that of the process before and of the files."""


# ------------------------------------------------------------------------------------------------- folders


def folder(path: Path, **parts: Any) -> Path:
    """Write the bundled model's small files, with `parts` of its tokenizer.json replaced."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((demo_folder() / name).read_bytes())
    if parts:
        whole = json.loads((path / "tokenizer.json").read_bytes())
        (path / "tokenizer.json").write_text(json.dumps(whole | parts, separators=(",", ":")))
    return path


def pipe(name: str) -> Callable[[Path], Path]:
    """Replace a file of the model by a pipe that nobody writes to."""

    def make(path: Path) -> Path:
        (folder(path) / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        return path / name if name.endswith(".gguf") else path

    return make


def endless(name: str) -> Callable[[Path], Path]:
    """Replace a file of the model by one without end."""

    def make(path: Path) -> Path:
        (folder(path) / name).unlink(missing_ok=True)
        (path / name).symlink_to("/dev/zero")
        return path / name if name.endswith(".gguf") else path

    return make


def written(name: str, *parts: bytes) -> Callable[[Path], Path]:
    """Write a file of the model that consists of `parts`."""

    def make(path: Path) -> Path:
        (folder(path) / name).write_bytes(b"".join(parts))
        return path

    return make


def tensors(*parts: bytes) -> Callable[[Path], Path]:
    """Write weights with a header that consists of `parts`."""
    text = b"".join(parts)
    return written("model.safetensors", len(text).to_bytes(8, "little"), text)


def model(kind: str = "BPE", **parts: Any) -> Callable[[Path], Path]:
    """Replace parts of the tokenizer's model; callables are called on demand."""

    def make(path: Path) -> Path:
        made: dict[str, Any] = {name: part() if callable(part) else part for name, part in parts.items()}
        return folder(path, model={"type": kind, **made})

    return make


def spoilt(**parts: Any) -> Callable[[Path], Path]:
    """Replace parts of the tokenizer; callables are called on demand."""
    return lambda path: folder(path, **{name: part() if callable(part) else part for name, part in parts.items()})


def vocabulary(count: int) -> dict[str, int]:
    """Return so many tokens, "a", "b" and "ab" among them."""
    return {"a": 0, "b": 1, "ab": 2} | {f"{i:X}": i for i in range(3, count)}


def added(count: int) -> list[dict[str, Any]]:
    """Return so many added tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": 100_000 + i, "content": f"<|{i}|>", **flags} for i in range(count)]


def replace(pattern: str, content: str) -> dict[str, Any]:
    """Return a step of a normalizer."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    """Return a pre-tokenizer."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def in_sequence(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a normalizer of several steps."""
    return {"type": "Sequence", "normalizers": [*steps]}


# --------------------------------------------------------------------------------------------- GGUF files


def text(value: bytes) -> bytes:
    """Encode a string of the format."""
    return struct.pack("<Q", len(value)) + value


def texts(count: int, one: Callable[[int], bytes]) -> bytes:
    """Encode an array of strings."""
    return struct.pack("<IQ", _STRING, count) + b"".join(text(one(i)) for i in range(count))


def gguf(*entries: Callable[[], tuple[str, int, bytes]], holes: int = 0) -> Callable[[Path], Path]:
    """Write a file of metadata alone, followed by so many bytes that take no room on the disk."""

    def make(path: Path) -> Path:
        made = [entry() for entry in entries]
        with (path / "m.gguf").open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(made)))
            for key, kind, value in made:
                file.write(text(key.encode()) + struct.pack("<I", kind) + value)
            file.truncate(file.tell() + holes)
        return path / "m.gguf"

    return make


def described(count: int) -> Callable[[Path], Path]:
    """Write a file that describes so many tensors."""

    def make(path: Path) -> Path:
        one = [text(b"%x" % i) + struct.pack("<IQIQ", 1, 32, 0, 0) for i in range(count)]
        (path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 0) + b"".join(one))
        return path / "m.gguf"

    return make


def bpe(tokens: Callable[[], bytes], merges: Callable[[], bytes], kinds: int = 0) -> Callable[[Path], Path]:
    """Write a file with a byte-level vocabulary; with `kinds`, all tokens are control tokens."""
    types = struct.pack("<IQ", _U32, kinds) + struct.pack("<I", 3) * kinds
    return gguf(
        lambda: ("tokenizer.ggml.model", _STRING, text(b"gpt2")),
        lambda: ("tokenizer.ggml.pre", _STRING, text(b"qwen2")),
        lambda: ("tokenizer.ggml.tokens", _ARRAY, tokens()),
        lambda: ("tokenizer.ggml.merges", _ARRAY, merges()),
        *([lambda: ("tokenizer.ggml.token_type", _ARRAY, types)] if kinds else []),
    )


def few() -> bytes:
    """Return tokens for the merge of "a b"."""
    return texts(3, lambda i: (b"a", b"b", b"ab")[i])


def sentencepiece(count: int, piece: Callable[[int], bytes]) -> Callable[[Path], Path]:
    """Write a file with pieces and scores."""
    return gguf(
        lambda: ("tokenizer.ggml.model", _STRING, text(b"llama")),
        lambda: ("tokenizer.ggml.tokens", _ARRAY, texts(count, piece)),
        lambda: ("tokenizer.ggml.scores", _ARRAY, struct.pack("<IQ", 6, count) + bytes(4 * count)),
    )


def holes(path: Path) -> Path:
    """Write a file of a terabyte that takes no room: empty strings, one after the other."""
    with (path / "m.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 60_000))
        for i in range(60_000):
            file.write(text(b"%x" % i) + struct.pack("<IQ", _STRING, 16 << 20))
            file.seek(16 << 20, os.SEEK_CUR)
        file.truncate()
    return path / "m.gguf"


def nested(count: int) -> bytes:
    """Return nested arrays."""
    return struct.pack("<IQ", _ARRAY, count) + struct.pack("<IQ", _ARRAY, 0) * count


_MILLION = 1 << 20
_SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NO_FILE = "is a pipe, a device or a socket, not a file"
_SAID = dict.fromkeys((*_SMALL, "m.gguf"), _NO_FILE) | {"generation_config.json": "loaded"}
"""What is said of each file that is none; a model answers without generation_config.json."""

FILES: dict[str, Hostile] = {
    **{f"{name} is a pipe": Hostile(pipe(name), said) for name, said in _SAID.items()},
    **{f"{name} is /dev/zero": Hostile(endless(name), said) for name, said in _SAID.items()},
    "a config of 10 million empty lists": Hostile(
        written("config.json", b'{"a":[', b"[]," * 10_000_000, b"[]]}"), "holds more than 1048576 values"
    ),
    "a tokenizer_config of 4 million numbers": Hostile(
        written("tokenizer_config.json", b'{"a":[', b"1," * 4_000_000, b"1]}"), "holds more than 1048576 values"
    ),
    "a config a million deep": Hostile(written("config.json", b'{"a":' + b"[" * 1_000_000), "not valid JSON"),
    "safetensors with a million tensors": Hostile(
        tensors(b"{", *(b'"%x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' % i for i in range(10**6)), b"}"),
        "describes more than 65536 tensors",
    ),
    "safetensors with a tensor of 30 million axes": Hostile(
        tensors(b'{"a":{"dtype":"F32","shape":[', b"1," * 30_000_000, b'1],"data_offsets":[0,4]}}'),
        "holds more than 1048576 values",
    ),
    # ----------------------------------------------------------------------------------------------- tokenizers
    "7 million tokens": Hostile(
        model(vocab=lambda: vocabulary(7_000_000), merges=[]), "the limit is 1048576", mebibytes=400
    ),
    "a million tokens": Hostile(
        model(vocab=lambda: vocabulary(_MILLION), merges=[]), "loaded", seconds=20, mebibytes=1500
    ),
    "a list of 5 million pieces": Hostile(
        model("Unigram", vocab=lambda: [["a", -1]] * 5_000_000, unk_id=0), "the limit is 1048576"
    ),
    "5 million equal merges": Hostile(
        model(vocab={"a": 0, "b": 1, "ab": 2}, merges=lambda: ["a b"] * 5_000_000), "the limit is 1048576"
    ),
    "5 million equal merges as pairs": Hostile(
        model(vocab={"a": 0, "b": 1, "ab": 2}, merges=lambda: [["a", "b"]] * 5_000_000), "the limit is 1048576"
    ),
    "a million equal merges": Hostile(
        model(vocab={"a": 0, "b": 1, "ab": 2}, merges=lambda: ["a b"] * _MILLION), "loaded", seconds=10, mebibytes=1000
    ),
    "half a million added tokens": Hostile(spoilt(added_tokens=lambda: added(500_000)), "beside its tokens and merges"),
    "100,000 added tokens": Hostile(spoilt(added_tokens=lambda: added(100_000)), "added tokens; the limit is 65536"),
    "equal ids": Hostile(model(vocab={"a": 0, "b": 0}, merges=[]), "two tokens of its vocabulary have one id"),
    "a normaliser that grows": Hostile(
        spoilt(normalizer=in_sequence([replace("a", "a" * 1000)] * 6)), "times as long; the limit is 256"
    ),
    "a normaliser of 300,000 steps": Hostile(
        spoilt(normalizer=lambda: in_sequence([replace("a", "b")] * 300_000)),
        "beside its tokens and merges",
        mebibytes=300,
    ),
    "a normaliser of ten thousand steps": Hostile(
        spoilt(normalizer=lambda: in_sequence([replace("a", "b")] * 10_000)), "steps; the limit is 1000"
    ),
    "a pattern that backtracks": Hostile(
        spoilt(pre_tokenizer=split("(a+)+$")), r"its pattern '(a+)+$' takes too long", seconds=8, mebibytes=1100
    ),
    "a wrong charsmap": Hostile(
        spoilt(normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(3)).decode()}),
        "tokenizers library refuses it",
    ),
    # ----------------------------------------------------------------------------------------------- GGUF files
    "8 million arrays in an array": Hostile(
        gguf(lambda: ("a", _ARRAY, nested(8_400_000))), "has elements of the type 9"
    ),
    "10 million tokens": Hostile(
        gguf(lambda: ("tokenizer.ggml.tokens", _ARRAY, texts(10_000_000, lambda i: b"%x" % i))), "more than 1048576"
    ),
    "a million tensors": Hostile(described(1_000_000), "announces 1000000 tensors, more than 65536"),
    "65,536 tensors at one place": Hostile(described(65_536), "the file is truncated", seconds=9),
    "16 arrays of a million texts": Hostile(
        gguf(*[lambda n=n: (f"a{n}", _ARRAY, texts(1_000_000, lambda i: b"")) for n in range(16)]),  # type: ignore[misc]
        "all arrays together may have 2097152",
        seconds=9,
        mebibytes=400,
    ),
    "a header of holes": Hostile(holes, "the header has more than 268435456 bytes", seconds=9, mebibytes=600),
    "texts of holes": Hostile(
        gguf(lambda: ("a", _ARRAY, texts(100_000, lambda i: b"")[:-8] + struct.pack("<Q", 1 << 34)), holes=1 << 40),
        "bytes, more than",
    ),
    "5 million equal merges in a GGUF file": Hostile(
        bpe(few, lambda: texts(5_000_000, lambda i: b"a b")), "more than 1048576"
    ),
    "a million equal merges in a GGUF file": Hostile(
        bpe(few, lambda: texts(_MILLION, lambda i: b"a b")), "loaded", seconds=5, mebibytes=300
    ),
    "a million control tokens in a GGUF file": Hostile(
        bpe(lambda: texts(_MILLION, lambda i: b"<|%x|>" % i), lambda: texts(0, bytes), kinds=_MILLION),
        "added tokens; the limit is 65536",
        seconds=9,
        mebibytes=300,
    ),
    "pieces that are merged in every way": Hostile(
        sentencepiece(65_536, lambda i: b"a" * (i % 1024 + 1) if i < 1024 else b"%x" % i),
        "more than 16777216 characters",
    ),
}


# ---------------------------------------------------------------------------------------------- the process


def read(place: Path) -> str:
    """Read everything that a start reads. Return "loaded", or the refusal of the reader that reads the most."""
    said = []
    if is_gguf(place):
        readers: tuple[Callable[[], object], ...] = (
            lambda: read_gguf(place),
            lambda: load_templates(place),
            lambda: Tokenizer.load(place).encode("a b <|0|> Größe"),
        )
    else:
        readers = (
            lambda: load_spec(place, identify=False),
            lambda: load_templates(place),
            lambda: Tokenizer.load(place).encode("a b <|0|> Größe"),
            lambda: (place / "model.safetensors").exists() and open_weights(place, load_spec(place, identify=False)),
        )
    for reader in readers:
        try:
            reader()
        except ModelError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            said.append(str(error))
    return "; ".join(said) or "loaded"


def bounded(hostile: Hostile, place: Path) -> dict[str, Any]:
    """Return the outcome in a process of its own, with the resources used."""
    place.mkdir()
    named = hostile.make(place)
    size = sum(path.stat().st_blocks * 512 for path in place.iterdir() if path.is_file())
    told, tells = os.pipe()
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.close(told)
        try:
            said = read(named)
        except BaseException as error:
            said = f"not typed: {type(error).__name__}: {error}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(tells, json.dumps([said[-2000:], grown]).encode())
        os._exit(0)
    os.close(tells)
    with open(told, "rb") as answer:
        heard = answer.read()
    _, status, used = os.wait4(pid, 0)
    said, grown = json.loads(heard) if heard else [f"the process ended by signal {os.WTERMSIG(status)}", 0]
    return {
        "said": said,
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.monotonic() - begun,
        "grown": grown / 1024 - size / (1 << 20),
    }


def main() -> None:
    """Read the named files, one after the other."""
    place = Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or FILES):
        print(json.dumps({"name": name, **bounded(FILES[name], place / str(number))}), flush=True)


if __name__ == "__main__":
    main()
