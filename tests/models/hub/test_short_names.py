"""Short model names: the table, what they fetch from a hub, and the error for other names."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from cairn.models.hub import hub
from cairn.models.hub.addresses import KNOWN, known, plain
from cairn.models.hub.hub import repository_of
from cairn.models.hub.short_names import by_name, meant_by, table
from cairn.models.hub.variants import choose, variants
from cairn.types.errors import ModelError
from tests.models.hub.test_hub import env, remote  # noqa: F401  (fixtures by name)


def test_the_table_names_repositories_files_and_sizes() -> None:
    assert len(table()) >= 30 and len(by_name()) == sum(len(entry.names) for entry in table())
    assert not by_name().keys() & KNOWN.keys() and hub.DEMO not in by_name()
    for entry in table():
        org, tag, _ = repository_of(entry.names[0])
        assert entry.hub == (f"{org}:{tag}" if tag else org) and plain(entry.hub) == entry.hub
        assert 0.05 <= entry.gb <= 500 and date(2026, 1, 1) <= entry.noted
        assert entry.page == f"https://huggingface.co/{org}/blob/main/{entry.file}"
        if tag:
            assert [variant.files for variant in choose(variants([entry.file]), tag)] == [(entry.file,)], (
                "the tag means it"
            )


@pytest.mark.parametrize("name", ["qwen3", "llama3.2", "gemma3", "gpt-oss"])
def test_names_without_a_size_mean_the_usual_one(name: str) -> None:
    assert meant_by(name) is not None and plain(f"{name}:latest") == plain(name) != name


def test_names_of_the_registry() -> None:
    assert known("smollm2:latest") is known("smollm2") is KNOWN["smollm2"] and known("minilm") is KNOWN["minilm"]
    assert known("smollm3") is None


def test_a_short_name_is_pulled_from_the_hub_and_found_again(
    remote,  # noqa: F811
    env,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "tiny:1b"
    entry = meant_by("qwen3:0.6b")
    assert entry is not None
    import msgspec

    tiny = msgspec.structs.replace(entry, names=(name,), hub="org/m:Q8_0", file="tiny-Q8_0.gguf")
    monkeypatch.setattr("cairn.models.hub.addresses.meant_by", lambda model: tiny if model == name else None)
    remote.files["tiny-Q8_0.gguf"] = b"GGUF" + bytes(100)
    sizes: list[int] = []
    place = hub.pull(name, env=env, allow=sizes.append)
    assert place.name == "tiny-Q8_0.gguf" and hub.locate(name, env) == place and sizes == [104]


def test_a_disallowed_name_is_not_fetched(remote, env) -> None:  # noqa: F811
    def refuse(size: int) -> None:
        raise ModelError(f"{size} bytes are too many")

    with pytest.raises(ModelError, match="bytes are too many"):
        hub.pull("org/m", env=env, allow=refuse)
    assert not any("safetensors" in name and "index" not in name for name in remote.served)


@pytest.mark.parametrize(("status", "code"), [(404, "RepoNotFound"), (401, "RepoNotFound")])
def test_an_id_that_the_hub_does_not_know_says_how_to_search(remote, env, status: int, code: str) -> None:  # noqa: F811
    remote.status = (status, code)
    with pytest.raises(ModelError, match=r"search: https://huggingface.co/models\?search=Qwen9-1B"):
        hub.pull("org/Qwen9-1B", env=env)


def test_an_unknown_name_suggests_a_close_one(env: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    for ask in (hub.pull, hub.locate):
        with pytest.raises(ModelError, match=r"cairn models --names.*did you mean llama3\.2\?$") as caught:
            ask("lama3.2", env=env)
        assert "https://huggingface.co/models?search=lama3.2" in str(caught.value)
