"""One request while the scheduler has it, and the states it may pass through."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Protocol

from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.scheduler.fairness import AGE_SECONDS
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.outputs import FinishReason, PromptProgress, Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport, Miss
from cairn.types.step import Pending, Row

MOST_FORCED = 32
"""Tokens that are appended at once because a grammar leaves no other."""
MAX_PRIORITY = 100
"""Priorities are within ± this, so that `AGE_SECONDS` bounds how long anybody can be overtaken."""


class State(enum.Enum):
    """Where a sequence is. The last three are ends."""

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
"""Every transition there is; running -> waiting is preemption."""


class Matcher(Protocol):
    """Follows what an answer is held to: a grammar, a budget of its reasoning, or both."""

    @property
    def over(self) -> bool:
        """Whether nothing can follow what was consumed: the answer is whole."""
        ...

    def mask(self) -> Pending[bytes] | None:
        """`Row.mask` of the next token; `consume` and another `mask` only after it is there."""
        ...

    def consume(self, token: int) -> None:
        """Take the next token of the answer."""
        ...

    def forced(self) -> int | None:
        """The only token that the next mask allows, where that is known at little cost. Not while a mask is made."""
        ...


class Sequence:
    """One request while the scheduler has it: the only place where its tokens and its progress are kept."""

    __slots__ = (
        "admitted",
        "ahead",
        "arrival",
        "computed",
        "deadline",
        "first_token",
        "forces",
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
        "stalled",
        "state",
        "to_score",
        "tokens",
        "turn",
        "unneeded",
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
        """Where `request.held` is: it has consumed all that was generated."""
        self.kv = kv
        self.tokens = [*request.prompt, *request.generated]
        self.prompt_len = len(request.prompt)
        self.longest = min(limit, self.prompt_len + request.sampling.max_tokens)
        """Most tokens it may grow to: those asked for, as far as the context and the pools can hold them."""
        self.unneeded = 0 if request.sampling.max_tokens or request.want == "hidden" else 1
        """Trailing tokens that need not be computed: one, where nothing follows and only the prompt is scored."""
        self.mu = start_mu(request)
        """Mirostat's state after `tokens`, where that is on."""
        self.reported = len(self.tokens)
        """Leading tokens that the front has: those of the request, and all that `news` has given."""
        self.forces = matcher is not None and forces(request)
        """Whether tokens that its grammar leaves no choice about are appended without a step of their own."""
        self.computed = 0
        """Leading tokens whose KV is in the tables."""
        self.state = State.WAITING
        self.arrival = now
        self.deadline = math.inf if request.timeout is None else now + request.timeout
        self.rank = (now - request.priority * AGE_SECONDS, serial)
        """Its place among those of its tenant that never ran."""
        self.turn = 0
        """How many had begun to run before it, and one; 0 before it runs itself."""
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.report: CacheReport | None = None
        """Where its prompt's KV came from, once it has run."""
        self.long_beside = 0
        """As long as `kv.claim.match` holds: with how many tokens kept for short prompts it was a long one."""
        self.spare = self.ahead = 0
        """As long as `kv.claim.match` is blocked on a pool: how many blocks were to be left there, for those that run
        and for one that was passed."""
        self.stalled = 0
        """Steps since it had a part of one, while it runs."""
        self.scored = 0
        """Prompt log-probabilities given out so far, of `to_score`."""
        self.to_score = self.prompt_len - 1 if request.sampling.prompt_logprobs and not request.generated else 0

    def by_rank(self) -> tuple[float, int]:
        """Key of the order in which a tenant's sequences begin to run: the lowest first."""
        return self.rank

    def by_turn(self) -> int:
        """Key of the order in which sequences began to run, and run on after preemption."""
        return self.turn

    @property
    def target(self) -> int:
        """Tokens to compute before the next token can be sampled; without `max_tokens`, to score the prompt."""
        return len(self.tokens) - self.unneeded

    @property
    def missing(self) -> int:
        """Tokens to compute before that."""
        return len(self.tokens) - self.unneeded - self.computed  # not by `target`: asked of each row of each step

    def progress(self) -> PromptProgress | None:
        """How far its prompt is."""
        cached = 0 if self.report is None else self.report.cached
        return PromptProgress(cached, min(self.computed, self.prompt_len)) if self.computed > cached else None

    def needs(self, block_tokens: int) -> int:
        """Blocks of a full group that it does not hold yet."""
        return -(-len(self.tokens) // block_tokens) - len(self.kv.table.groups[0])

    def become(self, state: State) -> None:
        """Change the state; anything but a legal transition is a bug of ours."""
        if state not in LEGAL[self.state]:
            raise RuntimeError(f"request {self.request.id}: {self.state.value} -> {state.value} is not legal")
        self.state = state

    def ending(self) -> FinishReason | None:
        """Why the tokens so far are the last, if they are. A stop token counts as one of the completion's tokens.

        A grammar that nothing can follow ends an answer whatever `min_tokens` says: there is no other token.
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
        """Append the token that was sampled, and what it leaves no choice about; why the answer ends then, and `news`.

        `mu`: mirostat's state after it; `in_time`: as of `force`.
        """
        self.mu = mu
        if self.matcher is None:  # it has no news but this token
            self.tokens.append(token)
            self.reported += 1
            return self.ending(), (token,)
        self._append(token)
        return self.force(in_time), self.news()

    def force(self, in_time: Callable[[], bool]) -> FinishReason | None:
        """Append the tokens that are the only ones that may come; why the answer ends with them, if it does.

        Sampling would give the same ones: a mask leaves nothing else. So they may be left to it at any place, as they
        are where there is no time to look, and as a stop token always is: it knows whether one may come yet.
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
        """The tokens of the answer that were not given out yet: they are now."""
        tokens = tuple(self.tokens[self.reported :])
        self.reported = len(self.tokens)
        return tokens

    def row(self, end: int) -> Row:
        """The row that computes up to position `end`."""
        first = end - 1 if end == len(self.tokens) else None
        if self.scored < self.to_score:
            first = max(self.computed, self.scored)
            first = first if first < end else None
        request, mask = self.request, None
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
        )

    def start(self, now: float, miss: Miss | None, *, whole: bool = False) -> None:
        """It runs for the first time: what is computed of it now is where its prompt's KV came from. `whole`: nothing
        of it has to be computed, since its answer is there."""
        covered = self.prompt_len if whole else min(self.computed, self.prompt_len)
        brought = self.kv.progress.origin(covered)
        self.admitted = now
        self.report = CacheReport(
            computed=self.prompt_len - covered,
            pool=covered - brought["ram"] - brought["disk"],
            ram=brought["ram"],
            disk=brought["disk"],
            load=self.kv.progress.load_seconds,
            miss=miss,
        )

    def timing(self, now: float) -> Timing:
        """Seconds until it first ran, from there to its first token, and from there to now."""
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Timing(queue=admitted - self.arrival, prefill=first - admitted, decode=now - first)


def start_mu(request: Request) -> float | None:
    """Mirostat's state with which a request begins, or goes on; None where that is off."""
    extras = request.sampling.extras
    if extras is None or not extras.mirostat:
        return None
    return 2 * extras.mirostat_tau if request.mu is None else request.mu


def forces(request: Request) -> bool:
    """Whether nothing is asked of a request's tokens but which they are, and nothing but its grammar forbids any.

    Log-probabilities need each token's own logits. Where a ban leaves nothing of what a grammar allows, the sampler
    has to say so.
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
            f"the prompt has {prompt} tokens and the context holds {context}, the completion included",
            field="prompt",
            prompt_tokens=prompt,
            context=context,
        )
    if prompt + completion > longest:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens and the whole KV pool holds {longest}; a larger --kv-gb makes room",
            field="prompt",
        )
    if request.generated and request.mu is None and start_mu(request) is not None:
        raise InvalidRequest(
            "mirostat: an answer can only go on with the state that it had, which was not kept", field="mirostat"
        )
    tokens = (*request.prompt, *request.generated) if request.generated else request.prompt
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise InvalidRequest(f"token ids must be from 0 to {vocab - 1}: a vocabulary of {vocab}", field="prompt")
