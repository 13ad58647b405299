"""Tells what each token of an answer is a part of: content, reasoning, or what a client is not shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cairn.types.outputs import TokenKind

Run = tuple[TokenKind, int]
"""So many characters, one behind the other, and what they are a part of."""

_SHOWN = (TokenKind.CONTENT, TokenKind.REASONING)


class _Group:
    """Tokens that are decided together, because only the last of them completes a character."""

    __slots__ = ("characters", "decided", "tag", "tokens")

    def __init__(self, tokens: int, characters: int) -> None:
        self.tokens, self.characters = tokens, characters
        """How many tokens; how many of their characters are not accounted for."""
        self.decided = self.tag = False
        """Their kind was told; a part of them is a tag of reasoning."""


class TokenKinds:
    """Decides tokens in the order in which they came, each once, as soon as a character of it is shown or none will
    be. A token that is content and something else is content."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque()
        self._waiting = 0
        """Tokens whose bytes are no whole character yet."""
        self._runs: deque[list[int]] = deque()
        """[kind, characters] that no token was accounted to."""

    @property
    def undecided(self) -> int:
        """Tokens whose kind was not told."""
        return self._waiting + sum(group.tokens for group in self._groups if not group.decided)

    def add(self, characters: int, *, hidden: bool) -> None:
        """Take a token that completes so many characters. `hidden`: a control token that is no text."""
        if not characters and not hidden:
            self._waiting += 1
            return
        if hidden and self._waiting:  # no character comes of them any more
            self._groups.append(_Group(self._waiting, 0))
            self._waiting = 0
        self._groups.append(_Group(self._waiting + 1, characters))
        self._waiting = 0

    def settle(self, runs: Iterable[Run], shown: int, *, cut: bool) -> bytes:
        """Return the kinds that are certain now.

        `runs`: characters that the splitter has decided; `shown`: how many more of content were shown. Content that was
        not shown is held back or, behind a `cut`, dropped.
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
        """Return the kinds of all other tokens: the answer is over. `characters`: those that came at its end."""
        if characters and self._waiting:
            self._groups.append(_Group(self._waiting, characters))
            self._waiting = 0
        found = self.settle(runs, shown, cut=True)
        rest, self._waiting = self.undecided, 0
        self._groups.clear()
        return found + bytes([TokenKind.HIDDEN]) * rest
