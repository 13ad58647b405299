"""The routes of workflows, under /v1/workflows.

POST /v1/workflows/check                    what is wrong with a workflow, and its graph
POST /v1/workflows/runs                     GET    /v1/workflows/runs?limit=&after=
GET  /v1/workflows/runs/{id}                DELETE /v1/workflows/runs/{id}
POST /v1/workflows/runs/{id}/resume         POST   /v1/workflows/runs/{id}/interrupt
GET  /v1/workflows/runs/{id}/graph?format=  mermaid, svg or png, coloured by the run's state
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from cairn.agents.agents import Agents
from cairn.api.chat.generation import check_model, check_sampling
from cairn.api.chat.paging import LISTED, MOST_LISTED, page_by_id, parameters
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import Body, Count, read_json, read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.api.native.team_schemas import one_of
from cairn.api.native.work_events import Emit, answer
from cairn.frontend.service import Service
from cairn.types.errors import InvalidRequest
from cairn.workflows.answerer import Asker, ServiceAnswerer
from cairn.workflows.bounds import check_bounds
from cairn.workflows.checks import check_workflow, every_node
from cairn.workflows.definition import SAMPLING, workflow_of
from cairn.workflows.drawing import mermaid, png, states_of, svg
from cairn.workflows.runs import Runs, RunState

PATH = "/v1/workflows"
RUNS = f"{PATH}/runs"


class WorkflowRunBody(Body):
    """POST /v1/workflows/runs."""

    workflow: dict[str, Any]
    inputs: dict[str, Any] | None = None
    model: str | None = None
    seed: Count = None
    stream: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest for a seed that JSON's numbers cannot hold."""
        if self.seed is not None and not 0 <= self.seed < 1 << 53:
            raise InvalidRequest("seed must be 0 to 9007199254740991", field="seed")


class RunResumeBody(Body):
    """POST /v1/workflows/runs/{id}/resume."""

    model: str | None = None
    """Another than the run was begun with."""
    stream: bool | None = None


class WorkflowBody(Body):
    """POST /v1/workflows/check."""

    workflow: dict[str, Any]


def run_object(state: RunState, *, whole: bool = True) -> dict[str, Any]:
    """Return a run as clients see it; in a list without its workflow and outputs."""
    found: dict[str, Any] = {
        "id": state.run.id,
        "object": "workflow.run",
        "name": state.run.workflow.name,
        "model": state.model,
        "created": state.created,
        "state": state.state,
        "report": state.report,
    }
    if not whole:
        return found
    ended = state.ended
    return found | {
        "inputs": state.run.inputs,
        "seed": state.run.seed,
        "workflow": msgspec.to_builtins(state.run.workflow),
        "nodes": {key: {**msgspec.to_builtins(one), "type": "node"} for key, one in state.nodes.items()},
        "result": None if ended is None else ended.result,
        "sources": {} if ended is None else ended.sources,
        "conflicts": [] if ended is None else list(ended.conflicts),
        "why": None if ended is None else ended.why or None,
    }


class WorkflowRoutes:
    """The routes of workflows."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._logs, self._attribution = state.config, state.logs, state.attribution
        self._opened: tuple[Agents, Runs] | None = None

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/workflows/check", self.check, WorkflowBody),
            Route("POST", "/v1/workflows/runs", self.run, WorkflowRunBody, model="chat", keeps=True),
            Route("GET", "/v1/workflows/runs", self.list, query=("limit", "after")),
            Route("GET", "/v1/workflows/runs/{id}", self.show),
            Route("DELETE", "/v1/workflows/runs/{id}", self.delete),
            Route("POST", "/v1/workflows/runs/{id}/resume", self.resume, RunResumeBody, model="run", keeps=True),
            Route("POST", "/v1/workflows/runs/{id}/interrupt", self.interrupt, NoBody),
            Route("GET", "/v1/workflows/runs/{id}/graph", self.graph, query=("format",)),
        ]

    async def check(self, call: HTTPCall, service: Service) -> None:
        """Check a workflow. Returns its order and its graph, or a 400 that names the first error."""
        body = parse(WorkflowBody, await read_json(call, self._config), self._config, call)
        order, drawn = await asyncio.to_thread(_checked, body.workflow)
        await call.json({"object": "workflow.check", "valid": True, "order": order, "mermaid": drawn})

    async def run(self, call: HTTPCall, service: Service) -> None:
        """Run a workflow."""
        runs = self._runs()
        body = parse(WorkflowRunBody, await read_json(call, self._config), self._config, call)
        body.check()
        check_model(body.model, service)
        service.check_generates()
        workflow = await asyncio.to_thread(workflow_of, body.workflow)
        check_bounds(workflow)
        for node in every_node(workflow.nodes):
            check_sampling(service, {name: node.sampling[name] for name in node.sampling.keys() & SAMPLING}, node.id)
        state = await runs.create(call.tenant, workflow, body.inputs or {}, seed=body.seed, model=service.name)
        call.headers.append((b"x-cairn-run", state.run.id.encode()))
        await self._work(call, service, runs, state.run.id, stream=bool(body.stream))

    async def resume(self, call: HTTPCall, service: Service) -> None:
        """Resume a run that was interrupted. What failed is tried again."""
        runs, id = self._runs(), call.path_part(RUNS)
        body = parse(RunResumeBody, await read_nothing(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        runs.check_open(call.tenant, id)
        await self._work(call, service, runs, id, stream=bool(body.stream))

    async def _work(self, call: HTTPCall, service: Service, runs: Runs, id: str, *, stream: bool) -> None:
        asker = Asker(call.tenant, call.salt, call.share, service)

        async def work(emit: Emit) -> None:
            await runs.work(asker, id, emit)

        await answer(
            call,
            self._logs,
            self._config,
            work,
            stream=stream,
            whole=lambda: run_object(runs.get(asker.tenant, id)),
        )

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the runs, most recently created first."""
        asked = parameters(call, ("limit", "after"))
        limit = asked.get("limit", str(LISTED))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
            raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
        runs = self._runs()
        created = await runs.created(call.tenant)
        refresh = partial(runs.refresh, call.tenant)

        def show(id: str) -> dict[str, Any]:
            return run_object(runs.get(call.tenant, id), whole=False)

        await call.json(await page_by_id(created, int(limit), asked.get("after"), show, refresh))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a run: its nodes with their outputs, its result and conflicts."""
        await call.json(run_object(self._runs().get(call.tenant, call.path_part(RUNS))))

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a run. Answered when its text is gone from the disk."""
        id = call.path_part(RUNS)
        await self._runs().delete(call.tenant, id)
        await call.json({"id": id, "object": "workflow.run.deleted", "deleted": True})

    async def interrupt(self, call: HTTPCall, service: Service) -> None:
        """Interrupt a run. It continues when it is resumed."""
        runs, id = self._runs(), call.path_part(RUNS)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        await call.json(
            {"id": id, "object": "workflow.run.interrupted", "interrupted": runs.interrupt(call.tenant, id)}
        )

    async def graph(self, call: HTTPCall, service: Service) -> None:
        """Return the graph of a run, coloured by state. `format` is mermaid, svg or png."""
        state = self._runs().get(call.tenant, call.path_part(RUNS))
        form = one_of(parameters(call, ("format",)), "format", ("mermaid", "svg", "png"))
        drawn, kind = await asyncio.to_thread(_drawn, state, form)
        await call.respond(200, drawn, [(b"content-type", kind)])

    def _runs(self) -> Runs:
        """Return the runs in the token log that is open now."""
        agents = self._attribution.open()
        if self._opened is None or self._opened[0] is not agents:
            self._opened = agents, Runs(agents.journals, ServiceAnswerer())
        return self._opened[1]


def _checked(given: dict[str, Any]) -> tuple[list[str], str]:
    """Return the order and the picture of a workflow. Raise InvalidRequest for one that cannot run."""
    workflow = workflow_of(given)
    graph = check_workflow(workflow)
    return [node.id for node in graph.nodes], mermaid(workflow)


def _drawn(state: RunState, form: str) -> tuple[bytes, bytes]:
    """Return the picture of a run and its content type."""
    workflow = state.run.workflow
    states = states_of(workflow, state.nodes, running=state.state == "running")
    if form == "png":
        return png(workflow, states), b"image/png"
    if form == "svg":
        return svg(workflow, states).encode(), b"image/svg+xml"
    return mermaid(workflow, states).encode(), b"text/plain; charset=utf-8"
