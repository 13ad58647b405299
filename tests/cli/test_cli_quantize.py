"""`cairn quantize`: from a folder to a file that can chat, written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.cli import quantize
from cairn.models.packing import gguf_writer as gguf_writer
from cairn.types.errors import ConfigError, ModelError
from tests.text import text_models
from tests.text.test_gguf_text import published
from tests.tiny_models import write_model

HELLO = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = write_model(tmp_path / "m", vocab_size=1024, hidden_size=64, max_position_embeddings=512)
    return text_models.write_model(place, published("qwen2"), text_models.QWEN_CONFIG, text_models.QWEN_TEMPLATE)


def cairn(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cairn.cli import main; main()", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", "HF_"))}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_quantised_model_chats_as_its_source_does(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    done = cairn("quantize", str(folder), str(path), "--type", "f32")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} >= {"token_embd", "attn_q", "ffn_down", "output_norm"}
    assert all((row[1], row[4], row[5]) == ("F32", "0.000%", "0") for row in rows)
    answers = []
    for place in (folder, path):
        with LLM(str(place), engine="cpu", kv_gb=0.1, threads=1) as llm:
            answers.append(llm.chat(HELLO, temperature=0, max_tokens=12))
    assert answers[0].text == answers[1].text and answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    again = cairn("quantize", str(path), str(tmp_path / "small.gguf"), "--type", "Q4_0")
    assert again.returncode == 0 and (tmp_path / "small.gguf").stat().st_size < path.stat().st_size
    errors = {line.split("\t")[0]: line.split("\t")[4] for line in again.stdout.splitlines()}
    assert errors["attn_norm"] == "0.000%" and errors["ffn_up"] != "0.000%"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m", "m.gguf", "small.gguf"]


def test_a_file_is_replaced_only_by_force_and_only_by_a_whole_one(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists already; --force replaces it"):
        quantize.write(str(folder), path, "Q8_0")

    def crash(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(gguf_writer, "_packed", crash)
        with pytest.raises(ModelError, match=r"m.gguf cannot be written: No space left on device"):
            quantize.write(str(folder), path, "Q8_0", force=True)
    assert path.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 2
    assert quantize.write(str(folder), path, "q8_0", force=True)
    assert path.read_bytes()[:4] == b"GGUF" and len(list(tmp_path.iterdir())) == 2


def test_an_unwritable_model_is_a_short_error(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match=r"--type must be one of F32, F16, .*, found Q4_K_M"):
        quantize.write(str(folder), tmp_path / "m.gguf", "Q4_K_M")
    for name in ("m.bin", "m-00001-of-00002.gguf"):
        with pytest.raises(ConfigError, match=r"must be the name of a \.gguf file, and not of one part"):
            quantize.write(str(folder), tmp_path / name, "Q8_0")
    done = cairn("quantize", "demo", str(tmp_path / "demo.gguf"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "has no name in GGUF" in done.stderr
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install gguf"):
        quantize.write(str(folder), tmp_path / "m.gguf", "Q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_quantisation_in_the_download_cache_chats_by_its_name(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    quantize.write(str(folder), tmp_path / "blob.gguf", "Q8_0")
    (snapshot / "m-Q8_0.gguf").symlink_to(tmp_path / "blob.gguf")
    answers = []
    for name in ("org/m:q8_0", str(tmp_path / "blob.gguf")):
        with LLM(name, engine="cpu", kv_gb=0.1, threads=1) as llm:
            answers.append(llm.chat(HELLO, temperature=0, max_tokens=12).text)
    assert answers[0] == answers[1] != ""
    assert quantize.write("org/m:Q8_0", tmp_path / "small.gguf", "Q4_0")


def test_leftovers_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, living = tmp_path / f".m.{process.pid}.gguf", tmp_path / f".m.{os.getpid()}.gguf"
    others = [tmp_path / ".m.gguf", tmp_path / ".m.x.gguf", tmp_path / f".m.2.{process.pid}.gguf"]
    for path in (dead, living, *others):
        path.write_bytes(b"half")
    quantize._clear(tmp_path / "m.gguf")
    assert not dead.exists() and living.exists() and all(path.exists() for path in others)
