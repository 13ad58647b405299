"""The changes among a tenant's agents since the last look."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.house import house, talking_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


def ids(look: object) -> list[str]:
    return sorted(info.id for info in look)  # type: ignore[attr-defined]


async def test_every_change_shows_once_whatever_it_is(folder: Path) -> None:
    async with house(folder) as at:
        agents, view = at.agents, at.agents.overview("default")
        assert view.look() == ([], [])
        for name in ("a", "b"):
            await agents.create("default", id=name)
        await agents.create("other", id="c")
        assert ids(view.look().changed) == ["a", "b"] and view.look() == ([], [])
        steps = {
            "say": lambda: at.say("a", "hello"),
            "pin": lambda: agents.pin("default", "a", True),
            "describe": lambda: agents.describe("default", "a", {"title": "x"}),
            "rollback": lambda: agents.rollback("default", "a", turn=0),
        }
        for name, step in steps.items():
            await step()
            assert ids(view.look().changed) == ["a"], name
            assert view.look() == ([], []), name
        await agents.fork("default", "b", new_id="d")
        assert "d" in ids(view.look().changed)
        await agents.delete("default", "a")
        assert view.look() == ([], ["a"])
        assert ids(view.all()) == ["b", "d"]


async def test_an_agent_deleted_and_created_again_is_another(folder: Path) -> None:
    async with house(folder) as at:
        view = at.agents.overview("default")
        await at.agents.create("default", id="a", metadata={"n": "1"})
        view.look()
        await at.agents.delete("default", "a")
        await at.agents.create("default", id="a", metadata={"n": "1"})
        changes = view.look()
        assert ids(changes.changed) == ["a"] and changes.gone == []


async def test_a_running_turn_is_seen_grow_and_named_by_its_request(folder: Path) -> None:
    async with house(folder) as at:
        view = at.agents.overview("default")
        await at.agents.create("default", id="a")
        turn = await at.begin("a", "hello")
        assert view.look().changed[0].state == "running" and view.requests == {turn.request.id: "a"}
        async for _ in turn.batches():
            pass
        assert view.look().changed[0].state == "idle" and view.requests == {}


async def test_the_end_of_a_time_to_live_shows_although_nothing_was_written(folder: Path) -> None:
    async with house(folder) as at:
        view = at.agents.overview("default")
        await at.agents.create("default", id="a", ttl=60)
        assert ids(view.look().changed) == ["a"]
        at.clock.ahead += 61
        assert view.look() == ([], ["a"]) and ids(view.all()) == []


async def test_a_look_at_nothing_new_looks_at_no_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(folder) as at:
        view = at.agents.overview("default")
        await at.agents.create("default", id="a")
        view.look()

        def refuse(*_: object) -> None:
            raise AssertionError("the agents were looked through")

        monkeypatch.setattr("cairn.agents.agent_registry.AgentRegistry.of", refuse)
        assert view.look() == ([], [])
