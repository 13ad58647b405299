"""Default sampling from the makers' model cards, only for models whose exact hub id or file is known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cairn.models.hub.addresses import KNOWN
from cairn.models.hub.digests import file_digest
from cairn.models.spec import makers_sampling as table
from cairn.models.spec.config import identity_of, load_spec
from cairn.types.request import SAMPLING_RANGES
from tests.gguf_files import write_gguf
from tests.tiny_models import write_model

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cached(cache: Path, hub_id: str) -> Path:
    """Write a tiny model where the download cache keeps one of that id."""
    return write_model(cache / f"models--{hub_id.replace('/', '--')}" / "snapshots" / "abc", "LlamaForCausalLM")


@pytest.mark.parametrize("other", ["someone/SmolLM2-135M-Instruct", f"{HUB_ID}-tuned", "HuggingFaceTB/SmolLM2-135M"])
def test_a_model_is_known_by_its_exact_hub_id(other: str, tmp_path: Path) -> None:
    """A fine-tuned model, or one that merely has a similar name, gets none."""
    makers = load_spec(cached(tmp_path, HUB_ID)).makers
    assert makers is not None
    assert makers.values == {"temperature": 0.2, "top_p": 0.9}
    assert load_spec(cached(tmp_path, other)).makers is None
    assert load_spec(write_model(tmp_path / "SmolLM2-135M-Instruct", "LlamaForCausalLM")).makers is None


def test_a_file_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(write_model(tmp_path / "model", "LlamaForCausalLM"), tmp_path / "any name.gguf")
    assert load_spec(path).makers is None
    row = table.BY_DIGEST[KNOWN["smollm2"].size, KNOWN["smollm2"].sha256]
    size = path.stat().st_size
    monkeypatch.setattr(table, "BY_DIGEST", {(size, "0" * 64): row})
    assert load_spec(path).makers is None, "of the same size, and another file"
    monkeypatch.setattr(table, "BY_DIGEST", {(size, file_digest(path).hex()): row})
    assert load_spec(path).makers == row


def test_a_file_of_another_size_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(write_model(tmp_path / "model", "LlamaForCausalLM"), tmp_path / "m.gguf")

    def refused(_: Path) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr(table, "file_digest", refused)
    assert load_spec(path, identify=False).makers is None


def test_makers_sampling_changes_no_key_of_kv(tmp_path: Path) -> None:
    folder = cached(tmp_path, HUB_ID)
    spec = load_spec(folder)
    assert identity_of(spec, folder) == identity_of(msgspec.structs.replace(spec, makers=None), folder)


def test_every_row_says_from_where_and_when() -> None:
    for row in (*table.BY_HUB_ID.values(), *table.BY_DIGEST.values()):
        assert row.source.startswith("https://")
        assert len(row.read.split("-")) == 3


@pytest.mark.parametrize("hub_id", ["Qwen/Qwen3-0.6B-GGUF", "ggml-org/gpt-oss-20b-GGUF"])
def test_files_of_a_repository_are_known_by_its_id(hub_id: str, tmp_path: Path) -> None:
    """The name of such a model is ORG/NAME:FILE."""
    folder = tmp_path / f"models--{hub_id.replace('/', '--')}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    path = write_gguf(write_model(tmp_path / "model", "LlamaForCausalLM"), folder / "any name.gguf")
    spec = load_spec(path)
    assert spec.name == f"{hub_id}:any name"
    assert spec.makers == table.BY_HUB_ID[hub_id]


def test_thinking_and_other_rows_stand_apart() -> None:
    row = table.BY_HUB_ID["Qwen/Qwen3-8B"]
    assert row.values == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert row.thinking == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def test_rows_name_parameters_that_exist() -> None:
    for row in table.BY_HUB_ID.values():
        assert row.values
        for values in (row.values, row.thinking):
            for name, value in values.items():
                low, high = SAMPLING_RANGES[name]
                assert low <= value <= high
