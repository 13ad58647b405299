"""The index of who holds which prompt: bounded, as servers told, and empty of a replica that went away."""

from __future__ import annotations

import msgspec
import pytest

from cairn.cluster.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from cairn.cluster.router import kv_index
from cairn.cluster.router.kv_index import HeldBlocks, HeldPrompt, KvIndex
from cairn.cluster.text_prefixes import TextPrefixes

TEXT = TextPrefixes(tuple(range(101, 111)), tuple(range(256, 2561, 256)))
"""A text with ten beginnings."""


def stored(*blocks: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(list(blocks), None, [], 16, medium=medium)


def removed(*blocks: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(blocks), medium)


def learned(count: int = 10) -> KvIndex:
    """An index that knows the text's first beginnings: block n ends beginning n, after 64 tokens each."""
    index = KvIndex()
    index.learn([(100 + n, n, 64 * n) for n in range(1, count + 1)])
    return index


def holding(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> HeldBlocks:
    held = HeldBlocks()
    held.apply(events)
    return held


def test_a_replica_holds_a_prompt_up_to_the_last_block_that_it_has() -> None:
    index, known = learned(), learned().known(TEXT)
    assert index.held(holding(stored(*range(1, 7))), known, 0) == HeldPrompt(384, 384)
    assert index.held(HeldBlocks(), known, 0) == HeldPrompt(0, 0)
    assert known.total == 640


def test_tiers_are_told_apart() -> None:
    index, known = learned(), learned().known(TEXT)
    held = holding(stored(1, 2), stored(1, 2, 3, 4, medium="DISK"))
    assert index.held(held, known, 0) == HeldPrompt(256, 128)
    held.apply([removed(1, 2)])
    assert index.held(held, known, 0) == HeldPrompt(256, 0)
    held.apply([removed(3, 4, medium="DISK"), removed(2, medium="DISK")])
    assert index.held(held, known, 0) == HeldPrompt(64, 0)
    held.apply([removed(1, medium="DISK")])
    assert not held.blocks


def test_events_out_of_order_or_twice_do_no_harm() -> None:
    held = holding(removed(5), stored(5), stored(5), removed(7), removed(5))
    assert not held.blocks


def test_all_blocks_told_again_replace_the_others() -> None:
    held = holding(stored(1, 2, 3), AllBlocksCleared(), stored(4))
    assert list(held.blocks) == [4]


def test_unknown_text_behind_the_known_counts_by_bytes() -> None:
    known = learned(5).known(TEXT)  # 64 tokens in 256 bytes
    assert known.total == 640 and known.tokens[:5] == (64, 128, 192, 256, 320)
    assert KvIndex().known(TEXT).total == 640  # four bytes a token


def test_what_was_sent_counts_until_it_is_told_or_too_long_ago() -> None:
    index, held = learned(3), HeldBlocks()
    known = index.known(TEXT)
    held.send(TEXT, known.tokens, 100.0)
    assert index.held(held, known, 101.0).pool == known.total
    assert index.held(held, known, 100.0 + kv_index.SENT_SECONDS + 1) == HeldPrompt(0, 0)


def test_a_replica_that_went_away_holds_nothing() -> None:
    index, held = learned(), holding(stored(1, 2, 3))
    held.send(TEXT, index.known(TEXT).tokens, 0.0)
    held.position, held.follows = "ab-7", True
    held.forget()
    assert index.held(held, index.known(TEXT), 1.0) == HeldPrompt(0, 0)
    assert held.position == "" and not held.follows


def test_nothing_grows_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_TEXTS", "MOST_BLOCKS", "MOST_SENT"):
        monkeypatch.setattr(kv_index, name, 4)
    index, held = KvIndex(), HeldBlocks()
    index.learn([(n, n, n) for n in range(1, 8)])
    assert len(index) == 4
    index.known(TextPrefixes((4,), (256,)))  # a use
    index.learn([(n, n, n) for n in range(20, 23)])
    assert index.known(TextPrefixes((4, 7), (256, 512))).blocks == (4, 0), "the one used last stays"
    held.apply([stored(*range(1, 10))])
    assert list(held.blocks) == [6, 7, 8, 9]
    held.send(TEXT, range(10), 0.0)
    assert len(held.sent) == 4


class VllmStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def test_events_are_those_of_vllm() -> None:
    """The names, tags and fields of vLLM's own structs, for readers that decode them so."""

    sent = KVEventBatch(1.5, [AllBlocksCleared(), BlockStored([(1 << 64) - 1], 7, [], 16, medium="GPU"), removed(1)])
    first, second, third = msgspec.json.decode(msgspec.json.encode(sent), type=VllmBatch).events
    assert isinstance(first, VllmCleared) and isinstance(third, VllmRemoved) and third.medium == "GPU"
    assert second == VllmStored([(1 << 64) - 1], 7, [], 16, None, "GPU", None)
