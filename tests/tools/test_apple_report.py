"""The report of an Apple machine, on MLX's CPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its report is not tested")

from tools import apple_report


def test_the_report_has_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the smallest sizes; a part that fails is reported, and the others go on."""
    monkeypatch.setattr(apple_report.Sizes, "__init__", tiny)
    result = apple_report.measured(True, "demo")
    json.dumps(result)
    text = apple_report.table(result)
    for part in ("self_test", "products", "paged", "demo on mlx", "demo on cpu", "float16", "peak_mib"):
        assert part in text, part
    assert "error" not in text and len(result["products"]) == 8
    assert result["paged"][0]["peak_mib"] < 8 and result["same_bits_alone_and_in_a_batch"].keys() == {
        "float32",
        "8 bits",
    }
    assert result["demo on mlx"]["tokens_per_second_of_8"] > 0
    wrong = apple_report.measured(True, "no-such-model-here")
    assert "error" in wrong["no-such-model-here on mlx"] and wrong["products"]


def tiny(self: apple_report.Sizes, small: bool) -> None:
    self.width, self.rows, self.layers, self.pool, self.context = 64, (1, 3), 4, 1 << 20, (64,)
    self.prompt, self.decode, self.rounds = 16, 2, 1
