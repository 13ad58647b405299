"""Random answers that a grammar allows: at each place any allowed byte, preferring those that lead to an end."""

from __future__ import annotations

import functools
import random
from typing import Any

from cairn.text.grammar.compile_wire import Compile
from cairn.text.grammar.grammar import Shape
from cairn.text.grammar.trial import CompiledJob, compile_job
from cairn.text.grammar.vocabulary import GrammarTokenizer, Vocabulary, compile_grammar
from cairn.types.request import Grammar

END = 256
_ENDS = b'"}])>,'
TRAPS = (
    *("</parameter>", "</function>", "</tool_call>", "<tool_call>", "<parameter=n>", "</arg_value>", "</invoke>"),
    *("</minimax:tool_call>", "</seed:tool_call>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "[TOOL_CALLS]"),
    *(
        "<|/tool_call|>",
        "</TOOLCALL>",
        "</tool_calls>",
        "[ARGS]",
        "```",
        ")]",
        "</function>\n</tool_call>",
        "}]",
        "</think>",
        "<think>",
    ),
)
"""Characters that may end a call, or begin another one, by chance."""
_LETTERS = b"abcxyz01 -<>/\\\"'{}[]()=:,.\n\tuE\xc3\xa9"


@functools.cache
def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of one token per byte, and one that ends an answer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [bytes([byte]) for byte in range(256)] + [b"\xff<|end|>"]
    wrapper = TokenizerWrapper(GrammarTokenizer(tokens, [END], END, lambda text: list(text.encode())))
    return Vocabulary(LLTokenizer(wrapper, eos_token=[END], slices=[]), frozenset([END]))


def checked(shape: Shape) -> str:
    """Return the text of a grammar that compiles. Raises GrammarError."""
    return compiled(shape).text


def compiled(shape: Shape) -> CompiledJob:
    """Return a grammar that compiles, and what it does not enforce. Raises GrammarError."""
    return compile_job(byte_vocabulary().tokenizer, Compile(vocab=(), shape=shape))


def accepts(grammar: Grammar | str | None, text: str) -> bool:
    """Return whether a whole answer may be this text."""
    assert grammar is not None
    made = grammar.text if isinstance(grammar, Grammar) else grammar
    matcher = compile_grammar(byte_vocabulary().tokenizer, made)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting() and not matcher.is_error()


def walk(grammar: str, rng: random.Random, most: int = 1500) -> str | None:
    """Return a whole random answer, or None if it did not end."""
    matcher = compile_grammar(byte_vocabulary().tokenizer, grammar)
    data = bytearray()
    while len(data) < most:
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        if _has(mask, END) and rng.random() < 0.5:
            break
        trap = list(rng.choice(TRAPS).encode())
        if rng.random() < 0.1 and matcher.validate_tokens(trap) == len(trap):
            assert matcher.consume_tokens(trap)
            data += bytes(trap)
            continue
        byte = _chosen(mask, rng, hurry=len(data) > most // 3)
        if byte is None:
            break
        assert matcher.consume_token(byte)
        data.append(byte)
    assert not matcher.is_error(), matcher.get_error()
    return data.decode() if matcher.is_accepting() else None


def _has(mask: Any, byte: int) -> bool:
    return bool(mask[byte >> 3] >> (byte & 7) & 1)


def _chosen(mask: Any, rng: random.Random, *, hurry: bool) -> int | None:
    ends = [byte for byte in _ENDS if _has(mask, byte)]
    if ends and rng.random() < (0.9 if hurry else 0.3):
        return rng.choice(ends)
    letters = [byte for byte in _LETTERS if _has(mask, byte)]
    if letters and rng.random() < 0.9:
        return rng.choice(letters)
    allowed = [byte for byte in range(256) if _has(mask, byte)]
    return rng.choice(allowed) if allowed else None
