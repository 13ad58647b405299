"""Agents on a server with several models: who answers, whose KV is pinned and evicted, and what survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.agents.agents import Agents
from cairn.agents.turns import TurnParams
from cairn.config.config import Config
from cairn.served_models.loaded_models import Models
from cairn.system.posix import SystemClock, SystemFiles, SystemRng
from cairn.types.errors import NotLoaded, Unavailable
from tests.agents.house import GREEDY, hear, house, talking_model
from tests.service.several import several
from tests.service.tiny import serving, until

LONG = "tell me of the sea " * 30
SALTS = {"default": b""}


@contextlib.asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[tuple[Models, Agents]]:
    more = {"kv_dir": str(folder / "kv"), "kv_disk": True, **options}
    async with several(folder, "alpha beta", **more) as models:
        first, clock, draw = models.services.first, SystemClock(), SystemRng()
        log = folder / "agents"
        agents = await Agents.open(first, SystemFiles(), log, clock, draw, Config(), SALTS, models.services)
        try:
            yield models, agents
        finally:
            await agents.close()


async def say(models: Models, agents: Agents, id: str, model: str | None = None, text: str = LONG) -> None:
    messages = [{"role": "user", "content": text}]
    number = models.services.first.next_id()
    if model is None:
        turn = await agents.turn("default", id, messages, TurnParams(request=number, options=GREEDY))
    else:
        async with models.using(models.find(model)) as service:
            params = TurnParams(request=number, options=GREEDY, service=service)
            turn = await agents.turn("default", id, messages, params)
            assert (await hear(turn)).done
            return
    assert (await hear(turn)).done


async def test_an_agents_kv_is_managed_by_the_store_of_its_model(tmp_path: Path) -> None:
    async with opened(tmp_path, load="alpha beta") as (models, agents):
        await until(lambda: len(list(models.services)) == 2)
        alpha, beta = models.services
        await agents.create("default", id="ada", pinned=True)
        await say(models, agents, "ada", "beta")
        await agents.kv.settled()
        ids = await agents.context("default", "ada")
        await beta.flush()
        assert (await agents.where("default", "ada")).disk >= len(ids) // 64 * 64
        assert (await beta.where(ids)).disk > 0 and (await alpha.where(ids)).disk == 0
        assert beta.kv().disk is not None and beta.kv().disk.pinned > 0  # type: ignore[union-attr]
        await models.unload(models.find("beta"), 5.0)
        with pytest.raises(Unavailable, match="not loaded"):
            await agents.where("default", "ada")
        await agents.delete("default", "ada")  # its pins and its KV go when the model is back
        async with models.using(models.find("beta")) as again:
            await until(lambda: not agents.kv._tasks)
            assert (await again.where(ids)).disk == 0


async def test_a_restart_knows_which_model_answers_an_agent(tmp_path: Path) -> None:
    async with opened(tmp_path) as (models, agents):
        await agents.create("default", id="ada")
        await say(models, agents, "ada", "beta")
    async with opened(tmp_path) as (models, agents):
        assert models.find("beta").loaded is None
        assert agents.model_of("default", "ada")[1] == "beta"
        with pytest.raises(NotLoaded, match="beta is being loaded"):
            await say(models, agents, "ada")
        await until(lambda: models.find("beta").loaded)
        await say(models, agents, "ada", text="and more")
        turns = await agents.turns("default", "ada")
        assert turns[1].cached_tokens > len(LONG) // 2
        assert agents.get("default", "ada").model == "beta"


async def test_an_agent_is_erased_although_its_model_is_away_since_a_restart(tmp_path: Path) -> None:
    """Its pins and KV go, but not what another agent of that model shares."""
    async with opened(tmp_path) as (models, agents):
        for id in ("ada", "bob"):
            await agents.create("default", id=id, pinned=True)
            await say(models, agents, id, "beta")
        await say(models, agents, "ada", "beta", text="hers alone " * 30)
        ids = await agents.context("default", "ada")
        shared = len(await agents.context("default", "bob"))
        await agents.kv.settled()
        async with models.using(models.find("beta")) as beta:
            await beta.flush()
            assert (await beta.where(ids)).disk > shared
    pins = list((tmp_path / "kv").glob("models/*/pins/*"))
    assert len(pins) == 2
    async with opened(tmp_path) as (models, agents):
        assert models.find("beta").loaded is None
        await agents.delete("default", "ada")
        await agents.kv.settled()
        assert len(list((tmp_path / "kv").glob("models/*/pins/*"))) == 1
        async with models.using(models.find("beta")) as beta:
            left = (await beta.where(ids)).disk
            assert 0 < left <= shared
    async with opened(tmp_path) as (models, agents):
        await agents.delete("default", "bob")
        await agents.kv.settled()
        assert not list((tmp_path / "kv").glob("models/*/pins/*"))
        async with models.using(models.find("beta")) as beta:
            assert (await beta.where(ids)).disk == 0


async def test_agents_are_erased_beside_a_model_that_gets_no_worker_any_more(tmp_path: Path) -> None:
    """The deletion waits for neither the other model nor its store on disk."""
    async with opened(tmp_path, load="alpha beta") as (models, agents):
        await until(lambda: len(list(models.services)) == 2)
        alpha, beta = models.services
        kept = dict[str, tuple[int, ...]]()
        for id, model in (("ada", "alpha"), ("bob", "beta")):
            await agents.create("default", id=id, pinned=True)
            await say(models, agents, id, model, text=f"{id} alone " * 60)
            kept[id] = tuple(await agents.context("default", id))
        await agents.kv.settled()
        for service in (alpha, beta):
            await service.flush()
        beta._supervisor._give_up("its files were changed")
        await beta._supervisor.close()  # its worker ends
        for id in kept:
            await agents.delete("default", id)
        await asyncio.wait_for(agents.kv.settled(), 10)
        assert not list((tmp_path / "kv").glob("models/*/pins/*"))
        assert (await alpha.where(kept["ada"])).disk == 0
    async with opened(tmp_path) as (models, agents), models.using(models.find("beta")) as again:
        assert (await again.where(kept["bob"])).disk == 0


async def test_a_turn_sent_again_after_a_swap_has_the_words_of_the_model_that_answered(tmp_path: Path) -> None:
    """The ids of its tokens mean other words to the model that is loaded now."""
    other = talking_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokenizer["model"]["vocab"] = {word: at for at, word in enumerate(reversed(words))}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with house(talking_model(tmp_path / "tiny")) as at, serving(other) as new:
        await at.agents.create("default", id="ada")
        first = await at.say("ada", "hello", once="key")
        assert (await at.say("ada", "hello", once="key")).tokens == first.tokens
        services, old = at.agents.services, at.service
        services.add(new)
        services.lead(new)
        services.remove(old)
        at.service = new
        again = await at.say("ada", "hello", once="key")
        assert (again.text, again.tokens, again.error) == (first.text, [], None)
        assert again.done is not None and first.done is not None
        assert (again.done.reason, again.done.usage.completion_tokens) == (first.done.reason, len(first.tokens))


async def test_deletions_wait_for_no_model_whose_kv_went_with_its_worker(tmp_path: Path) -> None:
    async with opened(tmp_path, load="alpha beta", kv_disk=False) as (models, agents):
        await until(lambda: len(list(models.services)) == 2)
        await agents.create("default", id="ada")
        await say(models, agents, "ada", "beta")
        await models.unload(models.find("beta"), 5.0)
        await agents.delete("default", "ada")
        await agents.create("default", id="bob", pinned=True)
        await agents.pin("default", "bob", False)
        await agents.delete("default", "bob")
        await until(lambda: not agents.kv._tasks)
