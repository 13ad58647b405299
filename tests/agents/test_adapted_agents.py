"""Agents that answer with adapters: their KV is pinned, erased and continued after restarts, at any scale."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.agents import Agents
from cairn.agents.log.records import TurnRecord
from cairn.agents.portable import MAX_DIGEST
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turn_tree import Turn
from cairn.agents.turns import TurnParams, Turns
from cairn.config.config import Config
from cairn.config.values import AdapterOptions
from cairn.frontend import adapter_services
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.served_models.loaded_models import Models
from cairn.system.posix import SystemClock, SystemFiles, SystemRng
from cairn.types import model_variant
from cairn.types.model_variant import adapted_identity, known_variant, recorded_variant, variant
from cairn.types.request import MAX_APPLIED, adapted_salt
from tests.agents.house import GREEDY, hear
from tests.service.several import several
from tests.service.tiny import until

LONG = "tell me of the sea " * 30
SALTS = {"default": b"", "acme": b"acme"}


@contextlib.asynccontextmanager
async def opened(
    folder: Path, names: str = "sql poems", *, load: str = "alpha"
) -> AsyncIterator[tuple[Models, Agents]]:
    """Serve `alpha` with these adapters, and agents of a log in the folder, as a new process does.

    `load`: the models that are loaded from the start, of `alpha` and `beta`.
    """
    model_variant._in_use.clear()
    for name in ("sql", "poems", "prose"):
        (folder / name).write_text(f"the adapter {name}")
    adapters = tuple(AdapterOptions(name=name, path=str(folder / name), model="alpha") for name in names.split())
    options: dict[str, Any] = {"adapters": adapters, "kv_dir": str(folder / "kv"), "kv_disk": True}
    async with several(folder, "alpha beta", load=load, **options) as served:
        clock, draw, first = SystemClock(), SystemRng(), served.services.first
        place = folder / "agents"
        agents = await Agents.open(first, SystemFiles(), place, clock, draw, Config(), SALTS, served.services)
        try:
            yield served, agents
        finally:
            await agents.close()


def named(models: Models, name: str) -> Service:
    loaded = models.find("alpha").loaded
    assert loaded is not None
    found = loaded.adapters.named(name) if ":" in name else loaded.service
    assert found is not None
    return found


async def say(
    models: Models, agents: Agents, id: str, model: str | None = None, text: str = LONG, tenant: str = "default"
) -> None:
    service = None if model is None else named(models, model)
    params = TurnParams(request=models.services.first.next_id(), options=GREEDY, service=service)
    turn = await agents.turn(tenant, id, [{"role": "user", "content": text}], params)
    assert (await hear(turn)).done


def chunks(folder: Path) -> list[Path]:
    """Return the files of chunks in all stores."""
    return [path for path in (folder / "kv").rglob("*") if path.is_file() and path.name.count(".") >= 4]


async def told(folder: Path, names: str, *models: str) -> None:
    """Have an agent of an earlier run answer with each of these models in turn."""
    async with opened(folder, names) as (served, agents):
        await agents.create("default", id="ada")
        for number, model in enumerate(models):
            await say(served, agents, "ada", model, text=f"{number} {LONG}")
    assert len(chunks(folder)) >= 3 * len(models)


@pytest.mark.parametrize("after", ["sql poems", "prose", ""])
@pytest.mark.parametrize("model", ["alpha:sql", "alpha:sql@0.5", "alpha:poems+sql@-2"])
async def test_a_deleted_agents_kv_is_erased_after_a_restart_whatever_adapters_are_there_then(
    tmp_path: Path, model: str, after: str
) -> None:
    await told(tmp_path, "sql poems", model, "alpha", model)
    async with opened(tmp_path, after) as (_, agents):
        await agents.delete("default", "ada")
        await agents.kv.settled()
    assert not chunks(tmp_path)


async def test_kv_of_adapters_is_erased_beside_another_model(tmp_path: Path) -> None:
    """The base is not loaded after the restart, and was not in this run."""
    await told(tmp_path, "sql", "alpha:sql@0.5", "alpha")
    async with opened(tmp_path, "", load="beta") as (models, agents):
        assert models.find("alpha").loaded is None
        await agents.delete("default", "ada")
        await agents.kv.settled()
    assert not chunks(tmp_path)


async def test_kv_of_an_adapter_is_erased_that_came_and_went(tmp_path: Path) -> None:
    async with opened(tmp_path, "sql") as (models, agents):
        loaded = models.find("alpha").loaded
        assert loaded is not None
        await loaded.adapters.load("prose", str(tmp_path / "prose"))
        for id in ("ada", "bob"):
            await agents.create("default", id=id)
            await say(models, agents, id, "alpha:prose@0.25", text=id + LONG)
        await models.services.first.flush()
        await loaded.adapters.unload("prose", grace=0.0)
        before = len(chunks(tmp_path))
        await agents.delete("default", "ada")
        await agents.kv.settled()
        assert 0 < len(chunks(tmp_path)) < before
    async with opened(tmp_path, "sql") as (_, agents):
        await agents.delete("default", "bob")
        await agents.kv.settled()
    assert not chunks(tmp_path)


async def test_kv_is_erased_although_the_service_that_made_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_services, "MOST_VIEWS", 2)
    async with opened(tmp_path) as (models, agents):
        await agents.create("default", id="ada")
        await say(models, agents, "ada", "alpha:sql@0.5")
        service = named(models, "alpha:poems@0.5")
        ids = list(range(3, 200))
        agents.chats.cut(agents._find("default", "ada"), ids, service.variant.identity)
        (request,) = service.make_requests(ids, SamplingOptions(max_tokens=1, temperature=0.0))
        async for _ in service.generate(request):
            pass
        await service.flush()
        first, applied = models.services.first, service.applied
        del service, request
        for number in range(4):
            named(models, f"alpha:sql@3.{number}1")
        loaded = models.find("alpha").loaded
        assert loaded is not None and len(loaded.adapters.views) == 2
        assert len(chunks(tmp_path)) > 6
        await agents.delete("default", "ada")
        await agents.kv.settled()
        assert (await first.where(ids, adapted_salt(b"", applied))).pool == 0
    assert not chunks(tmp_path)


@pytest.mark.parametrize("after", ["sql poems", ""])
async def test_an_agent_with_adapters_is_pinned_after_a_restart(tmp_path: Path, after: str) -> None:
    await told(tmp_path, "sql poems", "alpha:sql@0.5")
    async with opened(tmp_path, after) as (models, agents):
        size = len(await agents.context("default", "ada"))
        assert size > 500
        await agents.pin("default", "ada", True)
        await agents.kv.settled()
        await until(lambda: list((tmp_path / "kv").rglob("pins/*")))
        assert (await agents.where("default", "ada")).disk >= size // 64 * 64
        await models.services.first.flush()
        kv = models.services.first.kv()
        assert kv.disk is not None and kv.disk.pinned >= size // 64
        placed = await agents.prefetch("default", "ada")
        assert placed.pool > size - 64


async def test_a_turn_goes_on_at_the_scale_of_the_last_one(tmp_path: Path) -> None:
    """Also at a scale that the model's name, which shows six digits, does not tell whole."""
    await told(tmp_path, "sql", "alpha:sql@0.123456789")
    async with opened(tmp_path, "sql") as (models, agents):
        await say(models, agents, "ada", None, text="and more")
        first, second = await agents.turns("default", "ada")
        assert second.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
        assert agents._find("default", "ada").head.identity == named(models, "alpha:sql@0.123456789").spec.identity


async def test_an_interrupted_turn_goes_on_with_its_adapters(tmp_path: Path) -> None:
    async def begin(models: Models, agents: Agents, id: str) -> RunningTurn:
        await agents.create("default", id=id)
        options = SamplingOptions(temperature=0, max_tokens=900, ignore_eos=True)
        number, service = models.services.first.next_id(), named(models, "alpha:sql@0.5")
        params = TurnParams(request=number, options=options, service=service)
        return await agents.turn("default", id, [{"role": "user", "content": LONG}], params)

    async with opened(tmp_path) as (models, agents):
        whole = await hear(await begin(models, agents, "ada"))
        await hear(await begin(models, agents, "bob"), stop_after=9)
    async with opened(tmp_path) as (models, agents):
        assert agents._find("default", "bob").head.state == "interrupted"
        number = models.services.first.next_id()
        rest = await hear(await agents.resume("default", "bob", request=number))
        assert rest.done and rest.tokens == whole.tokens and len(whole.tokens) == 900


@pytest.mark.parametrize("load", ["alpha", "beta", "alpha beta"])
async def test_a_log_that_names_no_adapters_has_its_kv_erased_by_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """As earlier versions wrote it. Contexts of other agents, and what they share, stay."""
    record = Turns._record

    def old(self: Turns, *given: Any) -> TurnRecord:
        return msgspec.structs.replace(record(self, *given), base=b"", adapters=None)

    monkeypatch.setattr(Turns, "_record", old)
    async with opened(tmp_path, "sql") as (models, agents):
        for id, text in (("ada", "hers alone " * 30), ("bob", "his alone " * 30)):
            await agents.create("default", id=id)
            await say(models, agents, id, "alpha:sql@0.5")
            await say(models, agents, id, "alpha:sql@0.5", text=text)
        adapters = named(models, "alpha:sql@0.5").applied
        ids = list(await agents.context("default", "bob"))
    before = len(chunks(tmp_path))
    async with opened(tmp_path, "", load=load) as (models, agents):
        assert known_variant(agents._find("default", "ada").head.identity) is None
        await agents.delete("default", "ada")
        await agents.kv.settled()
        assert 0 < len(chunks(tmp_path)) <= before - 4
        async with models.using(models.find("alpha")) as alpha:
            placed = await alpha.where(ids, adapted_salt(b"", adapters))
            assert placed.disk >= len(ids) // 64 * 64, "what others share, and what they have alone, stays"
    async with opened(tmp_path, "", load="beta") as (models, agents):
        assert models.find("alpha").loaded is None
        await agents.delete("default", "bob")
        await agents.kv.settled()
    assert not chunks(tmp_path)


@pytest.mark.parametrize("model", ["alpha", "alpha:sql"])
async def test_no_later_request_is_shown_text_of_a_deleted_agent(tmp_path: Path, model: str) -> None:
    async with opened(tmp_path) as (models, agents):
        for tenant in ("default", "acme"):
            await agents.create(tenant, id="ada")
            await say(models, agents, "ada", model, text="4711 is the number " * 9, tenant=tenant)
        recent = models.services.first.recent
        applied = named(models, model).applied
        assert {(b"", applied), (b"acme", applied)} <= set(recent._tenants)
        await agents.delete("default", "ada")
        assert set(recent._tenants) == {(b"acme", applied)}


async def test_what_a_turn_continues_is_noted_with_its_adapters(tmp_path: Path) -> None:
    """After a restart it is known why a prompt's KV is missing, but not to requests with other adapters."""
    await told(tmp_path, "sql", "alpha:sql")
    async with opened(tmp_path, "sql") as (models, agents):
        await say(models, agents, "ada", "alpha:sql", text="and more")
        assert [adapters for _, adapters in models.services.first.recent._tenants] == [
            named(models, "alpha:sql").applied
        ]


async def test_an_exported_agent_brings_its_adapters_along(tmp_path: Path) -> None:
    await told(tmp_path, "sql", "alpha:sql@0.5")
    async with opened(tmp_path, "sql") as (_, agents):
        before = agents._find("default", "ada").head.variant
        data = b"".join([piece async for piece in agents.export("default", "ada")])
        await agents.import_agent("acme", data, "eve")
        assert before is not None and agents._find("acme", "eve").head.variant is before


def test_a_record_is_believed_only_if_its_identity_is_that_of_its_adapters() -> None:
    """Files that anybody may have written are imported."""
    made = variant(b"base" * 8, ((b"sql", 0.5),))
    began = TurnRecord(agent=1, number=1, identity=made.identity, base=made.base, adapters=made.adapters)
    turn = Turn(1, began, None)
    assert turn.variant is made is known_variant(made.identity) and turn.identity is made.identity
    wrong: list[Any] = [None, (), ((b"sql", 1.0),), ((b"poems", 0.5),), ((b"sql", 1e300),), ((b"sql", float("nan")),)]
    for adapters in [*wrong, made.adapters * (MAX_APPLIED + 1)]:
        forged = msgspec.structs.replace(began, adapters=adapters)
        assert Turn(1, forged, None).variant is None and Turn(1, forged, None).identity == made.identity
    assert recorded_variant(made.identity, b"x" * MAX_DIGEST, made.adapters) is None
    plain = recorded_variant(b"base" * 8, b"", ())
    assert plain is not None and (plain.identity, plain.base, plain.salt(b"a")) == (b"base" * 8, b"base" * 8, b"a")
    identity = made.identity
    del made, turn
    assert known_variant(identity) is None, "nobody holds it any more"


def test_a_model_that_claims_an_adapted_identity_does_not_take_its_place() -> None:
    adapters = ((b"digest", 1.0),)
    claimed = variant(adapted_identity(b"base", adapters))
    made = variant(b"base", adapters)
    assert claimed.identity == made.identity and made.adapters == adapters
    assert known_variant(made.identity) is made and variant(b"base", adapters) is made
