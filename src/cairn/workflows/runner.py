"""Runs a workflow: each node starts as soon as its dependencies are done.

A node's prompt depends on the outputs it reads and on the run's seed, so neither the order in which nodes finish nor a
restart changes an answer. Finished nodes are in the journal and are not run again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from cairn.agents.work_journals import Journal, Journals
from cairn.frontend.request_options import SamplingOptions
from cairn.system.concurrency import gather_with_limit, together
from cairn.text.grammar.grammar import ANYTHING, Structure, Wanted
from cairn.text.tokens.json_texts import length
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import CairnError, Cancelled, Unavailable
from cairn.types.outputs import Delta
from cairn.workflows.answerer import Answered, Answerer, Asker
from cairn.workflows.checks import Graph
from cairn.workflows.contracts import Breach, grammar_schema, read_answer
from cairn.workflows.definition import NODE_TOKENS, Condition, Node, Workflow
from cairn.workflows.paths import INDEX, INPUTS, ITEM, MISSING, PREVIOUS, holds, key_of, lookup, paths_of
from cairn.workflows.prompt_memory import PromptMemory
from cairn.workflows.templates import Absent, TooLong, filling

RunStatus = Literal["running", "interrupted", "finished", "failed"]


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run as it was requested."""

    id: str
    workflow: Workflow
    inputs: dict[str, Any] = {}
    seed: int = 0


class NodeEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="node"):
    """The end of a node, of one item of a fan-out, or of a node in one iteration of a loop."""

    key: str
    """`plan`; `code.3` for an item; `repair#2/fix` in a loop's second iteration."""
    state: Literal["done", "skipped", "failed"]
    output: Any = None
    why: str = ""
    """Why it was skipped or failed."""
    lost: bool = False
    """Whether it was skipped because a dependency failed."""
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """The end of a run."""

    state: Literal["finished", "failed"]
    result: Any = None
    sources: dict[str, str] = {}
    """The node that each field of a merged result comes from."""
    conflicts: tuple[dict[str, Any], ...] = ()
    why: str = ""


RunItem = NodeEnded | RunEnded


class FieldConflict(NamedTuple):
    """Two nodes' differing values of one field."""

    field: str
    won: str
    """The node whose value is used, with the item's number in a fan-out."""
    value: Any
    lost: str
    other: Any
    why: str


class Merged(NamedTuple):
    """A merged result."""

    values: dict[str, Any]
    sources: dict[str, str]
    """The node that each field comes from."""
    conflicts: list[FieldConflict]


def merge(precedence: Sequence[str], outputs: Mapping[str, Any]) -> Merged:
    """Merge the fields of these nodes' outputs; skipped nodes have none."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    keys: dict[str, Hashable] = {}
    conflicts = []
    for name in precedence:
        output = outputs.get(name)
        listed = isinstance(output, list)
        for index, one in enumerate(output if isinstance(output, list) else [output]):
            source = f"{name}.{index}" if listed else name
            for field, value in sorted(one.items()) if isinstance(one, Mapping) else ():
                key = key_of(value)
                if field not in values:
                    values[field], sources[field], keys[field] = value, source, key
                elif keys[field] != key:
                    why = _why(sources[field], source)
                    conflicts.append(FieldConflict(field, sources[field], values[field], source, value, why))
    return Merged(values, sources, conflicts)


def _why(won: str, lost: str) -> str:
    one, other = won.partition(".")[0], lost.partition(".")[0]
    if one == other:
        return f"an earlier item of {one} comes before a later one"
    return f"{one} comes before {other} in merge.precedence"


T = TypeVar("T")
Emit = Callable[[dict[str, Any]], object]
PASSING = (Unavailable, Cancelled)
"""Errors that are not a node's fault: the run is interrupted and can be resumed."""


class WorkflowRun:
    """One run, continued from its journal."""

    def __init__(
        self,
        run: Run,
        graph: Graph,
        journals: Journals,
        journal: Journal,
        answerer: Answerer,
        asker: Asker,
        memory: PromptMemory,
        emit: Emit,
    ) -> None:
        """Prepare a run. `graph` is `check_workflow`'s; `memory` bounds the prompts of all runs together."""
        self._run, self._workflow, self._graph, self._memory = run, run.workflow, graph, memory
        self._journals, self._journal, self._answerer, self._asker = journals, journal, answerer, asker
        self._emit = emit
        self._turn = asyncio.Semaphore(run.workflow.at_once)
        self._known = {one.value.key: one.value for one in journal.read(RunItem) if isinstance(one.value, NodeEnded)}

    async def work(self) -> RunEnded:
        """Run all nodes that are not done; return how the run ended."""
        self._emit({"type": "run.started", "run": self._run.id, "resumed": bool(self._known)})
        values: dict[str, Any] = {INPUTS: self._run.inputs}
        ended = await self._nodes(self._graph, values, "")
        over = await self._result(ended, values)
        await self._journals.append(self._journal, over)
        self._emit({**msgspec.to_builtins(over), "type": "run.done"})
        return over

    async def _result(self, ended: Mapping[str, NodeEnded], values: Mapping[str, Any]) -> RunEnded:
        failed = [one for one in ended.values() if one.state == "failed"]
        if failed:
            return RunEnded(state="failed", why="; ".join(f"{one.key}: {one.why}" for one in failed))
        if self._workflow.merge is not None:
            names = self._workflow.merge.precedence
            parts = [values[name] for name in names if name in values]
            merged = await _apart(parts, merge, names, values)
            conflicts = tuple(conflict._asdict() for conflict in merged.conflicts)
            return RunEnded(state="finished", result=merged.values, sources=merged.sources, conflicts=conflicts)
        read = frozenset[str]().union(*self._graph.needs.values())
        last = {node.id: values[node.id] for node in self._graph.nodes if node.id not in read and node.id in values}
        return RunEnded(state="finished", result=last)

    async def _nodes(self, graph: Graph, values: dict[str, Any], prefix: str) -> dict[str, NodeEnded]:
        """Run nodes and put their outputs into `values`; return how each ended, in the graph's order."""
        ended: dict[str, NodeEnded] = {}
        over = {node.id: asyncio.Event() for node in graph.nodes}

        async def run(node: Node) -> None:
            for name in sorted(graph.needs[node.id]):
                await over[name].wait()
            needed = [ended[name] for name in sorted(graph.needs[node.id])]
            lost = [one.key for one in needed if one.lost or one.state == "failed"]
            one = await self._node(graph, node, values, prefix, lost)
            if one.state == "done":
                values[node.id] = one.output
            ended[node.id] = one
            over[node.id].set()

        await together([run(node) for node in graph.nodes])
        return {node.id: ended[node.id] for node in graph.nodes}

    async def _node(
        self, graph: Graph, node: Node, values: Mapping[str, Any], prefix: str, lost: Sequence[str]
    ) -> NodeEnded:
        """Run one node with all its items, or its loop."""
        key = prefix + node.id
        if (known := self._known.get(key)) is not None:
            self._tell_end(known, node)
            return known
        if lost:
            return await self._end(NodeEnded(key=key, state="skipped", why=f"{lost[0]} failed", lost=True), node)
        if node.when is not None and not await _holds(node.when, values):
            return await self._end(NodeEnded(key=key, state="skipped", why="its condition does not hold"), node)
        if node.loop is not None:
            return await self._loop(graph, node, values, key)
        if node.each is None:
            return await self._ask_in_turn(node, values, key)
        return await self._fan_out(node, values, key)

    async def _ask_in_turn(self, node: Node, values: Mapping[str, Any], key: str) -> NodeEnded:
        async with self._turn:
            return await self._ask(node, values, key)

    async def _loop(self, graph: Graph, node: Node, values: Mapping[str, Any], key: str) -> NodeEnded:
        """Iterate a loop; its output is the last output of each of its nodes."""
        assert node.loop is not None
        latest: dict[str, Any] = {}
        done = node.loop.until is None
        runs = 0
        for runs in range(1, node.loop.limit + 1):
            inner = {**values, PREVIOUS: dict(latest)}
            ended = await self._nodes(graph.bodies[node.id], inner, f"{key}#{runs}/")
            failed = [one for one in ended.values() if one.state == "failed"]
            if failed:
                why = f"{failed[0].key}: {failed[0].why}"
                return await self._end(NodeEnded(key=key, state="failed", why=why), node)
            latest |= {name: inner[name] for name in ended if name in inner}
            if node.loop.until is not None and await _holds(node.loop.until, inner):
                done = True
                break
        return await self._end(NodeEnded(key=key, state="done", output={**latest, "runs": runs, "done": done}), node)

    async def _fan_out(self, node: Node, values: Mapping[str, Any], key: str) -> NodeEnded:
        """Run a node for each item; its output is the list of theirs, in the items' order."""
        assert node.each is not None
        items = lookup(values, node.each.items)
        if not isinstance(items, list):
            why = f"{node.each.items} is " + ("not there" if items is MISSING else "no list")
            return await self._end(NodeEnded(key=key, state="skipped" if items is MISSING else "failed", why=why), node)
        if len(items) > node.each.limit:
            why = f"{node.each.items} holds {len(items)} items; the limit is {node.each.limit}"
            return await self._end(NodeEnded(key=key, state="failed", why=why), node)

        async def known(ended: NodeEnded) -> NodeEnded:
            self._tell_end(ended, node)
            return ended

        def work() -> Iterator[tuple[bool, Callable[[], Coroutine[Any, Any, NodeEnded]]]]:
            for index, item in enumerate(items):
                if (done := self._known.get(f"{key}.{index}")) is not None:
                    yield False, partial(known, done)
                else:
                    yield True, partial(self._ask, node, {**values, ITEM: item, INDEX: index}, f"{key}.{index}")

        ended = await gather_with_limit(self._turn, work())
        failed = (one for one in ended if one.state == "failed")  # before those that were skipped: it may be resumed
        bad = next(failed, None) or next((one for one in ended if one.state != "done"), None)
        if bad is not None:
            return await self._end(NodeEnded(key=key, state=bad.state, why=f"{bad.key}: {bad.why}"), node)
        return await self._end(NodeEnded(key=key, state="done", output=[one.output for one in ended]), node)

    async def _ask(self, node: Node, values: Mapping[str, Any], key: str) -> NodeEnded:
        """Ask until the answer fits the contract or retries are used up. The caller holds a slot."""
        return await self._end(await self._asked(node, values, key), node)

    async def _asked(self, node: Node, values: Mapping[str, Any], key: str) -> NodeEnded:
        try:
            found = filling(node.prompt, values)
            size = await _apart(found.parts, found.size, f"{node.id}.prompt")
        except Absent as absent:
            why = f"{absent} is not there: what makes it was skipped"
            return NodeEnded(key=key, state="skipped", why=why)
        except TooLong as error:
            return NodeEnded(key=key, state="failed", why=str(error))
        async with self._memory.hold(self._asker.share or self._asker.tenant, size):
            self._emit({"type": "node.started", "node": node.id, "key": key, "role": node.role})
            answers: list[Answered] = []
            try:
                return await self._attempts(node, await _apart(found.parts, found.text), key, answers)
            except PASSING:
                raise
            except CairnError as error:  # such as a prompt that is too long, or a contract that no grammar can enforce
                return NodeEnded(key=key, state="failed", why=str(error), **_figures(answers))

    async def _attempts(self, node: Node, prompt: str, key: str, answers: list[Answered]) -> NodeEnded:
        """Ask until an answer fits; add each answer to `answers`."""
        messages = [*self._told(node), {"role": "user", "content": prompt}]
        why = ""
        for attempt in range(1, node.retries + 2):
            answered = await self._answerer.answer(
                self._asker,
                messages,
                self._options(node, key, attempt),
                _wanted(node),
                lambda delta: self._tell_delta(node, key, delta),
            )
            answers.append(answered)
            try:
                value = read_answer(node.output, answered.text, answered.finish_reason)
            except Breach as breach:
                why = str(breach)
            else:
                return NodeEnded(key=key, state="done", output=value, **_figures(answers))
            self._emit({"type": "node.retry", "node": node.id, "key": key, "attempt": attempt, "why": why})
            again = f"That breaks the contract: {why}. Answer again, with nothing but JSON that fits it."
            messages = [
                *messages,
                {"role": "assistant", "content": answered.text},
                {"role": "user", "content": again},
            ]
        return NodeEnded(key=key, state="failed", why=f"{why}, {len(answers)} times", **_figures(answers))

    def _told(self, node: Node) -> list[dict[str, Any]]:
        """Return the system message: the workflow's text before the role's, so that nodes share a prefix."""
        role = self._workflow.roles.get(node.role, f"You are the {node.role}." if node.role else "")
        told = "\n\n".join(text for text in (self._workflow.system, role) if text)
        return [{"role": "system", "content": told}] if told else []

    def _options(self, node: Node, key: str, attempt: int) -> SamplingOptions:
        thinking = {} if node.output is None else {"reasoning_budget": 0}
        given = {"max_tokens": NODE_TOKENS, **thinking, **node.sampling}
        mixed = f"{self._run.seed} {given.pop('seed', '')} {key} {attempt}"
        seed = int.from_bytes(hashlib.sha256(mixed.encode()).digest()[:7], "big")
        return SamplingOptions(**given, seed=seed)

    async def _end(self, ended: NodeEnded, node: Node) -> NodeEnded:
        await self._journals.append(self._journal, ended)
        self._tell_end(ended, node)
        return ended

    def _tell_end(self, ended: NodeEnded, node: Node) -> None:
        self._emit({**msgspec.to_builtins(ended), "type": f"node.{ended.state}", "node": node.id})

    def _tell_delta(self, node: Node, key: str, delta: Delta) -> None:
        if delta.reasoning:
            self._emit({"type": "node.delta", "node": node.id, "key": key, "reasoning": delta.reasoning})
        if delta.text:
            self._emit({"type": "node.delta", "node": node.id, "key": key, "content": delta.text})


async def _apart(parts: Sequence[Any], work: Callable[..., T], *given: Any) -> T:
    """Run work that is linear in values' length, on another thread if they are long."""
    return await asyncio.to_thread(work, *given) if length(parts) > INLINE else work(*given)


async def _holds(condition: Condition, values: Mapping[str, Any]) -> bool:
    found = [lookup(values, path) for path in {*paths_of(condition)}]
    return await _apart([one for one in found if one is not MISSING], holds, condition, values)


def _wanted(node: Node) -> Wanted:
    if node.output is None:
        return ANYTHING
    text = json.dumps(grammar_schema(node.output), ensure_ascii=False)
    return Wanted(structure=Structure(kind="json", text=text, field=f"nodes.{node.id}.output"))


def _figures(answers: Sequence[Answered]) -> dict[str, Any]:
    return {
        "attempts": len(answers),
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "cached_tokens": sum(one.cached_tokens for one in answers),
        "completion_tokens": sum(one.completion_tokens for one in answers),
    }
