"""Drafts from a sequence's own tokens: what followed where its latest tokens occurred before.

The index is a hash table over pairs of tokens. It keeps the newest end of a pair for each bucket, and for each position
the one before it in its bucket, so a token is added in constant time. A look-up compares a bounded number of earlier
places and takes the longest match; a match that goes on is followed without one.

A short sequence has no index: searching its few tokens takes less time than building and extending one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from cairn.scheduler.drafts.drafter import States

MOST_TOKENS: Final = 1 << 18
"""Room of the largest index. Of a longer sequence it holds the latest half to whole of that."""
LEAST_TOKENS: Final = 1 << 10
SHORT_TOKENS: Final = 256
"""Most tokens of a sequence without an index."""
TOKEN_BYTES: Final = 12
"""Bytes of an index for each token of its room: the token, the position before it and a bucket."""
LONGEST: Final = 32
"""Most tokens that are compared: a longer match counts as one of this length."""
_LONG: Final = 12
"""Tokens from which a match is followed without looking for a longer one."""
_PLACES: Final = 24
"""Most earlier places that a look-up compares."""
_HINT: Final = 8
"""Tokens that count as matched at the beginning of a text that the client predicts."""
_SEPARATOR: Final = -1
"""Stands before and behind a prediction; it is no token, so no match and no draft goes across."""
_WEIGHT: Final = 1 / 12
"""Weight of the newest guess in the moving average of its class."""
_CLASSES: Final = bytes([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3, *[4] * 12, *[5] * (LONGEST - 23)])
"""Class of a match by its length: guesses come true more often the longer it is."""
_AT_FIRST: Final = (0.15, 0.25, 0.45, 0.7, 0.85, 0.9)
"""Part of the guesses of each class that count as right before any was seen."""
_REPEATS_WEIGHT: Final = 1 / 16
_REPEATS_AT_FIRST: Final = 0.1
REPEATS: Final = 0.2
"""Part of an answer's tokens that must repeat earlier ones before anything but a sure guess is offered."""
SURE: Final = 0.6
"""Chance of the next guess from which it is offered in an answer that repeats little."""
_FORM_AT_FIRST: Final = 0.8
"""Part of the tokens that a form asks for that count as right before any was seen: others may spell the same text."""
_FIRST: Final = 0x9E3779B1
_SECOND: Final = 0x85EBCA77
_WORD: Final = 0xFFFFFFFF


class SuffixDrafter:
    """A `Drafter` that knows nothing but its sequence's tokens and what the client predicts of its answer.

    It follows its own guesses, offered or not: how many come true for matches of each length, and what part of the
    answer repeats earlier text at all.
    """

    __slots__ = (
        "_at",
        "_before",
        "_form",
        "_form_hits",
        "_hits",
        "_match",
        "_most",
        "_newest",
        "_repeats",
        "_room",
        "_shift",
        "_tokens",
    )
    asks_model = False

    def __init__(self, tokens: Sequence[int], prediction: Sequence[int] = (), most: int = MOST_TOKENS) -> None:
        """Index the sequence's tokens so far. `most`: room of the index, a power of two from `LEAST_TOKENS` on.

        `prediction`: text that the client expects to follow; at most a quarter of the room is kept. It stands behind
        the tokens, so that it is found before older text.
        """
        self._most = most
        hint = [_SEPARATOR, *prediction[: most // 4], _SEPARATOR] if prediction else []
        whole = len(tokens) + len(hint) < most
        self._tokens = array("i", tokens if whole else tokens[len(tokens) - most // 2 :])
        begin = len(self._tokens) + 1
        self._tokens.extend(hint)
        self._hits, self._repeats = list(_AT_FIRST), _REPEATS_AT_FIRST
        self._form: Sequence[int] = ()
        """Tokens that the answer's form makes likely; they are guessed before anything else."""
        self._form_hits = _FORM_AT_FIRST
        self._match = 0
        """Latest tokens that also stand before `_at`, at most `LONGEST`; 0: there is no such place."""
        self._at = 0
        self._before, self._newest = array("i"), array("i")
        """The index; empty while the sequence is short."""
        self._room, self._shift = SHORT_TOKENS, 0
        if len(self._tokens) > SHORT_TOKENS:
            self._index()
        if hint:
            self._match, self._at = _HINT, begin
        elif len(self._tokens) > 1:
            self._look(len(self._tokens) - 1)

    @property
    def bytes(self) -> int:
        """Memory of the index."""
        return TOKEN_BYTES * self._room

    @property
    def guess_seconds(self) -> float:
        """Seconds that a guess takes to make: hardly any."""
        return 0.0

    @property
    def match(self) -> int:
        """How many of the latest tokens occurred before; at most `LONGEST`."""
        return self._match

    def chances(self, width: int) -> list[float]:
        """Return for each of the next guesses the chance that it and all before it are right, at most `width`.

        Empty where nothing matches, or where too little of the answer repeats earlier text for a guess like this.
        """
        if self._form:
            return [self._form_hits**count for count in range(1, min(width, len(self._form)) + 1)]
        match, hits = self._match, self._hits
        if not match or (self._repeats < REPEATS and hits[_CLASSES[match]] < SURE):
            return []
        chance, chances = 1.0, list[float]()
        for length in range(match, match + width):
            chance *= hits[_CLASSES[length if length < LONGEST else LONGEST]]
            chances.append(chance)
        return chances

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the sequence."""
        if self._form:
            self._check_form(tokens)
        if len(self._tokens) + len(tokens) > self._room:
            self._make_room(len(tokens))
        known, before, newest, shift, hits = self._tokens, self._before, self._newest, self._shift, self._hits
        last = known[-1] if known else _SEPARATOR
        match, at, repeats = self._match, self._at, self._repeats
        for token in tokens:
            repeats -= repeats * _REPEATS_WEIGHT
            if match:
                place = _CLASSES[match]
                hits[place] -= hits[place] * _WEIGHT
                if known[at] == token:
                    hits[place] += _WEIGHT
                    repeats += _REPEATS_WEIGHT
                    match, at = match + (match < LONGEST), at + 1
                else:
                    match = 0
            if newest:
                bucket = ((last * _FIRST ^ token * _SECOND) & _WORD) >> shift
                before.append(newest[bucket])
                newest[bucket] = len(known)
                last = token
            known.append(token)
        self._match, self._at, self._repeats = match, at, repeats
        if match < _LONG and (not before or before[-1]):
            self._look(len(known) - 1)

    def expect(self, tokens: Sequence[int]) -> None:
        """Take tokens that the answer's form makes likely."""
        self._form = tokens

    def take_states(self, first: int, states: States, count: int) -> None:
        """Do nothing: it goes by tokens alone."""

    def propose(self, width: int) -> Sequence[int]:
        """Return the tokens of the form, or those that followed the match.

        If the match reaches into the end, they are repeated from there.
        """
        if self._form:
            return self._form[:width]
        if not self._match:
            return ()
        guesses = self._tokens[self._at : self._at + width]
        if _SEPARATOR in guesses:
            return guesses[: guesses.index(_SEPARATOR)]
        for place in range(width - len(guesses)):
            guesses.append(guesses[place])
        return guesses

    def close(self) -> None:
        """Do nothing: no model holds anything for it."""

    def _check_form(self, tokens: Sequence[int]) -> None:
        """Compare the tokens that were likely with those that came."""
        for guess, token in zip(self._form, tokens, strict=False):
            self._form_hits += ((guess == token) - self._form_hits) * _WEIGHT
            if guess != token:
                break
        self._form = ()

    def _look(self, end: int) -> None:
        """Look for a longer match of the tokens up to `end` than the one that is followed."""
        known, before, best = self._tokens, self._before, self._match
        place = before[end] if before else self._search(end, end)
        for _ in range(_PLACES):
            if not place:
                break
            if best > place or known[place - best] == known[end - best]:
                length, most = 0, min(LONGEST, place + 1)
                while length < most and known[place - length] == known[end - length]:
                    length += 1
                if length > best and length > 1:
                    best, self._at = length, place + 1
                    if best == LONGEST:
                        break
            place = before[place] if before else self._search(end, place)
        self._match = best

    def _search(self, end: int, stop: int) -> int:
        """Return the last place before `stop` that may end with the same two tokens as place `end`; 0 for none.

        Their bytes may also begin within a token. As with a bucket, the caller compares.
        """
        text, size = self._tokens.tobytes(), self._tokens.itemsize
        return text.rfind(text[(end - 1) * size : (end + 1) * size], 0, stop * size) // size + 1

    def _make_room(self, count: int) -> None:
        """Build the index, double its room, or forget the older half of the tokens."""
        if self._room >= self._most:
            drop = max(0, len(self._tokens) - self._most // 2)
            del self._tokens[:drop]
            self._at -= drop
            if self._at < 0:
                self._match = self._at = 0
        self._index(count)

    def _index(self, count: int = 0) -> None:
        """Build the index over all tokens, with room for at least `count` more."""
        known = np.frombuffer(self._tokens, np.int32).astype(np.int64)
        room = LEAST_TOKENS
        while room < len(known) + count and room < self._most:
            room *= 2
        self._room = room
        self._shift = 33 - room.bit_length()
        newest, before = np.zeros(room, np.int32), np.zeros(len(known), np.int32)
        if len(known) > 1:
            buckets = ((known[:-1] * _FIRST ^ known[1:] * _SECOND) & _WORD) >> self._shift
            keys = np.sort(buckets << 32 | np.arange(1, len(known)))  # several times as fast as a stable argsort
            ends, buckets = keys & _WORD, keys >> 32
            last = np.append(buckets[1:] != buckets[:-1], True)
            before[ends[1:]] = np.where(last[:-1], 0, ends[:-1])
            newest[buckets[last]] = ends[last]
        self._before, self._newest = array("i"), array("i")
        self._before.frombytes(before.tobytes())
        self._newest.frombytes(newest.tobytes())
