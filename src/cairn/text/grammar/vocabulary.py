"""A model's tokens as llguidance knows them: the same in the process that tries grammars and in the worker.

llguidance is imported where it is needed: no start waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.text.grammar.grammar import GrammarError, limits
from cairn.text.output.output_parser import all_markers
from cairn.text.output.reasoning_formats import THOUGHTS

if TYPE_CHECKING:
    from cairn.text.tokens.tokenizer import Tokenizer

CUT_TEXTS, CUT_BYTES = 2048, 512
"""Texts of so many bytes whose tokens are remembered, and how many."""


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a model by their ids, and which of them are no text."""

    tokens: list[bytes]
    special: list[int]
    """Control tokens, which a grammar's text never holds."""
    ends: list[int]
    """Those of them that end an answer; there is one at least."""


class Vocabulary(NamedTuple):
    """A model's tokens as llguidance knows them, and which of them are no text."""

    tokenizer: Any
    controls: frozenset[int]
    closes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """The tag that ends reasoning, by the form of it (`text.thoughts`)."""


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
        """Return tokens that are exactly these bytes: the tokenizer's own, or else the longest at each place.

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


class LongestTokens:
    """What llguidance asks of a tokenizer, answered by itself: the longest token at each place."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self.cut: Callable[[str], list[int]] = lambda _: []

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens of these bytes."""
        return self.cut(text.decode("utf-8", "replace"))


def token_table(tokenizer: Tokenizer, vocab: int, ends: Sequence[int], marks: tuple[str, ...] = ()) -> TokenTable:
    """Return the tokens of a model: control tokens that stand for no text may only end an answer.

    `vocab`: how many tokens the model has; `ends`: those that end an answer; `marks`: what else is text, of the model's
    own form of calls. Takes some tenths of a second for 150,000 tokens.
    """
    shown = {tokenizer.token_id(marker) for marker in (*all_markers(tokenizer.token_id), *marks)}
    controls = (tokenizer.special_ids | tokenizer.control_ids | tokenizer.end_ids) - shown
    largest = tokenizer.largest_id
    tokens = [tokenizer.token_bytes(i) if i <= largest else b"" for i in range(vocab)]
    for i in controls:
        if i < vocab:
            tokens[i] = b"\xff<|%d|>" % i
    special = sorted(i for i in controls if i < vocab)
    eos = sorted({*ends, *tokenizer.end_ids} & {*special})
    if not eos:  # nothing ends an answer but its grammar
        tokens.append(b"\xff<|end|>")
        special, eos = [*special, vocab], [vocab]
    return TokenTable(tokens=tokens, special=special, ends=eos)


def grammar_tokenizer(table: TokenTable, encode: Callable[[str], Sequence[int]] | None = None) -> Any:
    """Return llguidance's tokenizer of these tokens.

    `encode`: text -> ids, as the model's own tokenizer writes it; None where nobody asks which tokens are forced.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    cut: GrammarTokenizer | LongestTokens
    if encode is None:
        cut = LongestTokens(table.tokens, table.special, table.ends[0])
    else:
        cut = GrammarTokenizer(table.tokens, table.special, table.ends[0], encode)
    wrapper = TokenizerWrapper(cut)
    made = LLTokenizer(wrapper, eos_token=table.ends)
    if isinstance(cut, LongestTokens):
        cut.cut = made.greedy_tokenize
        cut.tokens = wrapper.tokens = ()  # it has them now
    return made


def read_vocabulary(
    folder: Path, given: str | None, vocab: int, ends: Sequence[int], marks: tuple[str, ...] = ()
) -> Vocabulary:
    """Return the vocabulary of a model. `given`: a tokenizer in place of the model's own; the others: as of
    `token_table`. Raises ModelError."""
    from cairn.text.chat.templates import load_text

    tokenizer, _ = load_text(folder, given)
    table = token_table(tokenizer, vocab, ends, marks)
    # A mark that is a token of the model is written as that: `<tool_call>` in letters is not what the model learnt.
    encode = partial(tokenizer.encode, special=True)
    closes = {}
    for form in THOUGHTS:
        single = tokenizer.token_id(form.close)
        closes[form.name] = tuple(tokenizer.encode(form.close, special=True) if single is None else [single])
    return Vocabulary(grammar_tokenizer(table, encode), frozenset(table.special), closes)


def compile_grammar(tokenizer: Any, text: str) -> Any:
    """Return llguidance's matcher of a grammar, to be copied. `tokenizer`: llguidance's. Raises GrammarError."""
    from llguidance import LLMatcher

    made = LLMatcher(tokenizer, text, log_level=0, limits=limits())
    check_followed(made)
    return made


def check_followed(matcher: Any) -> None:
    """Raise GrammarError where a matcher is out of action."""
    if matcher.is_error():
        said = " ".join(matcher.get_error().replace("<non-verbose/>", " ").split())[:400]
        raise GrammarError("no text fits it" if said == "NoExtensionBias" else said)
