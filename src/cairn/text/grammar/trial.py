"""Trial of a grammar: compile it with the model's tokens, then follow it for some tokens to measure the cost.

This may use up all memory and time that it is given, so the helper runs it in a process per grammar
(`compile_process`).
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from cairn.system.helper_limits import cpu_seconds, held_memory
from cairn.text.grammar.compile_wire import MOST_BYTES, SECONDS, Compile, GrammarVerdict
from cairn.text.grammar.grammar import (
    MASK_SECONDS,
    SPARE_SECONDS,
    TOO_SLOW,
    AnswerPart,
    GrammarError,
    Shape,
    grammar_text,
    loosened_part,
    part_of,
)
from cairn.text.grammar.vocabulary import check_followed, compile_grammar

WALK = 64
"""Tokens for which a grammar is followed."""
WARM = 16
"""The first of them, whose memory is computed once and does not count as growth."""
FIRST = 4
"""A grammar that fails within this many tokens fails for every answer."""
SLOWEST = 0.1
"""Most processor seconds of one mask: a step of all requests waits for it."""
LEAD_SECONDS = 0.3 * SECONDS
"""Most processor seconds of compiling a grammar with reasoning for which its answer is compiled again and followed
alone."""
WALK_SECONDS = 0.75 * SECONDS
"""Processor seconds from the beginning of the trial after which following stops."""


class Followed(NamedTuple):
    """The cost of following a grammar."""

    tokens: int
    grown: int
    """Bytes added."""
    growth: int
    """Average bytes added per token; the first `WARM` tokens are left out if there are more."""
    slowest: float
    """Processor seconds of the slowest mask."""
    error: str
    """Why it cannot be followed further; empty if it can."""


def trial(tokenizer: Any, job: Compile) -> GrammarVerdict:
    """Compile a grammar and follow it; `tokenizer` is llguidance's. Raises GrammarError if it is refused."""
    began = cpu_seconds()
    made = compile_job(tokenizer, job)
    matcher = made.matcher
    matcher.compute_bitmask()  # its cached states count too, because the worker keeps them
    check_followed(matcher)
    held = max(0, held_memory() - made.before)
    if held > MOST_BYTES:
        raise GrammarError(f"it holds {held >> 20} MiB of memory when compiled; the limit is {MOST_BYTES >> 20} MiB")
    answer = _without_lead(tokenizer, job.shape, made, cpu_seconds() - began)
    found = follow(answer, tokenizer.eos_tokens, WALK, until=began + WALK_SECONDS)
    if found.error and found.tokens < FIRST:
        raise GrammarError(f"after {found.tokens} tokens: {found.error}")
    if found.slowest > SLOWEST:
        raise GrammarError(
            f"it takes {1e3 * found.slowest:.0f} ms of processor time to find out which tokens may follow; "
            f"the limit is {1e3 * SLOWEST:.0f} ms"
        )
    return GrammarVerdict(
        text=made.text, warnings=made.warnings, bytes=held, growth=found.growth, seconds=cpu_seconds() - began
    )


class CompiledJob(NamedTuple):
    """A compiled grammar."""

    text: str
    part: AnswerPart | None
    """The part that enforces a structure."""
    matcher: Any
    before: int
    """Bytes of memory that were held before compiling."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Requested constraints that are not enforced."""
        return () if self.part is None else self.part.warnings


def compile_job(tokenizer: Any, job: Compile) -> CompiledJob:
    """Compile a grammar; if its schema is not strict, leave out what does not compile. Raises GrammarError."""
    text, part = job.text, None
    if job.shape is not None:
        part = part_of(job.shape.structure)
        text = grammar_text(job.shape, part)
    before = held_memory()
    try:
        return CompiledJob(text, part, compile_grammar(tokenizer, text), before)
    except GrammarError:
        part = None if job.shape is None else loosened_part(job.shape.structure)
        if job.shape is None or part is None:
            raise
    text = grammar_text(job.shape, part)
    before = held_memory()
    return CompiledJob(text, part, compile_grammar(tokenizer, text), before)


def _without_lead(tokenizer: Any, shape: Shape | None, made: CompiledJob, spent: float) -> Any:
    """Return the matcher of the answer without the reasoning: random tokens would never leave the reasoning."""
    if shape is None or not shape.reasoning or spent > LEAD_SECONDS:
        return made.matcher
    return compile_grammar(tokenizer, grammar_text(msgspec.structs.replace(shape, reasoning=""), made.part))


def follow(matcher: Any, ends: Collection[int], count: int, *, until: float, seed: int = 1) -> Followed:
    """Follow random answers for `count` tokens in all, or until the process has used `until` processor seconds.

    It also stops when a worker would give up. Copies of a matcher share their caches, as a worker's requests do.
    """
    rng, tokens, slowest, spent, warm = random.Random(seed), 0, 0.0, 0.0, 0
    base, ended = held_memory(), sum(1 << end for end in ends)
    copy = matcher.deep_copy()
    while tokens < count and cpu_seconds() < until:
        began = cpu_seconds()
        mask = copy.compute_bitmask()
        took = cpu_seconds() - began
        slowest, spent = max(slowest, took), spent + max(0.0, took - MASK_SECONDS)
        if copy.is_error() or spent > SPARE_SECONDS:
            break
        token = _some(int.from_bytes(mask, "little") & ~ended, rng, 8 * len(mask))
        if token is None or copy.is_stopped():
            copy = matcher.deep_copy()
            tokens += 1  # the end counts as a token, so that the loop ends for a grammar of the empty text
            continue
        copy.consume_token(token)
        tokens += 1
        if tokens == WARM:
            warm = max(0, held_memory() - base)
    grown = max(0, held_memory() - base)
    counted, within = (tokens - WARM, grown - warm) if tokens > WARM else (tokens, grown)
    growth, error = max(0, within) // max(1, counted), TOO_SLOW if spent > SPARE_SECONDS else ""
    if copy.is_error():
        try:
            check_followed(copy)
        except GrammarError as wrong:
            error = str(wrong)
    return Followed(tokens, grown, growth, slowest, error)


def _some(allowed: int, rng: random.Random, size: int) -> int | None:
    """Return a random token whose bit is set; None if no bit is."""
    if not allowed:
        return None
    start = rng.randrange(size)
    behind = allowed >> start or allowed << (size - start)
    return (start + (behind & -behind).bit_length() - 1) % size
