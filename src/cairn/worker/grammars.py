"""Compilation of grammars in the worker: constrained requests wait here until their matcher is ready.

Compiling needs the model's vocabulary as bytes, which is read with the first grammar: most servers never need it. Both
run in threads parallel to the steps, and so do masks; llguidance releases the interpreter lock. All grammars have
passed a trial compilation in a separate process (`text.grammar.trial`). One is compiled at a time, taking turns between
tenants. Compiled grammars are cached for each tenant within a byte limit, and each request follows a copy. A copy that
has consumed the tokens generated so far equals one that was never interrupted, so preemption and a worker's death
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from cairn.scheduler.fairness import RoundRobin
from cairn.scheduler.sequence import Matcher
from cairn.system.interfaces import Clock
from cairn.system.tenant_cache import TenantCache
from cairn.text.grammar.compile_wire import KEPT_BYTES
from cairn.text.grammar.vocabulary import Vocabulary, grammar_tokenizer, token_table
from cairn.text.output.output_parser import further_markers
from cairn.text.output.reasoning_formats import THOUGHTS
from cairn.types.errors import CairnError, DeadlineExceeded, InvalidRequest
from cairn.types.request import Request, SamplingExtras
from cairn.worker.grammar_matcher import BudgetMatcher, CompiledGrammar, GrammarMatcher, Masks

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 2
"""One thread compiles; the other makes matchers of compiled grammars."""

Key = tuple[tuple[str, ...], str]
"""Cache key: the markers of the model's own format of calls (empty if it has none), and the grammar's text."""


class ReadyRequest(NamedTuple):
    """A request with its matcher, or with the error that ends it."""

    request: Request
    matcher: Matcher | None
    error: CairnError | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Waiting:
    request: Request
    since: float
    matcher: Future[Matcher] | None = None
    """Its matcher in the making, once the grammar is compiled."""

    @property
    def key(self) -> Key:
        grammar = self.request.grammar
        return further_markers(self.request.output), "" if grammar is None else grammar.text

    @property
    def bytes(self) -> int:
        return 0 if self.request.grammar is None else self.request.grammar.bytes


class Grammars:
    """Compiles grammars and returns requests when they are ready. Not thread-safe."""

    def __init__(
        self, vocabulary: Callable[[tuple[str, ...]], Vocabulary], wake: Callable[[], None], clock: Clock
    ) -> None:
        """Set up without threads, which start with the first request.

        `vocabulary` is called with the markers of the model's own format of calls, at most once for each set of
        markers. `wake` is called on any thread when something is ready.
        """
        self._read, self._wake, self._clock = vocabulary, wake, clock
        self._pool: ThreadPoolExecutor | None = None
        self._masks: Masks | None = None
        self._vocabularies: dict[tuple[str, ...], Vocabulary] = {}
        """Vocabularies by markers; only the compiling thread uses them."""
        self._kept: TenantCache[CompiledGrammar] = TenantCache(
            KEPT_BYTES, lambda grammar: grammar.size, lambda grammar: grammar.held
        )
        self._waiting: dict[int, _Waiting] = {}
        self._lines: RoundRobin[_Waiting] = RoundRobin()
        """Requests whose grammar is not compiled yet."""
        self._compiling: tuple[_Waiting, Future[CompiledGrammar]] | None = None

    @property
    def pending(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._waiting)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the cached compiled grammars."""
        return self._kept.bytes()

    def add(self, request: Request) -> None:
        """Queue a request with a grammar or a reasoning budget; `ready` returns it later."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn-grammar")
            self._masks = Masks()
        waiting = self._waiting[request.id] = _Waiting(request, self._clock.now())
        self._lines.add(request.share, waiting)
        self._advance()

    def drop(self, id: int) -> None:
        """Forget a waiting request. Its grammar is not compiled, unless that has begun."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            self._leave(waiting)

    def ready(self) -> list[ReadyRequest]:
        """Return requests that are ready or failed, each once, with the time that is left of their time limit."""
        ready: list[ReadyRequest] = []
        if self._compiling is not None and self._compiling[1].done():
            (waiting, compiled), self._compiling = self._compiling, None
            if (error := compiled.exception()) is None:
                self._kept.put(waiting.request.share, waiting.key, compiled.result())
            elif self._waiting.pop(waiting.request.id, None) is not None:
                self._leave(waiting)
                ready.append(ReadyRequest(waiting.request, None, _error(error)))
        self._advance()
        now = self._clock.now()
        for waiting in [*self._waiting.values()]:
            request = waiting.request
            left = None if request.timeout is None else request.timeout - (now - waiting.since)
            if waiting.matcher is not None and waiting.matcher.done():
                if left is not None:
                    request = msgspec.structs.replace(request, timeout=max(1e-3, left))
                error = waiting.matcher.exception()
                matcher = waiting.matcher.result() if error is None else None
                ready.append(ReadyRequest(request, matcher, None if error is None else _error(error)))
            elif left is not None and left <= 0:
                late = DeadlineExceeded("the request reached its time limit before its grammar was compiled")
                ready.append(ReadyRequest(request, None, late))
            else:
                continue
            self.drop(request.id)
        return ready

    def close(self) -> None:
        """Stop the threads and forget all waiting requests."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._masks is not None:
            self._masks.close()

    def _leave(self, waiting: _Waiting) -> None:
        """Remove a request from its tenant's queue, if it is there."""
        if waiting in self._lines.line(waiting.request.share):
            self._lines.remove(waiting.request.share, waiting)

    def _advance(self) -> None:
        """Start making matchers for requests whose grammar is compiled, and compile the next grammar.

        A grammar that finds no room beside those in use waits until one of their answers ends.
        """
        assert self._pool is not None or not self._waiting
        for share, waiting in [*self._lines.tagged()]:
            compiled = self._kept.get(share, waiting.key)
            if compiled is not None and compiled.worn:
                self._kept.remove(share, waiting.key)
                self._kept.put(share, compiled, compiled)  # its bytes count while an answer follows it
                compiled = None
            if compiled is not None:
                self._lines.remove(share, waiting)
                compiled.hold(waiting)
                waiting.matcher = self._submit(self._matcher, compiled, waiting.request)
            elif self._compiling is None and self._kept.make_room(share, waiting.bytes):
                self._compiling = waiting, self._submit(self._compiled, waiting)
                self._lines.served(share)

    def _submit(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> Future[T]:
        assert self._pool is not None
        future = self._pool.submit(work, *args, **more)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _compiled(self, waiting: _Waiting) -> CompiledGrammar:
        """Compile a request's grammar; runs in a thread."""
        marks = further_markers(waiting.request.output)
        if marks not in self._vocabularies:
            self._vocabularies[marks] = self._read(marks)
        return CompiledGrammar(self._vocabularies[marks], waiting.request.grammar)

    def _matcher(self, compiled: CompiledGrammar, request: Request) -> Matcher:
        """Make the matcher of a request, advanced by the tokens generated so far; runs in a thread."""
        assert self._masks is not None
        vocabulary = compiled.vocabulary
        ends = [token for token in request.sampling.stop_token_ids if token in vocabulary.controls]
        follower = None if compiled.grammar is None else GrammarMatcher(compiled, ends, self._masks)
        matcher = _budgeted(follower, vocabulary, request)
        for token in request.generated:
            matcher.consume(token)
        return matcher


def _error(error: BaseException) -> CairnError:
    return error if isinstance(error, CairnError) else CairnError(f"the grammar could not be compiled: {error!r}")


def _budgeted(follower: Matcher | None, vocabulary: Vocabulary, request: Request) -> Matcher:
    """Return the request's matcher: the grammar's, a reasoning budget, or both. Raises `InvalidRequest`."""
    if request.reasoning_budget is None:
        assert follower is not None, "a request waits for a grammar or a budget"
        return follower
    _check_close(vocabulary.closes.get(request.output.thoughts, ()), request.sampling.extras)
    return BudgetMatcher(follower, vocabulary, request.reasoning_budget, request.output)


def _check_close(close: Sequence[int], extras: SamplingExtras | None) -> None:
    """Raise `InvalidRequest` if the closing tag of reasoning cannot be sampled."""
    if not close:
        raise InvalidRequest(
            "this model's vocabulary lacks the tag that ends reasoning, so its reasoning cannot be limited",
            field="reasoning_budget",
        )
    if extras is None:
        return
    if extras.allowed_token_ids and not set(close) <= set(extras.allowed_token_ids):
        raise InvalidRequest(
            f"allowed_token_ids lacks the tag that ends reasoning, {[*close]}, which reasoning_budget needs",
            field="allowed_token_ids",
        )
    if any(word[-1] in close for word in extras.bad_words):
        raise InvalidRequest(
            "bad_words forbids the tag that ends reasoning, which reasoning_budget needs", field="bad_words"
        )


def read_vocabulary(
    folder: Path, given: str | None, vocab: int, ends: Sequence[int], marks: tuple[str, ...] = ()
) -> Vocabulary:
    """Read the vocabulary of a model. Raises ModelError.

    `given` is a tokenizer.json that replaces the model's own; the other arguments are those of `token_table`.
    """
    from cairn.text.chat.templates import load_text

    tokenizer, _ = load_text(folder, given)
    table = token_table(tokenizer, vocab, ends, marks)
    # `special`: a mark that is a token is forced as that token; the model never learnt `<tool_call>` in letters.
    encode = partial(tokenizer.encode, special=True)
    closes = {}
    for form in THOUGHTS:
        single = tokenizer.token_id(form.close)
        closes[form.name] = tuple(tokenizer.encode(form.close, special=True) if single is None else [single])
    return Vocabulary(grammar_tokenizer(table, encode), frozenset(table.special), closes)
