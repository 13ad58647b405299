"""The scheduler of an encoder: whole texts in the order of their tenants' turns, as many in a step as it takes.

Nothing is kept between steps, so there are no blocks, no preemption and nothing to look up: a step has texts up to a
number of tokens, without padding, and at least one. Of one tenant what is urgent comes first, then what came first.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from cairn.scheduler.fairness import Classes, RoundRobin
from cairn.scheduler.plan import Limits, Plan, PrefillPace
from cairn.scheduler.sequence import Matcher
from cairn.system.interfaces import Clock
from cairn.types.errors import Conflict, ContextTooLong, InvalidRequest
from cairn.types.outputs import FinishReason, Output, Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport, SchedulerStats
from cairn.types.step import EngineInfo, Row, RowResult


@dataclass(slots=True, eq=False)
class _Text:
    """One request while it waits."""

    request: Request
    arrival: float
    deadline: float
    rank: tuple[int, int]


class TextQueue:
    """All requests of one encoder. One thread; the same calls as `Scheduler`."""

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
        """What the queue holds now."""
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
        """Queue a text, which has no grammar.

        Raises `InvalidRequest`, `ContextTooLong` or `Conflict` for one that cannot be computed.
        """
        if request.id in self._texts:
            raise Conflict(f"request {request.id} is running already")
        if request.want != "hidden":
            raise InvalidRequest("this model is an encoder: it generates nothing", field="model")
        if len(request.prompt) > self._info.context:
            raise ContextTooLong(
                f"the text has {len(request.prompt)} tokens and the model takes {self._info.context}", field="input"
            )
        now = self._clock.now()
        deadline = math.inf if request.timeout is None else now + request.timeout
        text = _Text(request, now, deadline, (-request.priority, next(self._serial)))
        self._texts[request.id] = text
        self._waiting.add(request.share, text, key=_rank)
        self._tokens += len(request.prompt)

    def drop(self, id: int, reason: FinishReason) -> Output | None:
        """Forget a request; None if there is no such request (any more)."""
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
        came = ((share, first.arrival) for share, first in self._waiting.firsts())
        for text in self._waiting.by_level(self._classes.levels(came, now)) if self._classes else self._waiting:
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

    def commit(self, plan: Plan, results: list[RowResult] | Exception, seconds: float = 0.0) -> list[Output]:
        """Take the results of the last plan, in the order of its rows, or what the engine raised instead."""
        if self._planned is None or plan is not self._planned[0]:
            raise RuntimeError("this is not the plan that was made last")
        (_, texts, began), self._planned = self._planned, None
        if not isinstance(results, Exception) and len(results) != len(texts):
            results = RuntimeError(f"{len(results)} results for {len(texts)} rows")
        if isinstance(results, Exception):
            error = f"the engine failed while it computed this request ({type(results).__name__})"
            results = [RowResult(error=error)] * len(texts)
        elif texts:
            self._pace.took(0, plan.chunked, seconds)
        now = self._clock.now()
        outputs = list(plan.ended)
        for text, result in zip(texts, results, strict=True):
            request = text.request
            if self._texts.pop(request.id, None) is not None:
                timing = Timing(queue=began - text.arrival, prefill=now - began)
                outputs.append(encoded(request, result, CacheReport(computed=len(request.prompt)), timing))
        return outputs

    def _take(self, text: _Text) -> None:
        self._waiting.remove(text.request.share, text)
        self._tokens -= len(text.request.prompt)


def encoded(request: Request, result: RowResult, cache: CacheReport | None, timing: Timing) -> Output:
    """The last output of a request that wants a hidden state."""
    error = result.error or ("" if result.hidden else "the engine gave neither a state nor an error")
    finish = FinishReason.ERROR if error else FinishReason.STOP
    return Output(id=request.id, finish=finish, error=error, cache=cache, timing=timing, vector=result.hidden)


def _rank(text: _Text) -> tuple[int, int]:
    return text.rank


def _row(request: Request) -> Row:
    count = len(request.prompt)
    return Row(
        request.prompt, 0, count, (), count - 1, count, request.sampling, 0, want="hidden", second=request.second
    )
