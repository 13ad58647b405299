"""The workflow runs of a server. A run is a journal of the token log; after a crash it goes on node by node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from cairn.agents.log.records import check
from cairn.agents.work_journals import Journal, Journals
from cairn.types.errors import Conflict, InvalidRequest
from cairn.workflows.answerer import Answerer, Asker
from cairn.workflows.bounds import listed
from cairn.workflows.checks import check_workflow
from cairn.workflows.definition import Workflow
from cairn.workflows.prompt_memory import PromptMemory
from cairn.workflows.runner import Emit, NodeEnded, Run, RunEnded, RunItem, RunStatus, WorkflowRun

ROOM = "run"
MAX_RUN = 4 << 20
"""Bytes of a workflow and its inputs, which stay in memory as long as the run is kept."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run as clients see it."""

    run: Run
    created: float
    model: str
    """Name of the model it was created with."""
    state: RunStatus
    nodes: dict[str, NodeEnded]
    """Finished nodes by key."""
    ended: RunEnded | None
    report: dict[str, int]
    """Prompt tokens in all, and how many of them were computed and cached."""


class Runs:
    """The runs of all tenants. Methods that name a run raise NotFound if the tenant has no such run."""

    def __init__(self, journals: Journals, answerer: Answerer) -> None:
        self._journals, self._answerer, self._memory = journals, answerer, PromptMemory()
        self._running: dict[int, asyncio.Task[Any]] = {}
        """Running tasks by journal key."""

    async def create(
        self,
        tenant: str,
        workflow: Workflow,
        inputs: dict[str, Any],
        *,
        id: str | None = None,
        seed: int | None = None,
        model: str = "",
    ) -> RunState:
        """Create a run without starting it. Raise InvalidRequest if the workflow is wrong or an input is missing."""
        await asyncio.to_thread(check_workflow, workflow)
        given = _inputs(workflow, inputs)
        if seed is None:
            seed = self._journals.seed() >> 11  # 53 bits, what JSON numbers hold
        id = f"run-{self._journals.seed():016x}" if id is None else id
        run = Run(id=id, workflow=workflow, inputs=given, seed=seed)
        await asyncio.to_thread(_check_size, run)
        return self._state(await self._journals.create(ROOM, tenant, id, run, model=model))

    def get(self, tenant: str, id: str) -> RunState:
        """Return the current state of a run."""
        return self._state(self._find(tenant, id))

    async def created(self, tenant: str) -> dict[str, float]:
        """Return when a tenant's runs were made, by id, the newest first."""
        return await self._journals.created(ROOM, tenant)

    async def refresh(self, tenant: str, ids: Sequence[str]) -> None:
        """Update these runs from the shared store, if there is one, as far as it answers."""
        await self._journals.refresh_listed(ROOM, tenant, ids)

    def check_open(self, tenant: str, id: str) -> None:
        """Raise Conflict if a run is at work or finished, Running if it is at work on another server."""
        self._journals.check_free(self._find(tenant, id))
        state = self.get(tenant, id).state
        if state in ("running", "finished"):
            raise Conflict(f"run {id} is {state}")

    async def work(self, asker: Asker, id: str, emit: Emit) -> RunEnded:
        """Run everything that is not done. A failed run tries its failed nodes once more."""
        self.check_open(asker.tenant, id)
        journal = self._find(asker.tenant, id)
        async with self._at_work(journal):
            await self._forget_failures(journal)
            run = msgspec.msgpack.decode(journal.record.body, type=Run)
            graph = await asyncio.to_thread(check_workflow, run.workflow)
            answerer, memory = self._answerer, self._memory
            return await WorkflowRun(run, graph, self._journals, journal, answerer, asker, memory, emit).work()

    async def _forget_failures(self, journal: Journal) -> None:
        """Drop the failures, the nodes skipped for them and the end of the run from the journal."""
        entries = journal.read(RunItem)
        if any(isinstance(entry.value, RunEnded) for entry in entries):
            lost = [entry for entry in entries if _is_lost(entry.value)]
            await self._journals.drop(journal, lost)

    def interrupt(self, tenant: str, id: str) -> bool:
        """Interrupt a run, which can be resumed; return whether it was running.

        Raise Running if it is at work on another server.
        """
        journal = self._find(tenant, id)
        self._journals.check_free(journal)
        task = self._running.get(journal.key)
        if task is not None:
            task.cancel()
        return task is not None

    async def delete(self, tenant: str, id: str) -> None:
        """Cancel a run and erase it."""
        journal = self._find(tenant, id)
        task = self._running.get(journal.key)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
        await self._journals.remove(journal)

    def _find(self, tenant: str, id: str) -> Journal:
        return self._journals.find(ROOM, tenant, id)

    def _state(self, journal: Journal) -> RunState:
        values = [entry.value for entry in journal.read(RunItem)]
        nodes = {one.key: one for one in values if isinstance(one, NodeEnded)}
        ended = next((one for one in values if isinstance(one, RunEnded)), None)
        running = journal.key in self._running or self._journals.at_work_elsewhere(journal)
        state: RunStatus = "running" if running else ended.state if ended is not None else "interrupted"
        prompt = sum(one.prompt_tokens for one in nodes.values())
        cached = sum(one.cached_tokens for one in nodes.values())
        return RunState(
            run=msgspec.msgpack.decode(journal.record.body, type=Run),
            created=journal.record.created,
            model=journal.record.model,
            state=state,
            nodes=nodes,
            ended=ended,
            report={"prompt_tokens": prompt, "computed_tokens": prompt - cached, "cached_tokens": cached},
        )

    @contextlib.asynccontextmanager
    async def _at_work(self, journal: Journal) -> AsyncIterator[None]:
        """Mark the run as at work while entered; `interrupt` cancels the task that entered."""
        task = asyncio.current_task()
        assert task is not None
        self._running[journal.key] = task
        try:
            async with self._journals.working(journal):
                yield
        finally:
            del self._running[journal.key]


def _check_size(run: Run) -> None:
    """Raise InvalidRequest for a run of more than MAX_RUN bytes, or one that no record can hold."""
    check(msgspec.to_builtins(run), ROOM)
    size = len(msgspec.msgpack.encode(run))
    if size > MAX_RUN:
        raise InvalidRequest(
            f"the workflow and its inputs take {size} bytes; the limit of a run is {MAX_RUN}", field="inputs"
        )


def _is_lost(value: NodeEnded | RunEnded) -> bool:
    return isinstance(value, RunEnded) or value.state == "failed" or value.lost


def _inputs(workflow: Workflow, given: dict[str, Any]) -> dict[str, Any]:
    """Return a run's inputs with defaults filled in. Raise InvalidRequest for unknown and missing ones."""
    unknown = sorted(given.keys() - workflow.inputs.keys())
    if unknown:
        raise InvalidRequest(
            f"inputs.{unknown[0][:64]} is no input; inputs are: {listed(workflow.inputs)}", field="inputs"
        )
    found = workflow.inputs | given
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise InvalidRequest(
            f"inputs.{missing[0]} is missing: the workflow has no default for it", field=f"inputs.{missing[0]}"
        )
    return found
