"""Tuning keeps what pays, leaves set options alone, is bounded in time, and is a config source of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.cli.common.profiles import profiled
from cairn.config.config import Config
from cairn.config.resolve import Resolved, resolve
from cairn.engine import profile, tune
from cairn.engine.profile import Profile, Speed, TunedOptions
from cairn.engine.tune import Tuner
from cairn.models.spec.config import load_spec
from cairn.types.errors import ConfigError
from tests.tiny_models import write_model


class Measured(Tuner):
    """A tuner with made-up measurements; each takes a second."""

    clock = 0.0

    def _measure(self, config: Config, what: str) -> Speed:
        self._longest = 1.0
        type(self).clock += 1.0
        self.seen.append(what)
        return Speed(*(self.of(config),) * 3)

    seen: list[str]
    of: Callable[[Config], float]


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    monkeypatch.setattr(tune, "cpu_count", lambda: 8)
    monkeypatch.setattr(tune, "variants", lambda: {"avx512": True, "avx2": True, "portable": True})
    monkeypatch.setattr(tune, "chosen", lambda name: "avx512" if name == "auto" else name)
    spec = load_spec(write_model(tmp_path / "model"))

    def make(of: Callable[[Config], float], fixed: tuple[str, ...] = (), seconds: float = 99) -> Measured:
        Measured.clock = 0.0
        made = Measured(
            spec,
            tmp_path / "model",
            Config(),
            frozenset(fixed),
            now=lambda: Measured.clock,
            seconds=seconds,
            tell=lambda line: None,
        )
        made.seen, made.of = [], of
        return made

    return make


def speed(config: Config) -> float:
    """Return a speed: four threads are best, avx2 is better, and steps of 256 are a little better (noise)."""
    tokens = 100.0 * (1.5 if config.threads == 4 else 1.0)
    tokens *= 1.1 if config.kernels == "avx2" else 1.0
    return tokens * (1.02 if config.step_tokens == 256 else 1.0)


def test_gains_are_kept_and_noise_is_not(tuner: Callable[..., Measured]) -> None:
    made = tuner(speed)
    options, before, after = made.run()
    assert options == TunedOptions(threads=4, kernels="avx2")
    assert (before.score, after.score) == pytest.approx((100, 165))
    assert "threads 8" not in made.seen and "kernels avx512" not in made.seen, "that is what it was"


def test_an_equivalent_setting_is_no_change(tuner: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    """f16 looks better for a moment, then bf16 does, which is what `auto` means anyway."""
    named = {"auto": "bfloat16", "bf16": "bfloat16", "f16": "float16"}
    monkeypatch.setattr(tune, "kv_dtype", lambda spec, config: named[config.kv_dtype])
    made = tuner(lambda config: {"auto": 100.0, "f16": 105.0, "bf16": 120.0}[config.kv_dtype])
    assert made.run()[0] == TunedOptions()


def test_set_options_stay(tuner: Callable[..., Measured]) -> None:
    options, _, after = tuner(speed, fixed=("threads",)).run()
    assert options == TunedOptions(kernels="avx2") and after.score == pytest.approx(110)


def test_time_is_bounded(tuner: Callable[..., Measured]) -> None:
    made = tuner(lambda config: 100.0 + 10 * len(made.seen), seconds=8)
    made.run()
    assert Measured.clock <= 8
    assert tuner(lambda config: 100.0).run()[0] == TunedOptions(), "nothing pays"


def test_a_gain_that_does_not_come_again_changes_nothing(tuner: Callable[..., Measured]) -> None:
    made = tuner(lambda config: 150.0 if made.seen[-1] == "threads 4" else 100.0)
    options, before, after = made.run()
    assert options == TunedOptions() and before == after


def test_a_model_is_measured(tmp_path: Path) -> None:
    messages: list[str] = []
    folder = write_model(tmp_path / "model")
    found = Tuner(
        load_spec(folder),
        folder,
        Config(kv_gb=0.05, step_tokens=128),
        frozenset(("threads", "kernels", "kv_dtype", "step_tokens")),
        now=iter(range(10_000)).__next__,
        seconds=1e9,
        tell=messages.append,
    ).run()
    assert found[0] == TunedOptions() and min(found[1].prefill, found[1].decode, found[1].decode_8) > 0
    assert len(messages) == 1 and messages[0].startswith("as it is: prefill")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the file of a model's profile, and the model."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "model")
    spec, one = load_spec(folder), Speed(1.0, 1.0, 1.0)
    options = TunedOptions(threads=1, step_tokens=128)
    path = profile.path_of(spec.identity)
    profile.write(path, Profile(spec.name, spec.identity.hex(), profile.machine(), options, one, one))
    return path, folder


def of(folder: Path, **flags: Any) -> Resolved:
    return profiled(resolve({"model": str(folder), **flags}, {}))


def test_the_next_start_uses_the_profile_below_set_options(kept: tuple[Path, Path], tmp_path: Path) -> None:
    path, folder = kept
    found = of(folder)
    assert (found.config.threads, found.config.step_tokens) == (1, 128)
    assert found.source("threads") == found.source("step_tokens") == f"profile {path}"
    assert of(folder).again().config == found.config
    assert of(folder, step_tokens="64").config.step_tokens == 64
    assert of(folder, step_tokens="64").source("step_tokens") == "--step-tokens"
    assert of(folder, profile="none").config.threads is None
    for elsewhere in ({"device": "cuda"}, {"device": "mlx"}, {"tp": "2"}):
        found = of(folder, **elsewhere)
        assert (found.config.threads, found.config.step_tokens) == (None, 512)
        with pytest.raises(ConfigError, match="profiles are of one model on the CPU"):
            of(folder, profile=str(path), **elsewhere)
    other = write_model(tmp_path / "other", seed=4)
    assert of(other).config.threads is None
    assert of(other, profile="none").config.threads is None


def test_a_named_profile_must_be_of_this_model_and_machine(kept: tuple[Path, Path], tmp_path: Path) -> None:
    path, folder = kept
    own = tmp_path / "own.json"
    own.write_bytes(path.read_bytes())
    assert of(folder, profile=str(own)).source("threads") == f"profile {own}"
    other = write_model(tmp_path / "other", seed=4)
    with pytest.raises(ConfigError, match=r"is the profile of .*; tune .* to a file of its own"):
        of(other, profile=str(own))
    own.write_bytes(msgspec.json.encode(msgspec.structs.replace(profile.read(path), machine="a mill")))
    with pytest.raises(ConfigError, match=r"made on another machine \(a mill\)"):
        of(folder, profile=str(own))
    for content in (
        "",
        "[]",
        json.dumps({"options": {"threads": 0}}),
        path.read_text().replace('"threads": 1', '"x": 1'),
    ):
        own.write_text(content)
        with pytest.raises(ConfigError, match="is no profile"):
            of(folder, profile=str(own))
    with pytest.raises(ConfigError, match="the file is missing"):
        of(folder, profile=str(tmp_path / "nowhere"))
