"""Model files are regular files of sane size: no read waits for anything else, or goes on without end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.models import files
from cairn.models.gguf import reader
from cairn.models.gguf.reader import read_gguf
from cairn.models.hub.digests import file_digest
from cairn.models.hub.hub import demo_folder
from cairn.models.safetensors import weights
from cairn.models.spec.config import load_spec
from cairn.models.spec.generation_config import generation_fault
from cairn.text.chat.templates import _templates_of
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelFileError
from tests.models import hostile_files
from tests.tiny_models import write_model


def read_generation(folder: Path) -> None:
    """Raise the error in generation_config.json, which a start only reports."""
    if fault := generation_fault(folder, 160):
        load_spec(folder)
        raise ModelFileError(fault)


READERS = {
    "config.json": load_spec,
    "generation_config.json": read_generation,
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": Tokenizer.load,
    "special_tokens_map.json": Tokenizer.load,
    "chat_template.jinja": _templates_of,
    "chat_template.json": _templates_of,
    "additional_chat_templates/tool.jinja": _templates_of,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_folder() / name).read_bytes())
    (folder / "additional_chat_templates").mkdir()
    return folder


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "socket"])
def test_a_special_file_is_refused_at_once(model: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would hang the start, and /dev/zero fill the memory."""
    monkeypatch.chdir((model / name).parent)  # paths of sockets are short
    path = Path(Path(name).name)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=rf"{path.name}: (is a pipe, a device or a socket|cannot be read \()"):
        READERS[name](model)


@pytest.mark.parametrize("read", [file_digest, read_gguf, lambda path: list(weights._tensors(path))])
def test_weights_in_a_pipe_are_refused_at_once(tmp_path: Path, read) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="is a pipe, a device or a socket, not a file"):
        read(path)


@pytest.mark.parametrize(
    ("name", "limit", "what"),
    [
        ("config.json", files.MAX_JSON_BYTES, "32 MiB, the limit for a JSON file"),
        ("tokenizer.json", files.MAX_TOKENIZER_BYTES, "128 MiB, the limit for a tokenizer.json"),
        ("chat_template.jinja", files.MAX_TEMPLATE_BYTES, "4 MiB, the limit for a chat template"),
    ],
)
def test_a_file_beyond_every_models_is_not_read(model: Path, name: str, limit: int, what: str) -> None:
    for size in (limit + 1, 1 << 40):  # sparse: no memory could take the larger one
        with (model / name).open("wb") as file:
            file.truncate(size)
        with pytest.raises(ModelFileError, match=f"{name}: larger than {what}"):
            READERS[name](model)


def test_a_file_that_grows_while_it_is_read_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * 1000)
    real = os.fstat

    def before(handle: int) -> os.stat_result:
        content = list(real(handle))
        content[6] = 0
        return os.stat_result(content)

    monkeypatch.setattr(files.os, "fstat", before)
    with pytest.raises(ModelFileError, match="larger than"):
        files.read_small(path, 999, "JSON file")
    assert len(files.read_small(path, 1000, "JSON file")) == 1000


def test_all_texts_and_the_whole_header_of_a_gguf_file_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [("a", hostile_files.texts(3, lambda i: b"x" * 100)), ("b", hostile_files.texts(3, lambda i: b"y"))]
    path = hostile_files.gguf(*[lambda key=key, value=value: (key, 9, value) for key, value in entries])(tmp_path)
    monkeypatch.setattr(reader, "MAX_ALL_TEXTS", 6)
    assert read_gguf(path).metadata["b"] == ["y"] * 3
    monkeypatch.setattr(reader, "MAX_ALL_TEXTS", 5)
    with pytest.raises(ModelFileError, match="all arrays together may have 5"):
        read_gguf(path)
    monkeypatch.undo()
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 300)
    monkeypatch.setattr(reader, "_READ", 1)
    with pytest.raises(ModelFileError, match="the header has more than 300 bytes"):
        read_gguf(path)


def test_a_template_has_the_line_ends_that_it_had(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"a\r\nb\rc\n")
    assert _templates_of(model)["default"] == "a\nb\nc\n"


def test_more_tensors_than_any_model_has_are_refused_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(1 << 17))
    text = f"{{{entries}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    parsed: list[bytes] = []
    monkeypatch.setattr(weights, "parse_object", lambda text, *_, **__: parsed.append(text))
    with pytest.raises(ModelFileError, match="its header describes more than 65536 tensors"):
        list(weights._tensors(path))
    assert not parsed
    monkeypatch.undo()
    monkeypatch.setattr(weights, "MAX_TENSORS", 2)
    save_file({str(n): np.zeros(1, np.float32) for n in range(3)}, path, {"a": json.dumps({"{": "{" * 100})})
    with pytest.raises(ModelFileError, match="its header describes 3 tensors, more than 2"):
        list(weights._tensors(path))
