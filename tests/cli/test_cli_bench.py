from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cairn.cli import app
from cairn.types.errors import ConfigError

SMALL = ("--prompt", "20", "--decode", "3", "--batch", "1,2", "--threads", "1")


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Shorten the probe, and run in a folder without options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cairn.kernels.roofline.SECONDS", 0)
    monkeypatch.setattr("cairn.kernels.roofline.measure.__defaults__", (4 << 20,))


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    "model", [("demo",), ("--shape", "demo", "--type", "f16"), ("--shape", "demo", "--type", "q4_0")]
)
def test_figures_go_to_stdout_and_progress_to_stderr(model: tuple[str, ...]) -> None:
    shown = bench(*model, *SMALL)
    assert shown.exit_code == 0, shown.output
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert [row[:3] for row in rows] == [["prefill 20", "1", "0"], ["decode", "1", "0"], ["decode", "2", "0"]]
    assert all(float(row[3]) > 0 and float(row[7]) > 0 for row in rows)
    assert all(0 <= int(part.removesuffix(" %")) <= 100 for row in rows for part in row[5:7])
    assert "decode, 2 at once" in shown.stderr and "GB/s" in shown.stderr


def test_json_has_every_figure(capsys) -> None:
    parsed = json.loads(bench("--shape", "demo", *SMALL, "--depth", "30", "--json").stdout)
    assert (parsed["model"], parsed["threads"], parsed["load"]["depth"]) == ("demo", 1, [30])
    assert [(figure["work"], figure["batch"]) for figure in parsed["figures"]] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 2),
    ]
    assert parsed["peak_memory_bytes"] > 10_000_000
    for figure in parsed["figures"]:
        assert figure["bytes"] > 9_000_000 and figure["operations"] > 0
        assert 0 < figure["read_fraction"] <= min(1, figure["bytes"] / figure["seconds"] / parsed["bytes_per_second"])
        assert 0 < figure["arithmetic_fraction"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "big"), "expected one of demo, qwen3-0.6b, llama-3.2-1b"),
        (("--shape", "demo", "--type", "q3"), "expected one of f32, bf16, f16, q4_0"),
        (("--type", "f32"), "--type is for the random weights"),
        (("demo", "--shape", "demo"), "--shape and MODEL cannot be given together"),
        (("--batch", "1,0"), "whole numbers from 1 to 256"),
        (("--batch", ""), "whole numbers from 1 to 256"),
        (("--depth", "5000"), "takes at most 2048"),
    ],
)
def test_an_unmeasurable_model_is_a_short_error(arguments: tuple[str, ...], words: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
