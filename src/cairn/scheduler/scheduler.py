"""The scheduler: plans a step, takes its results, and repeats (`plan`, run, `commit`).

A step is one engine call of at most `step_tokens` tokens: first every running sequence that needs its next token, then
chunks of the prompts being computed, then new sequences. Sequences join and leave at every step.

Order. Tenants take turns (`RoundRobin`): each in turn starts one request, however many it has waiting. Within a tenant
`rank` decides, lowest first: the time of arrival minus `AGE_SECONDS` for each level of priority. So waiting raises all
of a tenant's requests alike, and a request is only overtaken by those of its tenant that arrive within `AGE_SECONDS`
times the difference in priority. Priorities do not count between tenants; only the server's owner puts tenants before
others (`Classes`). A request that does not fit is not overtaken at all. One that waits for another to compute their
common prefix may be, for a bounded time; a long one may be by short ones, as below.

Preemption. When blocks run out, the running sequence that started last goes back to waiting, before all that never
ran. It keeps its tokens and its turn, and computes its KV again. The sequence that started first is never preempted, so
one always finishes.

Long prompts. A step takes no more of a long prompt than the engine needs to be fast, and reserves half of its tokens
for short prompts, which fit whole into it. So neither decoding nor an agent's next turn waits for another's 20,000
tokens, which take at most twice as long. Long prompts wait for each other. A short prompt does not overtake a request
of its tenant with a higher priority, nor start if it would take the row or the blocks that the next long one needs.

Waiting. A waiting sequence is ready, or blocked on a block that another computes or on its own load (then others may
overtake it), or on free blocks (then none may). It stays blocked until the cache reports a change; steps do not look at
it before. It is woken by running sequences and loads, which all end. `Cache.recheck` wakes it if nothing runs, or if a
wake-up was lost.

Guesses. Behind the last token of a decoding row a step may check guesses of the tokens that follow (`Speculation`).
They take no block that anything else in the step needs, and what they leave in the blocks is known to nobody:
`computed` and the cache end with the last token of the answer that was computed.

Pace. Beside decoding rows, a step takes only as many prompt tokens as there is time for (`PrefillPace`): on a slow
machine prompts are computed in smaller chunks, and streams keep their rate.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from cairn.kv.pool.blocks import BlockPool
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import Match
from cairn.scheduler.drafts.drafter import DraftPolicy
from cairn.scheduler.encoder_queue import encoder_output
from cairn.scheduler.planned_step import Plan, sizes
from cairn.scheduler.queue import Skipped, WaitingQueue
from cairn.scheduler.sequence import MAX_PRIORITY, Matcher, Sequence, State, check_prompt
from cairn.scheduler.speculation import Speculation, sampled
from cairn.scheduler.step_budget import Limits, PrefillPace, StepBudget
from cairn.system.interfaces import Clock
from cairn.types.errors import Conflict, InvalidRequest
from cairn.types.outputs import FinishReason, Output, Timing
from cairn.types.request import Request
from cairn.types.stats import SchedulerStats
from cairn.types.step import NO_TOKEN, Row, RowResult

RUNNING = State.RUNNING
"""A module constant, because it is read for each row of each step: an enum's attribute takes ten times as long."""
FORCE_SECONDS = 0.004
"""Seconds that a step may be delayed by looking for tokens that grammars force."""
GUESSES_PART = 4
"""Guesses take at most one in so many of a step's tokens that its decoding rows leave."""
PATIENCE = 32
"""Steps without a row after which a running prompt loses its claims: others no longer wait for its blocks."""
LONG_TOKENS = 256
"""Prompts of at least so many tokens are stored as early as durable ones, because they are expensive to compute."""


class Admission(enum.Enum):
    """Decision on a waiting sequence whose turn it is."""

    RUNS = "runs"
    PASSES = "passes"
    """It keeps waiting, and those behind it may run."""
    STOPS = "stops"
    """It keeps waiting, and so do those behind it."""


class Scheduler:
    """All requests of one engine. Not thread-safe; only `add`, `drop`, `plan`, `follow`, `commit` change anything."""

    def __init__(self, cache: Cache, limits: Limits, clock: Clock, drafts: DraftPolicy | None = None) -> None:
        """Make an empty scheduler. `drafts`: the policy of speculation; None turns it off."""
        self._cache = cache
        self._speculation = None if drafts is None else Speculation(drafts, cache.info.vocab)
        self._clock = clock
        self._step_tokens = min(limits.step_tokens, cache.info.max_tokens)
        self._max_rows = min(limits.max_running, cache.info.max_rows, self._step_tokens)
        self._pace = PrefillPace(limits.step_seconds, limits.least_tokens)
        self._longest = min(cache.info.context, cache.longest)
        self._block_tokens = cache.info.block_tokens
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(limits.weights, limits.priorities, clock.now)
        self._running: list[Sequence] = []
        self._planned: list[Plan] = []
        """The plans that were not committed, in order: at most one, and the one that follows it."""
        self._next_deadline = math.inf
        self._serial, self._turns = itertools.count(), itertools.count(1)
        self._queries = self._hits = self._preemptions = 0
        self._accepted = self._rejected = 0

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._sequences

    def stats(self) -> SchedulerStats:
        """Return the scheduler's statistics."""
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            groups=self._cache.use(),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            token_seconds=self._pace.token_seconds,
            accepted=self._accepted,
            rejected=self._rejected,
        )

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request; `matcher` follows its grammar, if it has one.

        The queue has no bound here: the front has one (`admission.Queue`), and may send all requests again at once.
        Raises `InvalidRequest` or `ContextTooLong` for a request that could never run and `Conflict` for an id in use.
        """
        if request.id in self._sequences:
            raise Conflict(f"request {request.id} is already running")
        check_prompt(request, self._cache.info.context, self._longest, self._cache.info.vocab)
        if abs(request.priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {request.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", field="priority"
            )
        now = self._clock.now()
        durable = request.durable or len(request.prompt) >= LONG_TOKENS
        kv = self._cache.context(request.kv_salt, durable=durable, stored=request.stored, once=not request.durable)
        sequence = Sequence(request, kv, self._longest, next(self._serial), now, matcher)
        sequence.force(self._in_time(now))
        self._sequences[request.id] = sequence
        self._waiting.push(sequence)
        self._next_deadline = min(self._next_deadline, sequence.deadline)

    def drop(self, id: int, reason: FinishReason) -> Output | None:
        """End a request in any state and free its blocks; None if it is unknown or has already ended."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return None
        return Output(id=id, finish=reason, timing=self._end(sequence, State.CANCELLED, self._clock.now()))

    def plan(self) -> Plan | None:
        """Choose the rows of the next step and allocate their blocks.

        None if there is nothing to compute now: no requests at all (`idle`), or only ones that wait for loads.
        """
        if self._planned:
            raise RuntimeError("the last plan was not committed")
        now = self._clock.now()
        ended = self._expire(now) if now >= self._next_deadline else []
        started = list[int]()
        preemptions = self._preemptions
        self._cache.recheck(running=bool(self._running))
        work: dict[Sequence, int] = {}
        prompts, again = self._decode(work)
        drafts = self._guess(work, again) if work and self._speculation is not None else {}
        extra = again + sum(map(len, drafts.values())) if drafts else again
        taken = 0
        if prompts or len(self._waiting):  # not in most steps, which only decode
            taken = self._add_prompts(work, prompts, extra, preemptions, now, ended, started)
        if self._preemptions != preemptions:
            work = {sequence: end for sequence, end in work.items() if sequence.state is State.RUNNING}
        if len(work) != len(self._running):
            self._release_stalled(work)
        extra = self._allocate_guesses(work, drafts) if drafts or again else 0
        copies = self._cache.copies()
        if not work and not ended:
            return None
        rows = [sequence.row(end) for sequence, end in work.items()] if not drafts else self._rows(work, drafts)
        counts = sizes(rows, work, prompts=taken > 0)
        self._planned.append(Plan(rows, list(work), ended, started, copies, *counts, extra))
        return self._planned[-1]

    def follow(self, plan: Plan) -> Plan | None:
        """Plan the step after `plan` while `plan` still runs: a row for each answer, for the token that `plan` samples.

        Return None if the results of `plan` are needed first: for prompts, waiting requests, grammars, guesses or more
        blocks. If an answer ends with `plan`, the result of its row is discarded.
        """
        if self._planned != [plan] or len(self._waiting) or self._clock.now() >= self._next_deadline:
            return None
        alive = [number for number, sequence in enumerate(plan.sequences) if sequence.state is RUNNING]
        if len(alive) != len(self._running) or not all(_goes_on(plan.sequences[n], plan.rows[n]) for n in alive):
            return None
        going = {plan.sequences[n]: n for n in alive if len(plan.sequences[n].tokens) + 1 < plan.sequences[n].longest}
        if self._speculation is not None and self._speculation.guess(going, 1, running=True):
            return None
        if not going or not all(self._cache.grow(one.kv, len(one.tokens) + 1) for one in going):
            return None
        rows = [sequence.row_ahead(number) for sequence, number in going.items()]
        self._planned.append(Plan(rows, list(going), [], [], [], 0, len(rows)))
        return self._planned[-1]

    def _decode(self, work: dict[Sequence, int]) -> tuple[list[Sequence], int]:
        """Add the rows of the running sequences that decode.

        Return the other running sequences, which compute prompts, and how many tokens the rows compute again.
        """
        prompts, again = list[Sequence](), 0
        for sequence in tuple(self._running):
            end = sequence.computed + 1
            if len(sequence.tokens) - sequence.unneeded > end:  # inlined `target`: read for each row of each step
                if not self._computes_again(sequence, again):
                    prompts.append(sequence)
                    continue
                again += sequence.again
                end += sequence.again
            if end <= sequence.kv.table.capacity or self._fit(sequence, end):
                work[sequence] = end
        return prompts, again

    def _add_prompts(
        self,
        work: dict[Sequence, int],
        prompts: Iterable[Sequence],
        extra: int,
        preemptions: int,
        now: float,
        ended: list[Output],
        started: list[int],
    ) -> int:
        """Add chunks of `prompts` and of waiting sequences to a step; return how many tokens those have.

        `extra`: tokens of the step beside one for each row of `work`. `preemptions`: how many there were before this
        plan; after another one nothing is started.
        """
        budget = StepBudget(self._step_tokens - len(work) - extra, self._pace.tokens(len(work), extra))
        for sequence in prompts:
            if not budget.kept or budget.short(sequence.missing):
                self._chunk(sequence, budget, work)
        if self._preemptions == preemptions:
            self._admit(work, budget, now, ended, started)
        if budget.kept:
            budget.use_rest()
            for sequence in tuple(self._running):
                self._chunk(sequence, budget, work)
        return budget.taken

    def _rows(self, work: Mapping[Sequence, int], drafts: Mapping[Sequence, list[int]]) -> list[Row]:
        return [sequence.row(end, drafts.get(sequence, ())) for sequence, end in work.items()]

    def _computes_again(self, sequence: Sequence, others: int) -> bool:
        """Return whether a running sequence lacks only its last token and tokens that it computes again.

        `others`: tokens that other sequences compute again. If all of these do not fit into the step beside one token
        for each running sequence, the sequence's are computed like a prompt's.
        """
        fits = len(self._running) + others + sequence.again <= self._step_tokens
        if fits and sequence.missing == 1 + sequence.again:
            return True
        sequence.again = 0
        return False

    def _guess(self, work: Mapping[Sequence, int], again: int) -> dict[Sequence, list[int]]:
        """Return the guesses for the sequences that decode, which compute so many tokens again."""
        assert self._speculation is not None
        return self._speculation.guess(work, (self._step_tokens - len(work) - again) // GUESSES_PART)

    def _allocate_guesses(self, work: Iterable[Sequence], drafts: Mapping[Sequence, list[int]]) -> int:
        """Give the guesses blocks, and leave those out for which there are none.

        Return how many remain, with the tokens that are computed again.
        """
        count = 0
        for sequence in work:
            guesses = drafts.get(sequence, [])
            while guesses and not self._cache.grow_for_guesses(sequence.kv, sequence.computed, len(guesses)):
                del guesses[len(guesses) // 2 :]
            count += len(guesses) + sequence.again
        return count

    def commit(self, plan: Plan, results: list[RowResult] | Exception, seconds: float = 0.0) -> list[Output]:
        """Return the outputs of the first plan not committed, given its rows' results in order or an exception.

        `seconds`: how long the engine took, for `PrefillPace`. Requests dropped meanwhile get no output. If the engine
        raised, all requests of the step end with an error, and nothing that the step wrote gets into the cache.
        """
        if not self._planned or plan is not self._planned[0]:
            raise RuntimeError("this is not the first plan that was not committed")
        del self._planned[0]
        now, outputs = self._clock.now(), list(plan.ended)
        in_time = self._in_time(now)
        if not isinstance(results, Exception) and len(results) != len(plan.rows):
            results = RuntimeError(f"{len(results)} results for {len(plan.rows)} rows")
        if isinstance(results, Exception):
            error = f"the engine failed while it computed this request ({type(results).__name__})"
            results = [RowResult(error=error)] * len(plan.rows)
        elif plan.rows:
            self._pace.record(plan.singles, plan.chunked, seconds, plan.extra)
            if self._speculation is not None and not plan.chunked:
                self._speculation.policy.step_took(plan.singles, plan.singles + plan.extra, seconds)
        for sequence, row, result in zip(plan.sequences, plan.rows, results, strict=True):
            if sequence.state is not RUNNING:
                continue
            if (output := self._advance(sequence, row, result, now, in_time)) is not None:
                outputs.append(output)
        return outputs

    def _expire(self, now: float) -> list[Output]:
        """End the requests that are past their deadline."""
        late = [sequence for sequence in self._sequences.values() if sequence.deadline <= now]
        ended = [self._fail(sequence, now, FinishReason.DEADLINE) for sequence in late]
        self._next_deadline = min((s.deadline for s in self._sequences.values()), default=math.inf)
        return ended

    def _fit(self, sequence: Sequence, end: int) -> bool:
        """Allocate a running sequence's blocks up to `end`, preempting later ones; False if it was preempted itself."""
        while sequence.state is RUNNING:
            if end <= sequence.kv.table.capacity or self._cache.grow(sequence.kv, end):
                return True
            if self._cache.below is not None and self._cache.below.yield_blocks():
                continue
            victim = max(self._running, key=Sequence.by_turn)
            victim.become(State.WAITING)
            self._cache.close(victim.kv, victim.tokens, victim.computed)
            victim.computed = victim.again = 0
            self._running.remove(victim)
            self._waiting.push(victim)
            self._preemptions += 1
        return False

    def _chunk(self, sequence: Sequence, budget: StepBudget, work: dict[Sequence, int]) -> None:
        """Add as much of a running prompt to the step as its budget and the free blocks allow."""
        if sequence.state is not State.RUNNING:
            return
        start = work.get(sequence, sequence.computed)
        share = budget.offer(sequence.target - start)
        count = share.tokens
        while count > 1 and not self._cache.grow(sequence.kv, start + count):
            count //= 2
        if count < 1 or (sequence in work and not self._cache.grow(sequence.kv, start + count)):
            return  # it has a part already; more of it is not worth preempting others
        if not self._fit(sequence, start + count):
            return
        work[sequence], sequence.stalled = start + count, 0
        budget.take(share, count)

    def _release_stalled(self, work: dict[Sequence, int]) -> None:
        """Release the claims of running prompts that had no row for `PATIENCE` steps."""
        for sequence in self._running:
            sequence.stalled += sequence not in work
            if sequence.stalled == PATIENCE:
                self._cache.release_claims(sequence.kv, sequence.tokens)

    def _admit(
        self, work: dict[Sequence, int], budget: StepBudget, now: float, ended: list[Output], started: list[int]
    ) -> None:
        """Start waiting sequences in order, while the step has tokens and rows and the pool has blocks."""
        if not (waiting := len(self._waiting)) or self._cache.blocked == waiting:
            return
        skipped = Skipped()
        for sequence in self._waiting:
            if budget.left < 1 or len(self._running) + skipped.any >= self._max_rows:
                break
            if budget.kept and skipped.skip_if_long(sequence, budget.kept):
                continue
            finish = sequence.ending()
            if finish is None and (turn := self._open(sequence, budget, skipped)) is not Admission.RUNS:
                if turn is Admission.STOPS:
                    break
                if budget.kept:
                    skipped.add(sequence)
                continue
            self._start(sequence, now, started, whole=finish is not None)
            if finish is None and sequence.computed >= sequence.target:
                finish = FinishReason.LENGTH
            if finish is not None:
                cache, timing = sequence.report, self._end(sequence, State.FINISHED, now)
                tokens = sequence.news()
                ended.append(Output(id=sequence.request.id, tokens=tokens, finish=finish, cache=cache, timing=timing))
            else:
                self._chunk(sequence, budget, work)

    def _open(self, sequence: Sequence, budget: StepBudget, skipped: Skipped) -> Admission:
        """Decide whether a waiting sequence may run now; if so, give it its cached and new blocks."""
        if (known := self._known(sequence, budget, skipped)) is not None:
            return known
        kv, kept, spare, ahead = sequence.kv, budget.kept, len(self._running), 0
        reuse = sequence.scored >= sequence.to_score
        sequence.long_beside = 0
        match = Match(0, len(sequence.tokens))
        if reuse:
            match = self._cache.match(kv, sequence.tokens, spare, kept or None)
        if match.blocked_on is not None:
            return Admission.PASSES
        if kept and not kv.claim.tried:  # loaded blocks must be claimed before others take them
            missing = sequence.target - match.covered
            if missing > kept:
                sequence.long_beside = kept
                return Admission.PASSES
            if not budget.short(missing):
                return Admission.STOPS
            ahead = skipped.needs(self._block_tokens)
        covered = self._cache.open(kv, sequence.tokens, match, reuse=reuse, spare=spare, ahead=ahead)
        if covered is None:
            sequence.ahead = ahead
            sequence.spare = spare
            return Admission.STOPS
        sequence.computed = covered
        return Admission.RUNS

    def _known(self, sequence: Sequence, budget: StepBudget, skipped: Skipped) -> Admission | None:
        """Return the last decision on a waiting sequence if it still holds; None if it must be looked at again."""
        match, kept = sequence.kv.claim.match, budget.kept
        if match is None:
            return None
        beside = kept > 0 and not sequence.kv.claim.tried
        if isinstance(match.blocked_on, BlockPool):
            spare, ahead = len(self._running), skipped.needs(self._block_tokens) if beside else 0
            short = not beside or sequence.target - match.covered <= kept
            fewer = spare >= sequence.spare and ahead >= sequence.ahead
            return Admission.STOPS if self._running and short and fewer else None
        return None if match.blocked_on is None else Admission.PASSES

    def _start(self, sequence: Sequence, now: float, started: list[int], *, whole: bool) -> None:
        """Move a waiting sequence to the running ones. `whole`: its answer is complete without a step."""
        sequence.become(State.RUNNING)
        self._waiting.start(sequence)
        self._running.append(sequence)
        sequence.turn = sequence.turn or next(self._turns)
        if self._speculation is not None:
            self._speculation.start(sequence)
        if sequence.admitted is None:
            reuse = sequence.scored >= sequence.to_score and not whole
            miss = self._cache.miss(sequence.kv, sequence.tokens, sequence.computed) if reuse else None
            sequence.start(now, miss, whole=whole)
            started.append(sequence.request.id)
            self._queries += sequence.prompt_len if reuse else 0
            self._hits += min(sequence.computed, sequence.prompt_len)

    def _in_time(self, now: float) -> Callable[[], bool]:
        """Return a function that tells whether there is still time to look for forced tokens, from `now` on."""
        return lambda: self._clock.now() <= now + FORCE_SECONDS

    def _advance(
        self, sequence: Sequence, row: Row, result: RowResult, now: float, in_time: Callable[[], bool]
    ) -> Output | None:
        """Apply one row's result: publish its computed blocks to the cache and append the sampled token."""
        if result.error:
            if row.pending is not None and result.error == NO_TOKEN:
                return None  # the step before failed, and its rows were run one by one: this one is computed again
            return self._fail(sequence, now, FinishReason.ERROR, result.error)
        if row.draft:
            return self._advance_draft(sequence, row, result, now, in_time)
        if result.states and self._speculation is not None:
            self._speculation.take_states(sequence, row, result.states, row.end)
        end = sequence.computed = row.end
        if end - row.start > 1 or end % self._block_tokens in self._cache.publish_offsets:
            sequence.again = 0
            self._cache.publish(sequence.kv, sequence.tokens, end)
        if result.prompt_logprobs:
            sequence.scored += len(result.prompt_logprobs)
        if result.token is None:
            if not row.samples or row.want == "hidden":
                return self._unsampled(sequence, row, result, now)
            return self._fail(sequence, now, FinishReason.ERROR, "the engine gave neither a token nor an error")
        finish, tokens = sequence.take(result.token, result.mu, in_time)
        cache = timing = None
        if sequence.first_token is None:
            sequence.first_token, cache, timing = now, sequence.report, sequence.timing(now)
        elif finish is None and not (result.mu is not None or result.logprob or result.prompt_logprobs):
            return Output(id=sequence.request.id, tokens=tokens)
        return Output(
            id=sequence.request.id,
            tokens=tokens,
            logprobs=() if result.logprob is None else (result.logprob,),
            prompt_logprobs=result.prompt_logprobs,
            mu=sequence.mu,
            finish=finish,
            cache=cache,
            timing=timing if finish is None else self._end(sequence, State.FINISHED, now),
        )

    def _advance_draft(
        self, sequence: Sequence, row: Row, result: RowResult, now: float, in_time: Callable[[], bool]
    ) -> Output | None:
        """Apply the result of a row with guesses: append what was sampled up to the first wrong guess.

        What the row left behind the last accepted token is of no use, and never known to the cache.
        """
        assert self._speculation is not None
        results = sampled(row, result)
        if not results:
            return self._fail(sequence, now, FinishReason.ERROR, "the engine gave neither a token nor an error")
        finish, news, count = sequence.take_all([token for token, _ in results], in_time)
        right = row.end - row.draft + count - 1
        if result.states:
            self._speculation.take_states(sequence, row, result.states, right)
        sequence.computed = self._cache.settle_guesses(sequence.kv, row.start, right, row.end)
        sequence.again = right - sequence.computed
        self._cache.publish(sequence.kv, sequence.tokens, sequence.computed)
        self._cache.shrink(sequence.kv, len(sequence.tokens))
        accepted = self._speculation.checked(sequence, row, count)
        self._accepted += accepted
        self._rejected += row.draft - accepted
        return Output(
            id=sequence.request.id,
            tokens=news,
            logprobs=tuple(logprob for _, logprob in results[:count] if logprob is not None),
            finish=finish,
            timing=None if finish is None else self._end(sequence, State.FINISHED, now),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=row.draft - accepted,
        )

    def _unsampled(self, sequence: Sequence, row: Row, result: RowResult, now: float) -> Output | None:
        """Return the output of a row without a token: a chunk of a prompt, a hidden state, or a scored prompt."""
        if row.end < sequence.target:
            scores = result.prompt_logprobs
            progress = sequence.progress() if sequence.request.progress else None
            if not scores and progress is None:
                return None
            return Output(id=sequence.request.id, prompt_logprobs=scores, progress=progress)
        cache, timing = sequence.report, self._end(sequence, State.FINISHED, now)
        if row.want == "hidden":
            return encoder_output(sequence.request, result, cache, timing)
        return Output(
            id=sequence.request.id,
            prompt_logprobs=result.prompt_logprobs,
            finish=FinishReason.LENGTH,
            cache=cache,
            timing=timing,
        )

    def _fail(self, sequence: Sequence, now: float, reason: FinishReason, error: str = "") -> Output:
        if error:
            # What a failed step left behind is undefined; the full blocks of earlier steps are published, and kept.
            sequence.computed -= sequence.computed % self._block_tokens
        return Output(id=sequence.request.id, finish=reason, error=error, timing=self._end(sequence, State.FAILED, now))

    def _end(self, sequence: Sequence, state: State, now: float) -> Timing:
        """Forget a request and free its blocks; every end comes through here."""
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.discard(sequence)
        sequence.become(state)
        self._cache.close(sequence.kv, sequence.tokens, sequence.computed)
        if sequence.drafter is not None and self._speculation is not None:
            self._speculation.policy.close(sequence.drafter)
        del self._sequences[sequence.request.id]
        return sequence.timing(now)


def _goes_on(sequence: Sequence, row: Row) -> bool:
    """Return whether the row after this one needs nothing but the token that this one samples."""
    if not row.samples or row.draft or row.want == "hidden":
        return False
    return sequence.matcher is None and sequence.mu is None and sequence.request.sampling.max_tokens > 0
