"""Classification of an answer's tokens: content, reasoning, or hidden from clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cairn.types.outputs import TokenKind

Run = tuple[TokenKind, int]
"""A kind and the number of consecutive characters that have it."""

_SHOWN = (TokenKind.CONTENT, TokenKind.REASONING)


class _Group:
    """Tokens that are classified together, because only the last of them completes a character."""

    __slots__ = ("characters", "decided", "tag", "tokens")

    def __init__(self, tokens: int, characters: int) -> None:
        self.tokens, self.characters = tokens, characters
        """Number of tokens; number of their characters without a kind."""
        self.decided = self.tag = False
        """Whether their kind was returned; whether a part of them is a reasoning tag."""


class TokenKinds:
    """Classifier of tokens in order: each once, as soon as one of its characters is shown or none will be.

    A token that is content and something else counts as content.
    """

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque()
        self._waiting = 0
        """Tokens whose bytes do not complete a character yet."""
        self._runs: deque[list[int]] = deque()
        """[kind, characters] not yet assigned to tokens."""

    @property
    def undecided(self) -> int:
        """Number of tokens whose kind was not returned yet."""
        return self._waiting + sum(group.tokens for group in self._groups if not group.decided)

    def add(self, characters: int, *, hidden: bool) -> None:
        """Add a token that completes so many characters; `hidden`: it is a control token without text."""
        if not characters and not hidden:
            self._waiting += 1
            return
        if hidden and self._waiting:  # their bytes will never complete a character
            self._groups.append(_Group(self._waiting, 0))
            self._waiting = 0
        self._groups.append(_Group(self._waiting + 1, characters))
        self._waiting = 0

    def settle(self, runs: Iterable[Run], shown: int, *, cut: bool) -> bytes:
        """Return the kinds that are certain now, one byte per token.

        `runs` are characters newly classified by the splitter, `shown` the number of content characters newly shown.
        Content that was not shown is held back; after a `cut` it is dropped.
        """
        self._runs.extend([kind, size] for kind, size in runs)
        found = bytearray()
        while self._groups:
            group = self._groups[0]
            if group.characters and not self._runs:
                break
            if group.characters:
                run = self._runs[0]
                size, kind = min(group.characters, run[1]), run[0]
                if kind == TokenKind.CONTENT and not shown:
                    if not cut:
                        break
                    kind = TokenKind.HIDDEN
                elif kind == TokenKind.CONTENT:
                    size = min(size, shown)
                    shown -= size
                self._account(group, kind, size, found)
            if not group.characters:
                if not group.decided:
                    found += bytes([TokenKind.REASONING_TAG if group.tag else TokenKind.HIDDEN]) * group.tokens
                self._groups.popleft()
        return bytes(found)

    def _account(self, group: _Group, kind: int, size: int, found: bytearray) -> None:
        run = self._runs[0]
        run[1] -= size
        if not run[1]:
            self._runs.popleft()
        group.characters -= size
        if kind in _SHOWN and not group.decided:
            group.decided = True
            found += bytes([kind]) * group.tokens
        group.tag |= kind == TokenKind.REASONING_TAG

    def finish(self, characters: int, runs: Iterable[Run], shown: int) -> bytes:
        """Return the kinds of all remaining tokens of an ended answer; `characters` came from the last flush."""
        if characters and self._waiting:
            self._groups.append(_Group(self._waiting, characters))
            self._waiting = 0
        found = self.settle(runs, shown, cut=True)
        rest, self._waiting = self.undecided, 0
        self._groups.clear()
        return found + bytes([TokenKind.HIDDEN]) * rest
