"""Protocol between the front and the helper that compiles grammars.

The helper first sends an empty `GrammarVerdict`. Each `Tokens` and each `Compile` is answered by one; a vocabulary's
tokens are sent before the first grammar that uses them. On SIGUSR1 the helper abandons the grammar it is compiling.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.system.tenant_cache import PARTS
from cairn.text.grammar.grammar import Shape
from cairn.text.grammar.vocabulary import TokenTable

Vocab = tuple[str, ...]
"""Identity of a vocabulary: the marks that count as text in it (`token_table`)."""
SECONDS = 2.0
"""Most seconds of processor time to compile and try a grammar."""
MEMORY = 256 << 20
"""Most bytes of address space that this may add."""
KEPT_BYTES = 256 << 20
"""Most bytes of compiled grammars that the worker keeps."""
MOST_BYTES = KEPT_BYTES // PARTS
"""Most bytes of one compiled grammar: one tenant's share of KEPT_BYTES."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """A vocabulary for the helper."""

    vocab: Vocab
    table: TokenTable


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """A grammar to compile: the shape of an answer, or the text of a grammar that was made before."""

    vocab: Vocab
    shape: Shape | None = None
    text: str = ""


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of compiling a grammar: its text and cost, or why it is refused."""

    text: str = ""
    bytes: int = 0
    """Memory of the compiled grammar."""
    warnings: tuple[str, ...] = ()
    """Requested constraints that it does not enforce."""
    growth: int = 0
    """Average bytes that each token of an answer adds."""
    ended: Literal["", "wrong", "seconds", "memory", "given up"] = ""
    error: str = ""
    """Why it is `wrong`: the end of a sentence."""
    seconds: float = 0.0
    """Processor time used."""
