"""The worker's side of grammars: a request that has one, or a budget of its reasoning, waits here until there is what
follows it.

Compiling needs the model's vocabulary as bytes, which is read when the first grammar comes: most servers never see
one. Both happen in threads beside the steps, and so does the mask of each next token; llguidance holds no interpreter
lock. A grammar is compiled once and copied for each request, and a copy that has consumed the tokens generated so far
is as one that was never interrupted, so preemption and a worker's death change nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from cairn.scheduler.sequence import Matcher
from cairn.system.interfaces import Clock
from cairn.types.errors import CairnError, InvalidRequest
from cairn.types.request import Request
from cairn.types.sampling_params import SamplingExtras
from cairn.types.step import Pending, Ready
from cairn.worker.masks import Masks

KEPT = 64
"""Compiled grammars that are kept for the next request."""
THREADS = 2
CUT_TEXTS, CUT_BYTES = 2048, 512
"""Texts of so many bytes whose tokens are remembered, and how many."""


class Vocabulary(NamedTuple):
    """A model's tokens as llguidance knows them, and which of them are no text."""

    tokenizer: Any
    controls: frozenset[int]
    closes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """The tag that ends reasoning, by the form of it (`text.thoughts`)."""


class ReadyRequest(NamedTuple):
    """A request whose grammar can be followed, or why it cannot."""

    request: Request
    matcher: Matcher | None
    error: CairnError | None = None


class Grammars:
    """Compiles, and hands requests back when they are ready. One thread calls all but `wake`."""

    def __init__(
        self, vocabulary: Callable[[tuple[str, ...]], Vocabulary], wake: Callable[[], None], clock: Clock
    ) -> None:
        """`vocabulary` is read once, at the first grammar, and once more for a model whose form of calls is its own:
        it is given the marks of that. `wake` is called by any thread when something is ready."""
        self._read, self._wake, self._clock = vocabulary, wake, clock
        self._pool: ThreadPoolExecutor | None = None
        self._masks: Masks | None = None
        self._lock = threading.Lock()
        self._vocabularies: dict[tuple[str, ...], Vocabulary] = {}
        """By the marks of a form that is the model's own: there is one such form, or none."""
        self._compiled: OrderedDict[tuple[tuple[str, ...], str], Any] = OrderedDict()
        self._waiting: dict[int, tuple[Request, Future[Matcher], float]] = {}

    @property
    def pending(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request whose answer is held to something; it comes out of `ready`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn-grammar")
            self._masks = Masks()
        future = self._pool.submit(self._matcher, request)
        self._waiting[request.id] = (request, future, self._clock.now())
        future.add_done_callback(lambda _: self._wake())

    def drop(self, id: int) -> None:
        """Forget a request that waits."""
        self._waiting.pop(id, None)

    def ready(self) -> list[ReadyRequest]:
        """What no longer has to wait, each once. Its time limit is what is left of it."""
        found: list[ReadyRequest] = []
        for request, future, since in [one for one in self._waiting.values() if one[1].done()]:
            del self._waiting[request.id]
            if request.timeout is not None:
                left = max(1e-3, request.timeout - (self._clock.now() - since))
                request = msgspec.structs.replace(request, timeout=left)
            error = future.exception()
            if error is None:
                found.append(ReadyRequest(request, future.result()))
            elif isinstance(error, CairnError):
                found.append(ReadyRequest(request, None, error))
            else:
                found.append(ReadyRequest(request, None, CairnError(f"the grammar could not be compiled: {error!r}")))
        return found

    def close(self) -> None:
        """Nothing more is computed."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._masks is not None:
            self._masks.close()

    def _matcher(self, request: Request) -> Matcher:
        """In a thread: what follows this request's answer, as far as it has come."""
        from cairn.text.output.output_parser import further_markers

        assert self._masks is not None
        copy = None
        with self._lock:  # compiling takes a millisecond or two, or was bounded by who asked
            marks = further_markers(request.output)
            vocabulary = self._vocabularies.get(marks)
            if vocabulary is None:
                vocabulary = self._vocabularies[marks] = self._read(marks)
            if request.grammar:
                copy = self._compile(vocabulary, marks, request.grammar).deep_copy()
        ends = [token for token in request.sampling.stop_token_ids if token in vocabulary.controls]
        follower = None if copy is None else GrammarMatcher(copy, vocabulary, ends, self._masks)
        matcher = _budgeted(follower, vocabulary, request)
        for token in request.generated:
            matcher.consume(token)
        return matcher

    def _compile(self, vocabulary: Vocabulary, marks: tuple[str, ...], text: str) -> Any:
        """llguidance's matcher of a grammar, to be copied."""
        compiled = self._compiled.pop((marks, text), None)
        if compiled is None:
            compiled = compile_grammar(vocabulary, text)
            compiled.compute_bitmask()  # what a first mask has to find out is then known to every copy
        self._compiled[marks, text] = compiled
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return compiled


def _budgeted(follower: Matcher | None, vocabulary: Vocabulary, request: Request) -> Matcher:
    """What follows the grammar that the request may have, within the budget of its reasoning."""
    from cairn.worker.reasoning_budget import BudgetMatcher

    if request.reasoning_budget is None:
        assert follower is not None, "a request waits for a grammar or a budget"
        return follower
    _check_close(vocabulary.closes.get(request.output.thoughts, ()), request.sampling.extras)
    return BudgetMatcher(follower, vocabulary, request.reasoning_budget, request.output)


def _check_close(close: Sequence[int], extras: SamplingExtras | None) -> None:
    """InvalidRequest where the tag that ends reasoning could not come."""
    if not close:
        raise InvalidRequest("this model cannot write the tag that ends reasoning", field="reasoning_budget")
    if extras is None:
        return
    if extras.allowed_token_ids and not set(close) <= set(extras.allowed_token_ids):
        raise InvalidRequest(
            f"allowed_token_ids lacks the tag that ends reasoning, {[*close]}, which reasoning_budget asks for",
            field="allowed_token_ids",
        )
    if any(word[-1] in close for word in extras.bad_words):
        raise InvalidRequest(
            "bad_words forbids the tag that ends reasoning, which reasoning_budget asks for", field="bad_words"
        )


def compile_grammar(vocabulary: Vocabulary, text: str) -> Any:
    """llguidance's matcher of a grammar. Raises InvalidRequest."""
    from llguidance import LLMatcher

    from cairn.text.grammar.grammar import limits

    made = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits())
    if made.is_error():
        raise InvalidRequest(f"the grammar cannot be followed: {made.get_error()[:400]}", field="grammar")
    return made


class GrammarMatcher:
    """`sequence.Matcher` by llguidance.

    Where the grammar may end, the tokens that end an answer may come, and only there; other control tokens never.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary, ends: Sequence[int], masks: Masks) -> None:
        """`ends`: the control tokens that end this answer."""
        self._follower, self._masks = matcher, masks
        self._ends = frozenset(ends)
        self._others = [token for token in vocabulary.tokenizer.eos_tokens if token not in self._ends]
        self._run: list[int] = []
        """Tokens that are perhaps the only ones that may come, the first of them next."""
        self._next: Ready[bytes] | None = None
        """The next mask, where `forced` has looked at it."""

    @property
    def over(self) -> bool:
        """`Matcher.over`."""
        return bool(self._follower.is_stopped()) and not self._follower.is_error()

    def mask(self) -> Pending[bytes]:
        """`Matcher.mask`."""
        return self._next or self._masks.ask(self)

    def consume(self, token: int) -> None:
        """`Matcher.consume`. A token that cannot come puts the grammar out of action: the next mask is empty."""
        self._run = self._run[1:] if self._run[:1] == [token] else []
        if token not in self._ends:
            self._next = None
            self._follower.consume_token(token)

    def forced(self) -> int | None:
        """`Matcher.forced`. What llguidance would go on with is cut into tokens as a whole; each counts only where the
        mask says the same, which then looks at no other token."""
        self._run = self._run or self._follower.compute_ff_tokens()
        if not self._run:
            return None
        self._next = self._next or Ready(self.compute())
        token, mask = self._run[0], self._next.wait()
        only = bool(mask) and mask[token >> 3] == 1 << (token & 7) and mask.count(0) == len(mask) - 1
        return token if only else None

    def compute(self) -> bytes:
        """`Masked.compute`."""
        bits = bytearray(self._follower.compute_bitmask())
        if self._follower.is_error():
            return b""
        for token in self._others:
            bits[token >> 3] &= ~(1 << (token & 7)) & 255
        if self._ends and self._follower.is_accepting():
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)


class GrammarTokenizer:
    """What llguidance asks of a tokenizer.

    Where a grammar leaves no choice, the model is held to the tokens in which its tokenizer would write the text.
    """

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special: Sequence[int], eos: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._encode = encode
        controls = frozenset(special)
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in controls}
        self._longest = max(map(len, self._ids), default=1)
        self._known = lru_cache(CUT_TEXTS)(self._cut)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that are exactly these bytes: the tokenizer's own, or else the longest at each place.

        Every answer of one form asks for the same few texts, at each token anew.
        """
        return [*(self._known(text) if len(text) <= CUT_BYTES else self._cut(text))]

    def _cut(self, text: bytes) -> list[int]:
        found = list(self._encode(text.decode("utf-8", "replace")))
        if b"".join(self.tokens[i] for i in found) == text:
            return found
        found, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._ids), 0)
            if not size:
                break  # no token has this byte
            found.append(self._ids[text[at : at + size]])
            at += size
        return found


def read_vocabulary(
    folder: Path, given: str | None, vocab: int, ends: Sequence[int], marks: tuple[str, ...] = ()
) -> Vocabulary:
    """The tokens of a model: control tokens that stand for no text may only end an answer.

    `given`: a tokenizer in place of the model's own; `vocab`: how many tokens the model has; `ends`: those that end an
    answer; `marks`: what else is text, of the model's own form of calls. Raises ModelError.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    from cairn.text.chat.templates import load_text
    from cairn.text.output.output_parser import all_markers
    from cairn.text.output.reasoning_formats import THOUGHTS

    tokenizer, _ = load_text(folder, given)
    shown = {tokenizer.token_id(marker) for marker in (*all_markers(tokenizer.token_id), *marks)}
    controls = (tokenizer.special_ids | tokenizer.control_ids | tokenizer.end_ids) - shown
    largest = tokenizer.largest_id
    tokens = [tokenizer.token_bytes(i) if i <= largest else b"" for i in range(vocab)]
    for i in controls:
        if i < vocab:
            tokens[i] = b"\xff<|%d|>" % i
    known = frozenset(i for i in controls if i < vocab)
    eos = sorted(i for i in {*ends, *tokenizer.end_ids} if i in known) or [vocab]
    if eos == [vocab]:  # nothing ends an answer but its grammar
        tokens.append(b"\xff<|end|>")
        known |= {vocab}
    # A mark that is a token of the model is written as that: `<tool_call>` in letters is not what the model learnt.
    encode = partial(tokenizer.encode, special=True)
    wrapper = TokenizerWrapper(GrammarTokenizer(tokens, sorted(known), eos[0], encode))
    closes = {}
    for form in THOUGHTS:
        single = tokenizer.token_id(form.close)
        closes[form.name] = tuple(tokenizer.encode(form.close, special=True) if single is None else [single])
    return Vocabulary(LLTokenizer(wrapper, eos_token=eos), known, closes)
