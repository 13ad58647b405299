"""A model's tokens in llguidance's form, the same in the process that tries grammars and in the worker.

llguidance is imported inside functions, so that starting the server does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.text.grammar.grammar import GrammarError, limits
from cairn.text.output.output_parser import all_markers

if TYPE_CHECKING:
    from cairn.text.tokens.tokenizer import Tokenizer

CUT_TEXTS, CUT_BYTES = 2048, 512
"""Most texts whose tokens are cached, and most bytes of such a text."""


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a model's tokens by id, and its control tokens."""

    tokens: list[bytes]
    special: list[int]
    """Control tokens, which a grammar's text never contains."""
    ends: list[int]
    """The control tokens that end an answer; at least one."""


class Vocabulary(NamedTuple):
    """llguidance's tokenizer of a model, and the model's control tokens."""

    tokenizer: Any
    controls: frozenset[int]
    closes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Reasoning format -> ids of the tag that ends reasoning."""


class GrammarTokenizer:
    """The tokenizer interface for llguidance, based on the model's own tokenizer.

    If a grammar leaves no choice, the model is forced to the tokens in which its tokenizer would write the text.
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
        """Return tokens for exactly these bytes: the tokenizer's own encoding, else the longest token at each place."""
        # Cached: all answers of one format ask for the same few texts, again at every token.
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
    """The tokenizer interface for llguidance, answered by llguidance itself: the longest token at each place."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self.cut: Callable[[str], list[int]] = lambda _: []

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens for these bytes."""
        return self.cut(text.decode("utf-8", "replace"))


def token_table(tokenizer: Tokenizer, vocab: int, ends: Sequence[int], marks: tuple[str, ...] = ()) -> TokenTable:
    """Return the tokens of a model. Control tokens, except markers that are read as text, may only end an answer.

    `vocab` is the number of tokens, `ends` the ids that end an answer, `marks` further markers of the model's own call
    format. Takes some tenths of a second for 150,000 tokens.
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
    if not eos:  # no token ends an answer: only the grammar can
        tokens.append(b"\xff<|end|>")
        special, eos = [*special, vocab], [vocab]
    return TokenTable(tokens=tokens, special=special, ends=eos)


def grammar_tokenizer(table: TokenTable, encode: Callable[[str], Sequence[int]] | None = None) -> Any:
    """Return llguidance's tokenizer of these tokens.

    `encode` is the model's own encoding (text -> ids); None if forced tokens are not needed.
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
        cut.tokens = wrapper.tokens = ()  # `made` has its own copy
    return made


def compile_grammar(tokenizer: Any, text: str) -> Any:
    """Return llguidance's matcher of a grammar, to be copied per answer. Raises GrammarError."""
    from llguidance import LLMatcher

    made = LLMatcher(tokenizer, text, log_level=0, limits=limits())
    check_followed(made)
    return made


def check_followed(matcher: Any) -> None:
    """Raise GrammarError if a matcher has failed."""
    if matcher.is_error():
        said = " ".join(matcher.get_error().replace("<non-verbose/>", " ").split())[:400]
        raise GrammarError("no text fits it" if said == "NoExtensionBias" else said)
