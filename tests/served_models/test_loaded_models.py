"""Several models of one server: names, loading on demand, room, unloading and swaps."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.config.config import Config
from cairn.config.values import ModelOptions
from cairn.engine import load_engine
from cairn.frontend import launch as launch_module
from cairn.frontend.request_options import RequestParams
from cairn.frontend.service import Service
from cairn.served_models import fit as fitting
from cairn.served_models import loader as model_loader
from cairn.served_models import model_health
from cairn.served_models.fit import Fit
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import served_models
from cairn.types.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    ModelError,
    NoWorker,
    Unavailable,
    UnknownModel,
)
from tests.agents.house import GREEDY, talking_model
from tests.service.several import make_models, several
from tests.service.tiny import collect, request, until

SLOW = 120.0
"""Seconds for a dozen loads on a busy machine; a request that waits for itself would wait for `load_timeout`."""


def states(models: Models) -> str:
    return " ".join(f"{model.name}:{model.state}" for model in models.models)


async def answered(service: Service, text: str = "hello") -> str:
    return (await collect(service.generate(request(service, text)))).text


async def test_a_model_is_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta") as models:
        await until(lambda: models.models[1].spec)
        assert states(models) == "alpha:loaded beta:on disk"
        async with models.using(models.find("beta")) as service:
            assert service.name == "beta" and await answered(service)
        assert states(models) == "alpha:loaded beta:loaded"
        assert {service.name for service in models.services} == {"alpha", "beta"}
        async with models.using(models.find("alpha")) as service:
            assert service.name == "alpha"


async def test_an_unknown_name_is_refused_with_the_served_ones(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta") as models:
        await until(lambda: models.models[1].spec)
        with pytest.raises(UnknownModel, match="no model 'gpt-4'; this server has: alpha, beta"):
            models.find("gpt-4")
        assert models.find("beta:latest") is models.models[1]
        assert models.find(str(tmp_path / "beta")) is models.models[1]
        assert models.find(None) is models.models[0]
        assert models.find(None, "embed") is models.models[0]  # whose error says that it has no embeddings


async def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta gamma", max_loaded=2) as models:
        for name in ("beta", "alpha", "gamma"):
            async with models.using(models.find(str(tmp_path / name))) as service:
                assert await answered(service)
        assert states(models) == "alpha:loaded beta:on disk gamma:loaded"


async def test_a_pinned_model_and_one_in_use_make_no_room(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta", max_loaded=1, pin="alpha", load_timeout=0.5) as models:
        with pytest.raises(Unavailable, match="no room for beta") as refused:
            async with models.using(models.find("beta")):
                raise AssertionError("it was loaded")
        assert refused.value.retry_after
    async with several(tmp_path, "alpha beta", max_loaded=1, load_timeout=0.5) as models:
        done = asyncio.Event()

        async def hold() -> str:
            async with models.using(models.find("alpha")) as service:
                await done.wait()
                return await answered(service)

        holding = asyncio.create_task(hold())
        await until(lambda: models.models[0].loaded and models.models[0].loaded.users)
        with pytest.raises(
            Unavailable, match=r"alpha must be unloaded before beta can be loaded, and is in use|being loaded"
        ):
            async with models.using(models.find("beta")):
                raise AssertionError("it was loaded")
        done.set()
        assert await holding
        assert models.models[0].loaded is not None and models.models[1].loaded is None
        await until(lambda: "ing" not in states(models))  # the caller is gone, but the load may go on


async def test_a_call_does_not_wait_for_its_own_lease(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta gamma delta", max_loaded=1, load_timeout=3600) as models:
        await until(lambda: models.models[-1].spec)

        async def beside(first: str, second: str, ready: asyncio.Event | None = None) -> str:
            async with models.using(models.find(first)):
                if ready is not None:
                    await ready.wait()
                task = asyncio.create_task(nested(second))  # like a stream's work, which is a task of its own
                return await task

        async def nested(name: str) -> str:
            async with models.using(models.find(name)) as service:
                return await answered(service)

        async with asyncio.timeout(SLOW):
            with pytest.raises(Unavailable, match=r"beta is needed beside alpha, .*\(max_loaded 1, or memory\)"):
                await beside("alpha", "beta")
            assert await beside("alpha", "alpha") and await nested("beta")  # nothing is held any more
        models.config = msgspec.structs.replace(models.config, max_loaded=2)
        async with asyncio.timeout(SLOW):
            assert await nested("alpha") and await beside("beta", "gamma")  # the unused one goes, though used last
            assert await nested("alpha") and await nested("beta")
            ready = asyncio.Event()
            calls = [asyncio.create_task(beside(*pair, ready)) for pair in (("alpha", "gamma"), ("beta", "delta"))]
            await until(lambda: all(loaded.users for _, loaded in models.loaded()))
            other = asyncio.create_task(nested("gamma"))  # waits for one of theirs
            await until(lambda: "unloading" in states(models))
            ready.set()
            outcomes = await asyncio.gather(*calls, other, return_exceptions=True)
            assert any(isinstance(outcome, Unavailable) for outcome in outcomes[:2])  # neither waits for the other
            assert await nested("alpha") and await nested("delta")


async def test_a_request_that_waits_gets_the_model_once_the_other_is_free(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta", max_loaded=1) as models:
        free = asyncio.Event()

        async def hold() -> str:
            async with models.using(models.find("alpha")) as service:
                await free.wait()
                return await answered(service)

        async def want() -> str:
            async with models.using(models.find("beta")) as service:
                return service.name

        holding = asyncio.create_task(hold())
        await until(lambda: models.models[0].loaded and models.models[0].loaded.users)
        wanting = asyncio.create_task(want())
        await until(lambda: models.models[0].state == "unloading")
        later = asyncio.create_task(hold())  # a call for the unloading model waits, and loads it again
        free.set()
        assert await holding and await wanting == "beta" and await later
        assert states(models) == "alpha:loaded beta:on disk"


async def test_memory_is_counted_before_anything_is_loaded(tmp_path: Path) -> None:
    alpha, _ = make_models(tmp_path, "alpha beta")
    fitted = fitting.fit(Config(engine="fake", kv_gb=0.01), alpha, 1 << 30)
    assert fitted.held > 0.01e9 and fitted.most >= fitted.held and fitted.blocks
    budget = 1.5 * fitted.held / 1e9
    async with several(tmp_path, "alpha beta", memory_gb=budget) as models:
        async with models.using(models.find("beta")) as service:
            assert service.info.blocks == fitted.blocks
        assert states(models) == "alpha:on disk beta:loaded"
        assert sum(model.held for model in models.models) <= models.loader.budget  # type: ignore[operator]
    async with several(tmp_path, "alpha beta", memory_gb=budget, load_timeout=0.3) as models:
        models.models[1].config = Config(model=str(tmp_path / "beta"), engine="fake", kv_gb=1.0)
        with pytest.raises(Unavailable, match=r"beta .*(needs 1|being loaded)"):
            async with models.using(models.find("beta")):
                raise AssertionError("it was loaded")
        await until(lambda: models.models[1].failure)
        assert "of memory" in models.models[1].failure and models.models[1].state == "failed"
        assert any(
            "beta cannot be loaded" in trouble for trouble in model_health.troubles(models)
        ) and not model_health.unready(models)


async def test_the_process_that_measures_says_the_same(tmp_path: Path) -> None:
    (alpha,) = make_models(tmp_path, "alpha")
    config = Config(engine="fake", kv_gb=0.01)
    assert await fitting.measure(config, alpha, 1 << 30) == fitting.fit(config, alpha, 1 << 30)
    (alpha / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        await fitting.measure(config, alpha, 1 << 30)


async def test_a_model_that_cannot_be_loaded_is_reported_and_retried_later(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta") as models:
        beta = models.models[1]
        await until(lambda: beta.spec)
        (tmp_path / "beta" / "config.json").rename(tmp_path / "away")
        with pytest.raises(ModelError):
            await models.load(beta)
        with pytest.raises(Unavailable, match="beta cannot be loaded"):
            async with models.using(beta):
                raise AssertionError("it was loaded")
        (tmp_path / "away").rename(tmp_path / "beta" / "config.json")
        beta.failed_at -= 60
        async with models.using(beta) as service:
            assert await answered(service)
        assert beta.failures == 1 and not beta.failure


async def test_an_unloaded_model_is_loaded_again_and_one_that_is_idle_goes(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta", model_ttl=0.6) as models:
        alpha = models.models[0]
        before = models.services.first
        await models.unload(alpha, 5.0)
        assert alpha.state == "on disk" and not list(models.services) and models.services.first is before
        with pytest.raises(Conflict, match="not loaded"):
            await models.unload(alpha, 5.0)
        async with models.using(alpha) as service:
            assert service is not before and await answered(service)
        assert models.services.first is service
        await until(lambda: alpha.state == "on disk")


async def test_idle_models_go_while_memory_is_critically_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But none that is in use; afterwards a model is loaded again on demand."""
    short = [False]
    async with several(tmp_path, "alpha beta") as models:
        monkeypatch.setattr(models, "_pressed", lambda: short[0])
        alpha, beta = models.models[:2]
        async with models.using(alpha) as service:
            async with models.using(beta) as other:
                assert await answered(other)
            short[0] = True
            await until(lambda: beta.state == "on disk")
            assert alpha.state == "loaded" and await answered(service)
        await until(lambda: alpha.state == "on disk")
        short[0] = False
        async with models.using(beta) as other:
            assert await answered(other)
    assert "beta was unloaded: the system's memory is critically short" in caplog.text


async def test_requests_end_with_the_grace_and_not_after_the_storing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that streams computed is stored beside them, and must not keep any of them going."""
    flushed: list[bool] = []

    async def slow(service: Service) -> None:
        flushed.append(service.busy)
        await asyncio.sleep(30 if service.busy else 0.5)

    async with several(tmp_path, "alpha beta") as models:
        monkeypatch.setattr(Service, "flush", slow)
        async with models.using(models.models[0]) as service:
            stream = service.generate(request(service, "hello", 2000))
        await anext(stream)
        began = time.monotonic()
        unloading = asyncio.create_task(models.unload(models.models[0], 0.2))
        with pytest.raises(Unavailable, match="alpha is being unloaded; ask again shortly"):
            await collect(stream)
        assert time.monotonic() - began < 8 and not unloading.done()
        await unloading
        assert flushed == [True, False]


async def test_a_cancelled_swap_brings_the_old_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service is half closed by then, and would refuse everything."""
    flushing = asyncio.Event()

    async def slow(service: Service) -> None:
        flushing.set()
        await asyncio.sleep(1.0)

    async with several(tmp_path, "alpha beta", max_loaded=1) as models:
        await until(lambda: models.models[1].spec)
        alpha, identity = models.models[0], models.models[0].identity
        monkeypatch.setattr(Service, "flush", slow)
        swapping = asyncio.create_task(models.swap(alpha, "beta", 5.0))
        await flushing.wait()
        swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swapping
        async with models.using(models.find("alpha")) as service:
            assert service.spec.identity == identity and await answered(service)
        assert list(models.services) == [service]  # the half-closed one is gone
        assert alpha.swaps == 0 and alpha.loads == 1  # it was brought back, not loaded for a call


async def test_a_model_that_returns_remembers_its_sampled_tokens(tmp_path: Path) -> None:
    """A continued chat uses the very ids whose KV is on disk, rather than encoding its text again."""
    for name in ("alpha", "beta"):
        talking_model(tmp_path / name)
    save_file({"model.norm.weight": np.full(16, 2.0, dtype=np.float32)}, tmp_path / "beta" / "model.safetensors")
    config = Config(model=str(tmp_path / "alpha"), engine="fake", kv_gb=0.01, kv_disk=False)
    models = Models(config, in_process=True, free=lambda: 8 << 30)
    try:
        await models.start()
        (alpha,) = models.models

        async def ids(messages: list[dict[str, Any]]) -> tuple[int, ...]:
            async with models.using(alpha) as service:
                return tuple((await service.chat.prompt(messages, tenant="ada")).tokens)

        for number in range(50):  # most answers of the fake model would be encoded to other ids
            async with models.using(alpha) as service:
                chat = [{"role": "user", "content": f"question {number}"}]
                asked = await service.chat.prompt(chat, tenant="ada")
                (one,) = service.make_requests(asked.tokens, GREEDY, RequestParams(output=asked.output))
                said = await collect(service.generate(one))
                chat += [{"role": "assistant", "content": said.text}, {"role": "user", "content": "go on"}]
                anew = await ids(chat)
                service.chat.remember("ada", asked.tokens, said.tokens, chat[1])
            if (known := await ids(chat)) != anew:
                break
        else:
            raise AssertionError("every answer is encoded as it was sampled")
        await models.swap(alpha, str(tmp_path / "beta"), 5.0)
        assert await ids(chat) == anew  # another model has sampled nothing
        await models.swap(alpha, str(tmp_path / "alpha"), 5.0)
        assert await ids(chat) == known
        await models.unload(alpha, 5.0)
        assert await ids(chat) == known
    finally:
        await models.close()


async def test_a_swap_moves_the_names_and_running_requests_go_on(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta gamma") as models:
        await until(lambda: models.models[2].spec)
        alpha = models.models[0]
        async with models.using(alpha) as old:
            stream = old.generate(request(old, "hello", 64))
            await models.swap(alpha, "beta", 20.0)
            async with models.using(models.find("alpha")) as new:
                assert new is not old and new.name == "alpha" and new.spec.identity != old.spec.identity
                assert await answered(new)
            assert (await collect(stream)).done
        await until(lambda: old not in list(models.services))
        assert alpha.swaps == 1 and alpha.state == "loaded" and models.services.first is new
        with pytest.raises(InvalidRequest, match="is already"):
            await models.swap(alpha, "beta", 1.0)
        await models.swap(alpha, str(tmp_path / "alpha"), 1.0)  # as before
        assert alpha.identity == old.spec.identity and alpha.swaps == 2
        with pytest.raises(InvalidRequest, match="is already"):
            await models.swap(alpha, str(tmp_path / "alpha"), 1.0)
        await models.load(models.find("gamma"))
        with pytest.raises(Conflict, match="loaded already"):
            await models.swap(alpha, "gamma", 1.0)


async def test_the_names_of_a_swapped_in_model_go_with_it(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta gamma") as models:
        await until(lambda: models.models[2].spec)
        alpha, _, gamma = models.models
        other = make_models(tmp_path / "more", "delta")[0]
        own = set(alpha.names)
        await models.swap(alpha, str(other), 5.0)
        assert models.find("delta") is models.find(str(other)) is alpha and own <= alpha.names
        await models.swap(alpha, "alpha", 5.0)
        assert alpha.names == own
        with pytest.raises(UnknownModel):
            models.find("delta")
        await models.unload(alpha, 0.0)
        await models.swap(gamma, str(other), 5.0)
        assert gamma.config.model == str(other)


async def test_a_place_means_its_files_whatever_answers_under_its_name(tmp_path: Path) -> None:
    async with several(tmp_path, "alpha beta gamma") as models:
        await until(lambda: models.models[2].spec)
        alpha, beta, gamma = models.models
        await models.swap(alpha, "beta", 5.0)
        await models.swap(gamma, str(tmp_path / "alpha"), 5.0)
        assert gamma.config.model == str(tmp_path / "alpha")
        models.configure(models.config)
        assert models.find("beta") is models.find(str(tmp_path / "beta")) is beta


@pytest.mark.parametrize("back", ["its place", "its name"])
async def test_a_swap_back_brings_the_own_options_back(tmp_path: Path, back: str) -> None:
    own = {"alpha": {"context": 256, "chat_template": "chatml"}, "beta": {"context": 128, "max_running": 3}}
    listed = tuple(
        ModelOptions(model=str(tmp_path / name), options=options, load=name == "alpha") for name, options in own.items()
    )
    async with several(tmp_path, "alpha beta", models=listed) as models:
        await until(lambda: models.models[1].spec)
        alpha = models.models[0]
        before = msgspec.structs.replace(alpha.config, served_name="alpha")
        await models.swap(alpha, "beta", 5.0)
        assert alpha.config.context == 128 and alpha.config.chat_template is None
        await models.swap(alpha, before.model if back == "its place" else "alpha", 5.0)
        assert alpha.config == before and alpha.swaps == 2
        async with models.using(alpha) as service:
            assert service.info.context == 256
        with pytest.raises(InvalidRequest, match="is already"):
            await models.swap(alpha, "alpha", 5.0)


@pytest.mark.parametrize("after", [False, True], ids=["beside", "after"])
async def test_a_swap_under_fifty_streams_loses_none_and_mixes_none(
    tmp_path: Path, after: bool, figure: Callable[[str, str], None]
) -> None:
    async with several(tmp_path, "alpha beta", max_loaded=1 if after else 8, kv_gb=0.1) as models:
        await until(lambda: models.models[1].spec)
        alone: dict[str, str] = {}
        identities: list[bytes] = []

        async def ask(number: int) -> None:
            async with models.using(models.find("alpha")) as service:
                identities.append(service.spec.identity)
                text = (await collect(service.generate(request(service, f"question {number % 5}", 40)))).text
            who = f"{service.spec.identity.hex()} {number % 5}"
            assert text and alone.setdefault(who, text) == text

        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(ask(number))
            await until(lambda: len(identities) == 50)  # some may have ended by then
            began = time.monotonic()
            swapping = group.create_task(models.swap(models.find("alpha"), "beta", 60.0))
            await asyncio.sleep(0)
            if after:  # calls that come meanwhile wait for the new one
                await until(lambda: models.models[0].state != "loaded")
                group.create_task(ask(50))
            await swapping
            took = time.monotonic() - began
            for number in range(51, 61):
                group.create_task(ask(number))
        old, new = dict.fromkeys(identities)
        assert identities.count(old) == 50 and identities.count(new) == (11 if after else 10)
        assert took < 30
        figure(
            f"swap under 50 streams, {'after the old model' if after else 'beside it'}",
            f"61 of 61 answers right, names moved at once; {took:.2f} s (fake engine)",
        )


class Planted(Exception):
    """An exception that no code expects."""


def spoil(folder: Path, failure: str) -> None:
    """Break the files of beta so that it cannot be loaded."""
    beta = folder / "beta"
    if failure == "no config":
        (beta / "config.json").unlink()
    elif failure == "unknown architecture":
        text = (beta / "config.json").read_text()
        (beta / "config.json").write_text(text.replace("Qwen3ForCausalLM", "NobodysForCausalLM"))
    elif failure == "broken":
        (beta / "tokenizer.json").write_bytes(b"{")


def plant_in_service(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service of beta crash, or hang and be cancelled: in its load, or early, while its files are checked."""
    load, prepare = Service.load, Service.prepare

    async def fail() -> None:
        await asyncio.sleep(3600 if failure.startswith("cancelled") else 0)
        raise Planted

    async def crash(service: Service) -> None:
        if service._config.model.endswith("beta"):
            await service.close()
            await fail()
        await load(service)

    async def crash_early(config: Config, first: Any, **more: Any) -> Service:
        if config.model.endswith("beta"):
            first.end()
            await fail()
        return await prepare(config, first, **more)

    early = failure.endswith("early")
    monkeypatch.setattr(Service, "prepare" if early else "load", crash_early if early else crash)


def plant_below(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measuring beta, its worker or its engine fail."""
    launched, engine = launch_module.launch, load_engine.load_engine

    async def measured(config: Config, place: Path, free: int, **more: Any) -> Fit:
        if place.name == "beta":
            return Fit(1 << 50, 1 << 50, ())
        return fitting.fit(config, place, free, more.get("blocks", ()))

    def refuse(load: Any, in_process: bool = False) -> Any:
        if not load.config.model.endswith("beta"):
            return launched(load, in_process)
        if failure == "no process":
            raise OSError(11, "no process can be had")
        ours, theirs = socket.socketpair()
        theirs.close()
        return launch_module.Worker(ours, None)

    def loads(config: Config, *rest: Any) -> Any:
        if config.model.endswith("beta"):
            raise MemoryError
        return engine(config, *rest)

    planted: dict[str, tuple[Any, str, Any]] = {
        "too large": (model_loader, "measure", measured),
        "no process": (launch_module, "launch", refuse),
        "no memory": (load_engine, "load_engine", loads),
        "worker gone": (launch_module, "launch", refuse),
    }
    if failure in planted:
        monkeypatch.setattr(*planted[failure])


FAILURES: dict[str, type[BaseException]] = {
    "missing": UnknownModel,
    "no config": InvalidRequest,
    "unknown architecture": InvalidRequest,
    "broken": InvalidRequest,
    "too large": InvalidRequest,
    "crash": ModelError,
    "crash early": ModelError,
    "cancelled": asyncio.CancelledError,
    "cancelled early": asyncio.CancelledError,
    "no process": NoWorker,
    "no memory": ModelError,
    "worker gone": NoWorker,
}
"""The error that each failure is reported as; only a wrong name is the caller's mistake."""


@pytest.mark.parametrize("after", [False, True], ids=["beside", "after"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_swap_that_fails_leaves_the_old_model(
    tmp_path: Path, failure: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve failures, both beside the old model and after it; a stream on the old model goes on to its end."""
    async with several(tmp_path, "alpha beta", max_loaded=1 if after else 8) as models:
        alpha, identity = models.models[0], models.models[0].identity
        await until(lambda: models.models[1].spec)
        spoil(tmp_path, failure)
        plant_it = plant_in_service if failure.startswith(("crash", "cancelled")) else plant_below
        plant_it(failure, monkeypatch)
        async with models.using(alpha) as service:
            stream = service.generate(request(service, "what runs meanwhile", 64))
        to = str(tmp_path / "nowhere") if failure == "missing" else "beta"
        swapping = asyncio.create_task(models.swap(alpha, to, 5.0))
        if failure.startswith("cancelled"):
            await asyncio.sleep(0.5)
            swapping.cancel()
        with pytest.raises(FAILURES[failure]) as caught:
            await swapping
        assert type(caught.value) is FAILURES[failure] and alpha.swapping is None
        assert (await collect(stream)).done
        async with models.using(models.find("alpha")) as service:
            assert service.spec.identity == identity and service.name == "alpha" and await answered(service)
        assert alpha.swaps == 0 and alpha.config.model == str(tmp_path / "alpha")


async def test_models_of_a_folder_can_be_asked_for(tmp_path: Path) -> None:
    make_models(tmp_path, "alpha beta sub/gamma")
    config = Config(models_dir=str(tmp_path), engine="fake", kv_gb=0.01, kv_disk=False)
    models = Models(config, in_process=True, free=lambda: 8 << 30)
    try:
        await models.start()
        assert states(models) == "alpha:loaded beta:on disk sub/gamma:on disk"
        async with models.using(models.find("sub/gamma")) as service:
            assert service.name == "sub/gamma"
    finally:
        await models.close()


def broken(folder: Path, how: str) -> None:
    """Create something in a folder of models that cannot be loaded."""
    if how == "a config that is cut":
        (make_models(folder, "aaa")[0] / "config.json").write_text("{")
    elif how == "no tokenizer":
        (make_models(folder, "aaa")[0] / "tokenizer.json").unlink()
    elif how == "a GGUF file of nothing":
        (folder / "aaa.gguf").write_bytes(b"GGUF nothing")
    elif how == "a link to nothing":
        (folder / "aaa.gguf").symlink_to(folder / "nowhere")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", ["a config that is cut", "no tokenizer", "a GGUF file of nothing", "a link to nothing"])
async def test_a_broken_model_keeps_no_server_from_starting(tmp_path: Path, how: str, named: bool) -> None:
    """It comes first. The next model is loaded in its place, and it can be requested again once it is mended."""
    places = make_models(tmp_path, "beta gamma")
    broken(tmp_path, how)
    options: dict[str, Any] = {"models_dir": str(tmp_path)}
    if named:
        every = [next(tmp_path.glob("aaa*")), *places]
        options = {"models": tuple(ModelOptions(model=str(place), name=place.stem, load=False) for place in every)}
    config = Config(engine="fake", kv_gb=0.01, kv_disk=False, **options)
    models = Models(config, in_process=True, free=lambda: 8 << 30)
    try:
        await models.start()
        await until(lambda: models.models[2].spec)
        assert states(models) == "aaa:failed beta:loaded gamma:on disk"
        assert model_health.troubles(models) == ["aaa cannot be loaded"] and models.models[0].failure
        async with models.using(models.find(None)) as service:
            assert service.name == "beta" and await answered(service)
        with pytest.raises(Unavailable, match="aaa cannot be loaded"):
            async with models.using(models.find("aaa")):
                raise AssertionError("it was loaded")
    finally:
        await models.close()


@pytest.mark.parametrize("how", ["a config that is cut", "a link to nothing"])
async def test_a_server_whose_models_are_all_broken_says_what_is_wrong_with_the_first(tmp_path: Path, how: str) -> None:
    (make_models(tmp_path, "beta")[0] / "config.json").write_text("[]")
    broken(tmp_path, how)
    config = Config(models_dir=str(tmp_path), engine="fake", kv_gb=0.01, kv_disk=False)
    models = Models(config, in_process=True, free=lambda: 8 << 30)
    try:
        with pytest.raises(ModelError, match="aaa"):
            await models.start()
        assert states(models) == "aaa:failed beta:failed"
    finally:
        await models.close()


def test_unreadable_folders_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_models(tmp_path, "alpha locked/inner")
    (tmp_path / os.fsdecode(b"not \xff UTF-8")).mkdir()
    listed = Path.iterdir

    def locked(path: Path) -> Any:
        if path.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", locked)
    assert [served_model.name for served_model in served_models(Config(models_dir=str(tmp_path)))] == ["alpha"]
    assert "locked is skipped: it cannot be read (Permission denied)" in caplog.text
    assert "is skipped: its name is not UTF-8" in caplog.text


def test_invalid_options_for_several_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no models"):
        served_models(Config(models_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        served_models(Config(models_dir=str(tmp_path / "nowhere")))
    two = (ModelOptions(model="a"), ModelOptions(model="b"))
    with pytest.raises(ConfigError, match="served_name and alias are for a server with one model"):
        served_models(Config(models=two, served_name="x"))
    make_models(tmp_path / "found", "alpha")
    for nameless in (Config(models=two[:1]), Config(models_dir=str(tmp_path / "found"))):
        for name in ({"served_name": "x"}, {"alias": ("x",)}):
            with pytest.raises(ConfigError, match="served_name and alias are for a server with one model"):
                served_models(msgspec.structs.replace(nameless, **name))
    with pytest.raises(ConfigError, match=r"kv_share: the models' shares add up to 1\.5"):
        served_models(Config(models=(ModelOptions(model="a", kv_share=0.9), ModelOptions(model="b", kv_share=0.6))))
    parts = [
        served_model.part
        for served_model in served_models(Config(models=(*two, ModelOptions(model="c", kv_share=0.5))))
    ]
    assert parts == [0.25, 0.25, 0.5]


async def test_a_model_finds_its_kv_whichever_way_it_is_served(tmp_path: Path) -> None:
    """Alone, beside another, or from a folder of models; each time by another server, and when loaded later."""
    places = make_models(tmp_path / "models", "alpha beta")
    stored: dict[str, Any] = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always", "engine": "fake", "kv_gb": 0.01}
    alpha, beta = (ModelOptions(model=str(place)) for place in places)
    servers = {
        "alone": Config(model=str(places[0]), **stored),
        "beside another": Config(models=(beta, alpha), **stored),
        "of a folder": Config(models_dir=str(tmp_path / "models"), **stored),
        "under another name": Config(model=str(places[0]), served_name="gamma", **stored),
    }
    text, answers = "a context ", dict[str, str]()
    for way, config in (*servers.items(), ("alone again", servers["alone"])):
        models = Models(config, in_process=True, free=lambda: 8 << 30)
        try:
            await models.start()
            name = config.served_name or ("alpha" if models.several else None)
            async with models.using(models.find(name)) as service:
                known = len(service.tokenizer.encode(text * 30)) // 16 * 16
                got = await collect(service.generate(request(service, text * 30 + way, 5)))
                answers[way] = f"{got.cache.disk} of {known}"
                await service.flush()
        finally:
            await models.close()
    first, *rest = answers.values()
    assert first.startswith("0 of ") and not first.endswith(" 0")
    assert all(int(answer.split(" of ")[0]) >= int(first.split(" of ")[1]) for answer in rest), answers
