"""A request in the scheduler: its tokens, progress, deadlines and state machine."""

from __future__ import annotations

import collections.abc
import enum
import math
from collections.abc import Callable
from typing import Protocol

from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.scheduler.drafts.drafter import Drafter
from cairn.scheduler.fairness import AGE_SECONDS
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.outputs import FinishReason, PromptProgress, Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport, Miss
from cairn.types.step import Pending, Row

MOST_FORCED = 32
"""Most tokens appended at once because the grammar allows no others."""
MAX_PRIORITY = 100
"""Priorities are within ± this, so that `AGE_SECONDS` bounds how long a request can be overtaken."""


TokenIds = collections.abc.Sequence[int]


class State(enum.Enum):
    """State of a sequence; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


LEGAL: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""All legal transitions; running -> waiting is preemption."""


class Matcher(Protocol):
    """Follows the constraints on an answer: a grammar, a reasoning budget, or both."""

    @property
    def over(self) -> bool:
        """Whether the answer is complete: no token can follow."""
        ...

    def mask(self) -> Pending[bytes] | None:
        """Start computing `Row.mask` of the next token; None: no constraint.

        Its result must be awaited before the next `consume` or `mask`.
        """
        ...

    def accepts(self, draft: TokenIds) -> int:
        """Return how many leading tokens of a draft may follow one another. Not while a mask is computed."""
        ...

    def masks(self, draft: TokenIds) -> tuple[Pending[bytes] | None, ...]:
        """Start computing what `mask` gives, now and after each token of a draft that it `accepts` whole.

        The results must be awaited before any other call, which then finds the state as it was.
        """
        ...

    def consume(self, token: int) -> None:
        """Advance by the next token of the answer."""
        ...

    def forced(self) -> int | None:
        """Return the only token that the next mask allows, if cheap to find out. Not while a mask is computed."""
        ...

    def likely(self) -> TokenIds:
        """Return tokens that spell the text that has to come next, if any does; others may spell it too.

        Not while a mask is computed.
        """
        ...


class Sequence:
    """A request in the scheduler: the only place where its tokens and progress are kept."""

    __slots__ = (
        "admitted",
        "again",
        "ahead",
        "arrival",
        "computed",
        "deadline",
        "drafter",
        "first_token",
        "forces",
        "known",
        "kv",
        "long_beside",
        "longest",
        "matcher",
        "mu",
        "prompt_len",
        "rank",
        "report",
        "reported",
        "request",
        "scored",
        "spare",
        "speculates",
        "stalled",
        "state",
        "states_from",
        "to_score",
        "tokens",
        "turn",
        "unneeded",
        "unread",
    )

    def __init__(
        self,
        request: Request,
        kv: SequenceKV,
        limit: int,
        serial: int,
        now: float,
        matcher: Matcher | None = None,
    ) -> None:
        self.request = request
        self.matcher = matcher
        """Set if `request.held`; it has consumed all generated tokens."""
        self.kv = kv
        self.tokens = [*request.prompt, *request.generated]
        self.prompt_len = len(request.prompt)
        self.longest = min(limit, self.prompt_len + request.sampling.max_tokens)
        """Most tokens it may grow to: those requested, limited by the context and the pools."""
        self.unneeded = 0 if request.sampling.max_tokens or request.want == "hidden" else 1
        """Trailing tokens that need not be computed: one if the prompt is only scored."""
        self.mu = start_mu(request)
        """Mirostat's state after `tokens`, if it is on."""
        self.reported = len(self.tokens)
        """Leading tokens that the front has: the request's, and those that `news` has returned."""
        self.forces = matcher is not None and forces(request)
        """Whether tokens that the grammar forces are appended without a step of their own."""
        self.computed = 0
        """Leading tokens whose KV is in the block tables."""
        self.state = State.WAITING
        self.arrival = now
        self.deadline = math.inf if request.timeout is None else now + request.timeout
        self.rank = (now - request.priority * AGE_SECONDS, serial)
        """Sort key among its tenant's requests that never ran."""
        self.turn = 0
        """Number in the order in which sequences first ran, from 1; 0 before it runs."""
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.report: CacheReport | None = None
        """Sources of its prompt's KV, once it has run."""
        self.long_beside = 0
        """Reserved tokens beside which it was found to be long; valid while `kv.claim.match` is."""
        self.spare = self.ahead = 0
        """Blocks that had to stay free for running sequences and for a skipped one; valid while `kv.claim.match` is
        blocked on a pool."""
        self.stalled = 0
        """Steps since it last had a row, while it runs."""
        self.speculates = request.want == "token" and self.mu is None
        """Whether it may have a drafter. Not with mirostat, where each token changes how the next one is drawn."""
        self.drafter: Drafter | None = None
        """Set once it has decoded, if it speculates."""
        self.known = 0
        """Leading tokens that the drafter knows."""
        self.states_from: int | None = None
        """First position whose hidden state the drafter wants; None for none."""
        self.unread: list[tuple[int, bytes, int]] = []
        """States for the drafter that is opened with the first token: first position, bytes, and of how many."""
        self.again = 0
        """Tokens of its answer that were accepted as guesses and have to be computed again, to have their state."""
        self.scored = 0
        """Prompt log-probabilities sent so far, of `to_score`."""
        self.to_score = self.prompt_len - 1 if request.sampling.prompt_logprobs and not request.generated else 0

    def by_rank(self) -> tuple[float, int]:
        """Return the sort key in which a tenant's sequences start: the lowest first."""
        return self.rank

    def by_turn(self) -> int:
        """Return the sort key in which preempted sequences resume: the order in which they first ran."""
        return self.turn

    @property
    def target(self) -> int:
        """Position up to which KV is needed to sample the next token, or to score the prompt if `max_tokens` is 0."""
        return len(self.tokens) - self.unneeded

    @property
    def missing(self) -> int:
        """Tokens still to compute up to `target`."""
        return len(self.tokens) - self.unneeded - self.computed  # inlined `target`: read for each row of each step

    def progress(self) -> PromptProgress | None:
        """Return the prompt's progress; None if nothing was computed yet."""
        cached = 0 if self.report is None else self.report.cached
        return PromptProgress(cached, min(self.computed, self.prompt_len)) if self.computed > cached else None

    def needs(self, block_tokens: int) -> int:
        """Return how many blocks of a full group it still needs for its tokens."""
        return -(-len(self.tokens) // block_tokens) - len(self.kv.table.groups[0])

    def become(self, state: State) -> None:
        """Change the state; raise `RuntimeError` for an illegal transition, which is a bug."""
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"request {self.request.id}: {self.state.value} -> {state.value} is not legal")
        self.state = state

    def ending(self) -> FinishReason | None:
        """Return why the answer is complete, or None. A stop token counts as a completion token.

        A completed grammar ends an answer even below `min_tokens`: no other token is allowed.
        """
        count, sampling = len(self.tokens), self.request.sampling
        if count == self.prompt_len:
            return None
        stopped = self.tokens[-1] in sampling.stop_token_ids and count > self.prompt_len + sampling.min_tokens
        if stopped or (self.matcher is not None and self.matcher.over):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.longest else None

    def take(
        self, token: int, mu: float | None, in_time: Callable[[], bool]
    ) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Append a sampled token and the tokens that the grammar forces after it; return (`ending`, `news`).

        `mu`: mirostat's state after the token; `in_time`: see `force`.
        """
        self.mu = mu
        if self.matcher is None:  # no tokens are forced: the fast path
            self.tokens.append(token)
            self.reported += 1
            return self.ending(), (token,)
        self._append(token)
        return self.force(in_time), self.news()

    def take_all(
        self, tokens: TokenIds, in_time: Callable[[], bool]
    ) -> tuple[FinishReason | None, tuple[int, ...], int]:
        """Append the tokens of a step that checked guesses, one by one, up to the end of the answer.

        Return (`ending`, `news`) as `take` does, and how many of `tokens` the answer has.
        """
        for count, token in enumerate(tokens[:-1], 1):
            self._append(token)
            if (finish := self.ending()) is not None:
                return finish, self.news(), count
        finish, news = self.take(tokens[-1], None, in_time)
        if len(tokens) > 1 and self.matcher is None:  # `take` returned its own token alone
            news = (*tokens[:-1], *news)
            self.reported = len(self.tokens)
        return finish, news, len(tokens)

    def force(self, in_time: Callable[[], bool]) -> FinishReason | None:
        """Append the tokens that the grammar forces, while `in_time` returns True; return `ending`.

        Sampling would choose the same tokens, since the mask allows no others. So this may stop anywhere: when time is
        up, and at a stop token, because only the sampler knows whether one is allowed yet.
        """
        finish, matcher = self.ending(), self.matcher
        if matcher is None or not self.forces:
            return finish
        for _ in range(MOST_FORCED):
            token = matcher.forced() if finish is None and in_time() else None
            if token is None or token in self.request.sampling.stop_token_ids:
                break
            self._append(token)
            if self.mu is not None and self.request.sampling.extras is not None:
                self.mu = self.request.sampling.extras.mu_after(self.mu, 0.0)  # nothing else could come
            finish = self.ending()
        return finish

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.consume(token)

    def news(self) -> tuple[int, ...]:
        """Return the answer's tokens that were not reported yet, and mark them reported."""
        tokens = tuple(self.tokens[self.reported :])
        self.reported = len(self.tokens)
        return tokens

    def row(self, end: int, guesses: TokenIds = ()) -> Row:
        """Return the row that computes up to position `end`, and `guesses` behind it, and start its mask if it samples.

        Guesses belong behind the last token.
        """
        first = end - 1 if end == len(self.tokens) else None
        if self.scored < self.to_score:
            first = max(self.computed, self.scored)
            first = first if first < end else None
        request, mask = self.request, None
        if guesses:
            return self._row_with(guesses)
        if self.matcher is not None and first is not None and end == len(self.tokens):
            mask = self.matcher.mask()
        return Row(
            self.tokens,
            self.computed,
            end,
            self.kv.table.groups,
            first,
            self.prompt_len,
            request.sampling,
            request.choice,
            request.want,
            mu=self.mu or 0.0,
            mask=mask,
            adapters=request.adapters,
            states_from=None if self.states_from is None else self._states_within(end),
        )

    def _row_with(self, guesses: TokenIds) -> Row:
        end, count, request = len(self.tokens), len(guesses), self.request
        mask, *masks = (None,) if self.matcher is None else self.matcher.masks(guesses)
        return Row(
            [*self.tokens, *guesses],
            self.computed,
            end + count,
            self.kv.table.groups,
            end - 1,
            self.prompt_len,
            request.sampling,
            request.choice,
            mask=mask,
            draft=count,
            masks=tuple(masks),
            adapters=request.adapters,
            states_from=None if self.states_from is None else self._states_within(end + count),
        )

    def row_ahead(self, before: int) -> Row:
        """Return the row of the token after the next one, which row `before` of the running step samples."""
        end, request = len(self.tokens), self.request
        return Row(
            self.tokens,
            end,
            end + 1,
            self.kv.table.groups,
            end,
            self.prompt_len,
            request.sampling,
            request.choice,
            pending=before,
            adapters=request.adapters,
            states_from=None if self.states_from is None else end,
        )

    def _states_within(self, end: int) -> int | None:
        """Return the first position of the next row, which ends at `end`, whose hidden state is wanted."""
        assert self.states_from is not None
        first = max(self.states_from, self.computed)
        return first if first < end and self.speculates else None

    def start(self, now: float, miss: Miss | None, *, whole: bool = False) -> None:
        """Record the first admission and where the prompt's KV came from.

        `whole`: the answer is complete, so nothing has to be computed and the prompt counts as cached.
        """
        covered = self.prompt_len if whole else min(self.computed, self.prompt_len)
        brought = self.kv.progress.origin(covered)
        self.admitted = now
        self.report = CacheReport(
            computed=self.prompt_len - covered,
            pool=covered - sum(brought.values()),
            ram=brought["ram"],
            disk=brought["disk"],
            shared=brought["shared"],
            load=self.kv.progress.load_seconds,
            miss=miss,
        )

    def timing(self, now: float) -> Timing:
        """Return the seconds until it first ran, from there to its first token, and from there to `now`."""
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Timing(queue=admitted - self.arrival, prefill=first - admitted, decode=now - first)


def start_mu(request: Request) -> float | None:
    """Return mirostat's state at the start of a request, or where it continues; None if it is off."""
    extras = request.sampling.extras
    if extras is None or not extras.mirostat:
        return None
    return 2 * extras.mirostat_tau if request.mu is None else request.mu


def forces(request: Request) -> bool:
    """Tell whether tokens that the grammar forces may be appended without sampling them.

    Not with log-probabilities, which need each token's logits. Not with banned tokens either: if they leave nothing of
    what the grammar allows, the sampler must report that.
    """
    sampling, extras = request.sampling, request.sampling.extras
    banned = extras is not None and bool(extras.allowed_token_ids or extras.bad_words)
    return sampling.max_tokens > 0 and not (sampling.logprobs or sampling.prompt_logprobs or banned)


def check_prompt(request: Request, context: int, longest: int, vocab: int) -> None:
    """Raise `ContextTooLong` or `InvalidRequest`, with the figures, for a request that could never run.

    `context`: tokens of the model's context; `longest`: tokens that the KV pools can ever hold.
    """
    prompt, completion = len(request.prompt), min(1, request.sampling.max_tokens)
    if prompt + completion > context:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens; the context holds {context}, the completion included",
            field="prompt",
            prompt_tokens=prompt,
            context=context,
        )
    if prompt + completion > longest:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens; the whole KV pool holds {longest}: raise --kv-gb",
            field="prompt",
        )
    if request.generated and request.mu is None and start_mu(request) is not None:
        raise InvalidRequest(
            "mirostat: an answer can only be continued with its mirostat state, which was not kept", field="mirostat"
        )
    tokens = (*request.prompt, *request.generated) if request.generated else request.prompt
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise InvalidRequest(f"token ids must be from 0 to {vocab - 1}: a vocabulary of {vocab}", field="prompt")
