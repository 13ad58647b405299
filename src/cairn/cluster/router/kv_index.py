"""Which replica holds how much of a request's prompt, as far as servers have reported: a hint, which changes no answer.

    texts     digest of a text -> the block that ends there, and tokens: the same for all replicas
    blocks    of each replica, with the tiers that hold them
    sent      texts that went to a replica a short time ago, and whose blocks it has not reported yet

A replica holds a prompt as far as the longest beginning of its text whose block it has. What is stale or missing here
costs time alone: the replica computes what it does not find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cairn.cluster.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from cairn.cluster.text_prefixes import TextPrefixes

MOST_TEXTS = 1 << 17
"""Texts that are remembered, the last used: some 30 MB."""
MOST_BLOCKS = 1 << 18
"""Blocks of one replica that are remembered, the last stored: 4 million tokens, some 40 MB."""
MOST_SENT = 1 << 14
"""Texts of one replica whose blocks are awaited."""
SENT_SECONDS = 30.0
"""How long a replica counts as having what it was sent, before it reports so."""
MOST_TOKENS = 1 << 32
"""Tokens up to a block's end that a server is believed to mean."""
TEXT_BYTES = 4.0
"""Bytes of text that count as a token where nothing better is known."""
_TIERS = {"GPU": 1, "CPU": 2, "DISK": 4}
POOL = 1
ANY_TIER = 7


class HeldBlocks:
    """The blocks of one replica."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, int] = OrderedDict()
        """Block -> its tiers, as bits."""
        self.sent: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Text -> until when it counts, and its tokens."""
        self.follows = False
        """Whether its events are read now."""
        self.position = ""
        """The id of the last event."""

    def apply(self, events: Sequence[KVEvent]) -> None:
        """Take events in their order."""
        blocks = self.blocks
        for event in events:
            if isinstance(event, BlockStored):
                tier = _TIERS.get(event.medium or "GPU", 0)
                for block in event.block_hashes:
                    blocks[block] = blocks.get(block, 0) | tier
            elif isinstance(event, BlockRemoved):
                tier = _TIERS.get(event.medium or "GPU", ANY_TIER)
                for block in event.block_hashes:
                    left = blocks.get(block, 0) & ~tier
                    if left:
                        blocks[block] = left
                    else:
                        blocks.pop(block, None)
            elif isinstance(event, AllBlocksCleared):
                blocks.clear()
        while len(blocks) > MOST_BLOCKS:
            blocks.popitem(last=False)

    def send(self, text: TextPrefixes, tokens: Sequence[int], now: float) -> None:
        """Note a request that goes to the replica; `tokens`: of each beginning of its text."""
        for digest, count in zip(text.digests, tokens, strict=True):
            self.sent[digest] = now + SENT_SECONDS, count
            self.sent.move_to_end(digest)
        while len(self.sent) > MOST_SENT:
            self.sent.popitem(last=False)

    def forget(self) -> None:
        """Forget everything: the replica went away."""
        self.blocks.clear()
        self.sent.clear()
        self.follows, self.position = False, ""


class HeldPrompt(NamedTuple):
    """Tokens of a prompt that a replica holds."""

    cached: int
    """In any tier."""
    pool: int
    """In its pool, where nothing has to be loaded."""


class KnownText(NamedTuple):
    """A request's text beside what is known of it."""

    text: TextPrefixes
    blocks: tuple[int, ...]
    """The block at the end of each beginning, 0 where none is known."""
    tokens: tuple[int, ...]
    """About how many tokens each beginning has."""

    @property
    def total(self) -> int:
        """About how many tokens the prompt has."""
        return self.tokens[-1] if self.tokens else 0


class KvIndex:
    """The texts that servers reported, and how often they helped."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.hits = self.misses = self.stale = self.snapshots = 0
        """Requests of which some replica held a part, those of which none did, those whose replica had less than half
        of what was expected, and times that a replica reported all its blocks."""

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def learn(self, texts: Sequence[tuple[int, int, int]]) -> None:
        """Take (text, block, tokens) that a server reported."""
        for text, block, tokens in texts:
            if 0 < tokens < MOST_TOKENS:
                self._texts[text] = block, tokens
                self._texts.move_to_end(text)
        while len(self._texts) > MOST_TEXTS:
            self._texts.popitem(last=False)

    def known(self, text: TextPrefixes) -> KnownText:
        """Return what is known of a request's text. Tokens behind its known beginning are reckoned by bytes."""
        blocks, tokens = list[int](), list[int]()
        counted, at, rate, longest = 0, 0, TEXT_BYTES, 0
        for digest, end in zip(text.digests, text.ends, strict=True):
            found = self._texts.get(digest)
            if found is None:
                blocks.append(0)
                tokens.append(counted + int((end - at) / rate))
                continue
            block, counted = found
            at, rate, longest = end, max(0.5, end / counted), digest
            blocks.append(block)
            tokens.append(counted)
        if longest:  # the others are asked for only where this one's block is gone
            self._texts.move_to_end(longest)
        return KnownText(text, tuple(blocks), tuple(tokens))

    def held(self, held: HeldBlocks, known: KnownText, now: float) -> HeldPrompt:
        """Return how much of a prompt a replica holds."""
        cached, sent = 0, held.sent if held.sent else None
        for number in range(len(known.tokens) - 1, -1, -1):
            if sent is not None:
                found = sent.get(known.text.digests[number])
                if found is not None and found[0] > now:
                    return HeldPrompt(max(cached, found[1]), found[1])
            tiers = held.blocks.get(known.blocks[number], 0)
            if tiers:
                cached = cached or known.tokens[number]
                if tiers & POOL:
                    return HeldPrompt(cached, known.tokens[number])
        return HeldPrompt(cached, 0)
