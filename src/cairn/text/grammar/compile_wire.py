"""What the front and the helper that compiles grammars say to each other.

The helper says that it is there by an empty `GrammarVerdict`. Each `Tokens` and each `Compile` is answered by one; the
tokens of a vocabulary come before the first grammar that is compiled with them. On SIGUSR1 the helper gives up what it
compiles.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.system.tenant_cache import PARTS
from cairn.text.grammar.grammar import Shape
from cairn.text.grammar.vocabulary import TokenTable

Vocab = tuple[str, ...]
"""Which vocabulary is meant: by the marks that are text in it (`token_table`)."""
SECONDS = 2.0
"""Most processor time that compiling and trying a grammar may take."""
MEMORY = 256 << 20
"""Most bytes of address space that it may add."""
KEPT_BYTES = 256 << 20
"""Bytes of compiled grammars that the worker keeps."""
MOST_BYTES = KEPT_BYTES // PARTS
"""Most bytes that one may hold: what one tenant may have of them."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """A vocabulary."""

    vocab: Vocab
    table: TokenTable


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """What an answer has to be, or the text of a grammar that was made of that before."""

    vocab: Vocab
    shape: Shape | None = None
    text: str = ""


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a grammar: its text and what it costs, or why it is refused."""

    text: str = ""
    bytes: int = 0
    """What it holds when it is compiled."""
    warnings: tuple[str, ...] = ()
    """What was wanted of answers and it does not hold them to."""
    growth: int = 0
    """Bytes more that it holds after each token of an answer, on the average."""
    ended: Literal["", "wrong", "seconds", "memory", "given up"] = ""
    error: str = ""
    """What is `wrong` with it: the end of a sentence."""
    seconds: float = 0.0
    """Processor time that it took."""
