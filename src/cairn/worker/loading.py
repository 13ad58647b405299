"""Loading of a worker's model: its files, its pool, its stores, and the scheduler built around them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

from cairn.kv.pool.cache import Cache
from cairn.kv.pool.prefix import Layout
from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.tiers.store import Store
from cairn.kv.tiers.tiers import Tiers
from cairn.models.hub.digests import watched
from cairn.models.spec.tokenizer_files import with_tokenizer
from cairn.scheduler.drafts.combined import GuessingModel
from cairn.scheduler.drafts.draft_model import DraftModel
from cairn.scheduler.drafts.mtp_head import MtpHead
from cairn.scheduler.drafts.policy import chosen_policy
from cairn.scheduler.encoder_queue import TextQueue
from cairn.scheduler.planned_step import Planner
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock, SystemFiles
from cairn.system.stages import Stages, process_age
from cairn.types.errors import CairnError, ModelError
from cairn.types.model_spec import ModelSpec
from cairn.types.step import AdapterFacts, Engine, EngineInfo
from cairn.worker import wire
from cairn.worker.adapter_loading import attach_first
from cairn.worker.grammars import Grammars, read_vocabulary
from cairn.worker.stores import check_pool, keyed, open_stores, stored_bytes, write_limits

log = logging.getLogger(__name__)

NO_MEMORY = (
    "not enough memory for the model and its KV: lower --kv-gb, or raise the memory limit of this process (ulimit -v)"
)
QUIET_SECONDS = 1.0
"""Shorter loads print nothing on a terminal."""
LINE_SECONDS = 5.0
"""Seconds between two log lines."""
_DRAW_SECONDS = 0.2
_CLEAR = "\r\x1b[K"
_WIDTH = 30


class LoadProgress:
    """A `digests.Watch` that shows a load's progress: a progress bar on a terminal, otherwise lines in the log.

    It hides no cursor and draws on no thread of its own, because a worker may be killed at any moment.
    """

    def __init__(self, model: str, out: TextIO, clock: Clock) -> None:
        self._model, self._out, self._clock = model, out, clock
        self._terminal = out.isatty()
        self._began = clock.now()
        self._next = self._began + (QUIET_SECONDS if self._terminal else LINE_SECONDS)
        self._drawn = False

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Show the progress if an update is due."""
        now = self._clock.now()
        if now < self._next or not log.isEnabledFor(logging.INFO):
            return
        share = min(1.0, done / max(1, total))
        seconds = now - self._began
        if self._terminal:
            self._next = now + _DRAW_SECONDS
            bar = "━" * round(share * _WIDTH)
            self._write(f"{_CLEAR}Loading: {doing} {bar:<{_WIDTH}} {share:4.0%} {seconds:4.0f} s")
            self._drawn = True
        else:
            self._next = now + LINE_SECONDS
            log.info("loading %s for %.0f s: %s, %.0f %%", self._model, seconds, doing, 100 * share)

    def end(self) -> None:
        """Clear the progress bar."""
        if self._drawn:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, UnicodeError):
            self._next = float("inf")  # closed, or unable to encode the bar: draw no more


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model with its scheduler, stores and grammars."""

    engine: Engine
    cache: Cache
    scheduler: Planner
    tiers: Tiers | None
    grammars: Grammars
    clock: Clock
    ready: wire.ModelReady
    guesser: DraftModel | None = None


def load_visibly(channel: wire.Channel, order: wire.LoadModel) -> LoadedEngine | None:
    """Load as `load` does, showing progress if it takes long."""
    shown = LoadProgress(order.config.model, sys.stderr, SystemClock())
    try:
        with watched(shown):
            return load(channel, order)
    finally:
        shown.end()


class _Opened(NamedTuple):
    """A loaded model and its stores, before anything is built around them."""

    spec: ModelSpec
    engine: Engine
    info: EngineInfo
    """The engine's description with the codec in its identity: see `keyed`."""
    adapters: tuple[AdapterFacts | None, ...]
    stores: Mapping[TierName, Store]
    trouble: str
    guesser: DraftModel | None


def load(channel: wire.Channel, order: wire.LoadModel) -> LoadedEngine | None:
    """Load everything that steps need; on failure send `LoadFailed` and return None."""
    stages = Stages(SystemClock(), process_age())
    try:
        opened = _open(channel, order, stages)
    except EOFError:  # the front is gone, or no longer wants this model
        raise
    except CairnError as error:
        channel.send(wire.LoadFailed(error.code, str(error)))
    except MemoryError:
        channel.send(wire.LoadFailed(ModelError.code, NO_MEMORY))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        channel.send(wire.LoadFailed(CairnError.code, f"the model could not be loaded: {error!r}"))
    else:
        return _assemble(channel, order, opened, stages)
    return None


def _open(channel: wire.Channel, order: wire.LoadModel, stages: Stages) -> _Opened:
    """Load the model and open its stores. On failure nothing of the model stays open."""
    from cairn.engine.load_engine import check_files, import_engine, load_engine
    from cairn.engine.mtp_head import guesses

    config, folder = order.config, Path(order.folder)
    clock, files = SystemClock(), SystemFiles()
    import_engine(config)
    stages.end("imports")
    if order.wait:
        check_files(config, folder)
        channel.send(wire.FilesChecked())
        if channel.receive(None) != [wire.StartLoading()]:
            raise wire.WireError("after FilesChecked only StartLoading may follow")
    with contextlib.ExitStack() as on_failure:
        guesser: DraftModel | None = None
        if order.draft and guesses(config):  # before the model, whose pool takes a part of the memory that is free then
            from cairn.worker.draft_model import load_draft_model

            guesser = load_draft_model(config, Path(order.draft), Path(config.tokenizer or order.folder))
            on_failure.callback(guesser.close)
        expected = stored_bytes(config, files)
        spec, engine = load_engine(config, folder, expected, order.blocks, stages.end)
        on_failure.callback(engine.close)
        adapters = attach_first(engine, order.adapters)
        served_spec = with_tokenizer(spec, config.tokenizer)
        info = keyed(engine.info, config.kv_codec)
        check_pool(config, engine.info, files, os.environ)
        stores: Mapping[TierName, Store] = {}
        trouble = ""
        if info.generates:
            stores, trouble = open_stores(config, spec, info, clock, files, os.environ, order.kv_part)
        on_failure.pop_all()
    return _Opened(served_spec, engine, info, adapters, stores, trouble, guesser)


def _assemble(channel: wire.Channel, order: wire.LoadModel, opened: _Opened, stages: Stages) -> LoadedEngine:
    """Build the scheduler, the cache and its tiers around a loaded model."""
    from cairn.engine.load_engine import head_of
    from cairn.engine.mtp_head import guess_note, guesses

    config, clock, known = order.config, SystemClock(), opened.info
    cache = Cache(known)
    tiers = None
    if opened.stores:
        limited = write_limits(config)
        tiers = Tiers(
            cache, opened.engine, clock, opened.stores, load=config.kv_load, limits=limited, wake=channel.wake
        )
        tiers.start()
    limits = Limits(
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        step_seconds=config.step_seconds,
        weights=order.turns.weights,
        priorities=order.turns.priorities,
    )
    states = any(group.kind == "state" for group in known.groups)
    head = head_of(opened.engine)
    model: GuessingModel | None = opened.guesser if head is None else MtpHead(head)
    drafts = chosen_policy(config.speculate, states=states, model=model) if guesses(config) else None
    generates = known.generates
    scheduler: Planner = Scheduler(cache, limits, clock, drafts) if generates else TextQueue(known, limits, clock)
    info = wire.Info(
        context=known.context,
        pool_tokens=cache.longest,
        vocab=known.vocab,
        max_rows=known.max_rows,
        blocks=known.blocks,
        identity=known.identity,
        note="; ".join(one for one in (known.note, guess_note(config)) if one),
        device=known.device,
        device_text=known.device_text,
        cpu_experts=known.cpu_experts,
        layout=Layout(known.block_tokens, known.groups),
    )
    ends = opened.spec.eos_ids
    vocabulary = partial(read_vocabulary, Path(order.folder), config.tokenizer, known.vocab, ends)
    grammars = Grammars(vocabulary, channel.wake, clock)
    stages.end("stores")
    if config.verbose:
        log.info("start of the worker, in seconds (of the processor): %s", stages.sentence())
    ready = wire.ModelReady(opened.spec, info, opened.trouble, opened.adapters)
    return LoadedEngine(opened.engine, cache, scheduler, tiers, grammars, clock, ready, opened.guesser)
