"""The scheduler of an encoder: batches whole texts, taking turns between tenants.

Nothing is cached between steps, so there are no blocks, no preemption and no prefix look-up. A step takes texts up to
a token budget, without padding, and at least one. A tenant's texts run by priority, then by arrival.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import attrgetter

from cairn.scheduler.fairness import Classes, RoundRobin
from cairn.scheduler.planned_step import Plan
from cairn.scheduler.sequence import Matcher
from cairn.scheduler.step_budget import Limits, PrefillPace
from cairn.system.interfaces import Clock
from cairn.types.errors import Conflict, ContextTooLong, InvalidRequest
from cairn.types.outputs import FinishReason, Output, Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport, SchedulerStats
from cairn.types.step import EngineInfo, Row, RowResult


@dataclass(slots=True, eq=False)
class _Text:
    """A request from `add` to its output."""

    request: Request
    arrival: float
    deadline: float
    rank: tuple[int, int]


class TextQueue:
    """All requests of one encoder; the same interface as `Scheduler`. Not thread-safe."""

    def __init__(self, info: EngineInfo, limits: Limits, clock: Clock) -> None:
        self._info = info
        self._clock = clock
        self._step_tokens = min(limits.step_tokens, info.max_tokens)
        self._max_rows = min(limits.max_running, info.max_rows)
        self._waiting: RoundRobin[_Text] = RoundRobin(limits.weights)
        self._classes = Classes(limits.priorities)
        self._texts: dict[int, _Text] = {}
        self._planned: tuple[Plan, list[_Text], float] | None = None
        self._pace = PrefillPace(math.inf, limits.least_tokens)
        self._serial = itertools.count()
        self._tokens = 0

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._texts

    def stats(self) -> SchedulerStats:
        """Return the queue's statistics."""
        running = len(self._planned[1]) if self._planned else 0
        return SchedulerStats(
            running=running,
            waiting=len(self._texts) - running,
            waiting_tokens=self._tokens,
            groups=(),
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            token_seconds=self._pace.token_seconds,
        )

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a text. `matcher` is ignored: encoders have no grammars.

        Raises `InvalidRequest` or `ContextTooLong` if it cannot be computed, and `Conflict` for an id in use.
        """
        if request.id in self._texts:
            raise Conflict(f"request {request.id} is already running")
        if request.want != "hidden":
            raise InvalidRequest("this model is an encoder and cannot generate text", field="model")
        if len(request.prompt) > self._info.context:
            raise ContextTooLong(
                f"the text has {len(request.prompt)} tokens; the model takes at most {self._info.context}",
                field="input",
            )
        now = self._clock.now()
        deadline = math.inf if request.timeout is None else now + request.timeout
        text = _Text(request, now, deadline, (-request.priority, next(self._serial)))
        self._texts[request.id] = text
        self._waiting.add(request.share, text, key=attrgetter("rank"))
        self._tokens += len(request.prompt)

    def drop(self, id: int, reason: FinishReason) -> Output | None:
        """End a request; None if it is unknown or has already ended."""
        text = self._texts.pop(id, None)
        if text is None:
            return None
        if self._planned is None or text not in self._planned[1]:
            self._take(text)
        return Output(id=id, finish=reason, timing=Timing(queue=self._clock.now() - text.arrival))

    def plan(self) -> Plan | None:
        """Choose the texts of the next step; None if there is nothing to do."""
        if self._planned is not None:
            raise RuntimeError("the last plan was not committed")
        now = self._clock.now()
        ended, chosen, tokens = list[Output](), list[_Text](), 0
        arrivals = ((share, first.arrival) for share, first in self._waiting.firsts())
        for text in self._waiting.by_level(self._classes.levels(arrivals, now)) if self._classes else self._waiting:
            size = len(text.request.prompt)
            if text.deadline <= now:
                del self._texts[text.request.id]
                self._take(text)
                timing = Timing(queue=now - text.arrival)
                ended.append(Output(id=text.request.id, finish=FinishReason.DEADLINE, timing=timing))
                continue
            if len(chosen) == self._max_rows or (chosen and tokens + size > self._step_tokens):
                break
            chosen.append(text)
            tokens += size
        for text in chosen:
            self._take(text)
            self._waiting.served(text.request.share)
            self._classes.served(text.request.share, now)
        if not chosen and not ended:
            return None
        rows = [_row(text.request) for text in chosen]
        started = [text.request.id for text in chosen]
        plan = Plan(rows, [], ended, started, [], tokens, 0, encodes=True)
        self._planned = plan, chosen, now
        return plan

    def follow(self, plan: Plan) -> None:
        """Return None: texts are batched when the step before has ended."""

    def commit(self, plan: Plan, results: list[RowResult] | Exception, seconds: float = 0.0) -> list[Output]:
        """Return the outputs of the last plan, given the results of its rows in order or the engine's exception."""
        if self._planned is None or plan is not self._planned[0]:
            raise RuntimeError("this is not the last plan")
        (_, texts, began), self._planned = self._planned, None
        if not isinstance(results, Exception) and len(results) != len(texts):
            results = RuntimeError(f"{len(results)} results for {len(texts)} rows")
        if isinstance(results, Exception):
            error = f"the engine failed while it computed this request ({type(results).__name__})"
            results = [RowResult(error=error)] * len(texts)
        elif texts:
            self._pace.record(0, plan.chunked, seconds)
        now = self._clock.now()
        outputs = list(plan.ended)
        for text, result in zip(texts, results, strict=True):
            request = text.request
            if self._texts.pop(request.id, None) is not None:
                timing = Timing(queue=began - text.arrival, prefill=now - began)
                outputs.append(encoder_output(request, result, CacheReport(computed=len(request.prompt)), timing))
        return outputs

    def _take(self, text: _Text) -> None:
        self._waiting.remove(text.request.share, text)
        self._tokens -= len(text.request.prompt)


def encoder_output(request: Request, result: RowResult, cache: CacheReport | None, timing: Timing) -> Output:
    """Return the last output of a request that wants a hidden state."""
    error = result.error or ("" if result.hidden else "the engine gave neither a state nor an error")
    finish = FinishReason.ERROR if error else FinishReason.STOP
    return Output(id=request.id, finish=finish, error=error, cache=cache, timing=timing, vector=result.hidden)


def _row(request: Request) -> Row:
    count = len(request.prompt)
    return Row(
        request.prompt, 0, count, (), count - 1, count, request.sampling, 0, want="hidden", second=request.second
    )
