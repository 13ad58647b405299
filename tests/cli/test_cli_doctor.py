"""What `cairn doctor` says of a model is what an engine would have of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.tiny_models import load, write_model

from cairn.cli.doctor import _fit
from cairn.config import Config
from cairn.kv.cache import Cache

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "head_dim": 16, "max_position_embeddings": 4096}
CONFIG = Config(step_tokens=256, max_running=16, threads=1, kv_gb=0.05)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_the_pool_holds_what_its_full_layers_do(kinds: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **WINDOWS, layer_types=kinds)
    engine = load(folder)
    tokens = Cache(engine.info).longest
    engine.close()
    assert tokens > 4096
    assert f" of KV pool holds {tokens:,} tokens, context 4,096" in _fit(str(folder), CONFIG)


def test_a_pool_of_windows_alone_holds_any_context(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **WINDOWS, layer_types=["sliding_attention"] * 2)
    assert " of KV pool holds any context, context 4,096" in _fit(str(folder), CONFIG)
    small = msgspec.structs.replace(CONFIG, context=64)
    assert " of KV pool holds any context, context 64" in _fit(str(folder), small)
