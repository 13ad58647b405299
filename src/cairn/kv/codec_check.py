"""What a codec that loses bits does to a model's answers, and the memory of it in a store's folder.

The model reads a text twice, one chunk after another: once with every full chunk put through `raw` before the next
one is computed, once through the codec. So each later position sees only pages that went through the store, and what
is computed from them goes through it again, as with a context that is stored and loaded turn after turn.

    <folder>/checked-<digest of the identity>      magic, XXH3-128 of the rest, msgpack

`identity` is what the chunks are stored under: the engine's, with the codec in it (`prefix.numerics`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from cairn.engine.base import NO_BLOCK, Engine, EngineInfo, Row
from cairn.errors import ModelError
from cairn.kv.codec import Codec, Raw
from cairn.kv.store import CHUNK_BLOCKS
from cairn.kv.store_folder import StoreFolder
from cairn.seams import FileSystem
from cairn.types import CacheGroup, SamplingParams, TokenLogprob

POSITIONS = 2000
"""Tokens that are foretold in a check."""
LEAST_AGREEMENT = 0.99
MOST_DIFFERENCE = 0.01
"""Of the perplexities, up or down: beyond these a codec changes a model too much to be used."""
_MAGIC = b"cairn kv check 1"
_DIGEST = 16
_LARGEST = 4096
_SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True, top_logprobs=1)


class Comparison(msgspec.Struct, frozen=True):
    """A codec beside `raw`, on one model."""

    codec: str
    positions: int
    """Tokens that both foretold."""
    agreed: int
    """Positions where both hold the same token for the likeliest."""
    raw_perplexity: float
    perplexity: float

    @property
    def agreement(self) -> float:
        """Share of positions, 0 to 1."""
        return self.agreed / self.positions

    @property
    def difference(self) -> float:
        """Of the perplexities, as a share of that of `raw`: 0.01 is 1 % worse."""
        return self.perplexity / self.raw_perplexity - 1

    @property
    def refusal(self) -> str:
        """Why the codec may not be used on the model, as a sentence with the figures; empty where it may."""
        if self.agreement >= LEAST_AGREEMENT and abs(self.difference) <= MOST_DIFFERENCE:
            return ""
        return (
            f"{self.codec} and raw agree on {self.agreement:.2%} of {self.positions:,} tokens of this model, and the "
            f"perplexity differs by {self.difference:+.3%}; at least {LEAST_AGREEMENT:.0%} and at most "
            f"{MOST_DIFFERENCE:.0%} are asked for"
        )


class _Remembered(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    found: Comparison


def compare(engine: Engine, codec: Codec, tokens: Sequence[int]) -> Comparison:
    """Foretell `tokens[1:]` through `raw` and through the codec; the engine's KV is overwritten.

    A text longer than the context is read in pieces. Raises `ModelError` for a model whose KV the codec cannot hold.
    """
    if len(tokens) < 2:
        raise ValueError("a text of one token foretells nothing")
    plain = _read(engine, Raw(engine.info.block_bytes), tokens)
    coded = _read(engine, codec, tokens)
    agreed = sum(one.top[0][0] == other.top[0][0] for one, other in zip(plain, coded, strict=True))
    return Comparison(codec.name, len(plain), agreed, _perplexity(plain), _perplexity(coded))


def remember(files: FileSystem, folder: Path, identity: bytes, found: Comparison) -> None:
    """Durably, in a store's folder that this process holds. Raises `OSError`."""
    data = msgspec.msgpack.encode(_Remembered(identity, found))
    store = StoreFolder(files, folder)
    store.remove_leftovers()
    temporary, _ = store.write(folder, [_MAGIC + xxhash.xxh3_128_digest(data), data])
    try:
        files.replace(temporary, _path(folder, identity))
    except OSError:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        raise
    files.sync_folder(folder)


def recall(files: FileSystem, folder: Path, identity: bytes, codec: str) -> Comparison | None:
    """What was remembered; None where nothing was, or where it is not whole. Raises `OSError` where the disk fails."""
    try:
        file = files.open(_path(folder, identity), "read")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = file.read(0, _LARGEST)
    finally:
        file.close()
    start = len(_MAGIC) + _DIGEST
    if data[:start] != _MAGIC + xxhash.xxh3_128_digest(data[start:]):
        return None
    try:
        said = msgspec.msgpack.decode(data[start:], type=_Remembered)
    except msgspec.MsgspecError:
        return None
    found = said.found
    whole = said.identity == identity and found.codec == codec and found.positions >= POSITIONS
    return found if whole else None


def _path(folder: Path, identity: bytes) -> Path:
    return folder / f"checked-{hashlib.sha256(identity).hexdigest()[:32]}"


def _perplexity(scores: Sequence[TokenLogprob]) -> float:
    mean = -math.fsum(score.logprob for score in scores) / len(scores)
    return math.exp(mean) if mean < 700 else math.inf


def _read(engine: Engine, codec: Codec, tokens: Sequence[int]) -> list[TokenLogprob]:
    """What the model says of each token but the first, in pieces that fit its context and its pools."""
    span = _span(engine.info)
    scores: list[TokenLogprob] = []
    for at in range(0, len(tokens) - 1, span):
        scores += _read_piece(engine, codec, tokens[at : at + span + 1])
    return scores


def _read_piece(engine: Engine, codec: Codec, tokens: Sequence[int]) -> list[TokenLogprob]:
    info, last = engine.info, len(tokens) - 1
    size = CHUNK_BLOCKS * info.block_tokens
    scores: list[TokenLogprob] = []
    for start in range(0, last, size):
        end = min(last, start + size)
        for low in range(start, end, info.max_tokens):
            high = min(end, low + info.max_tokens)
            row = Row(tokens, low, high, _tables(info, low, high), low, len(tokens), _SCORED, 0)
            (result,) = engine.prefill([row]).wait()
            if result.error:
                raise ModelError(f"the model cannot read the text with {codec.name}: {result.error}")
            scores += result.prompt_logprobs
        if end - start == size:
            _store(engine, codec, start // info.block_tokens)
    return scores


def _store(engine: Engine, codec: Codec, first: int) -> None:
    """Put the chunk that begins with the block in place `first` through the codec, in every group."""
    for group, (pool, page) in enumerate(zip(engine.info.blocks, engine.info.block_bytes, strict=True)):
        ids = [place % pool for place in range(first, first + CHUNK_BLOCKS)]
        pages = b"".join(engine.read_blocks(group, ids).wait())
        try:
            back = memoryview(codec.decode(group, memoryview(codec.encode(group, pages))))
        except ValueError as error:
            raise ModelError(f"{codec.name} cannot hold this model's KV: {error}") from error
        views = [back[at : at + page] for at in range(0, len(pages), page)]
        engine.write_blocks(group, ids, views).wait()


def _tables(info: EngineInfo, low: int, high: int) -> tuple[list[int], ...]:
    """Blocks in the order of their numbers; a window goes round in its pool."""
    tables = []
    for group, pool in zip(info.groups, info.blocks, strict=True):
        first = max(0, low - group.window + 1) // info.block_tokens if group.kind == "window" else 0
        count = -(-high // info.block_tokens)
        tables.append([NO_BLOCK] * first + [place % pool for place in range(first, count)])
    return tuple(tables)


def _span(info: EngineInfo) -> int:
    """Positions that can be read in one piece: whole chunks, or all that the context has."""
    size = CHUNK_BLOCKS * info.block_tokens
    limits = [info.context]
    for group, pool in zip(info.groups, info.blocks, strict=True):
        if pool < _needed(group, info.block_tokens, size):
            limits.append(pool * info.block_tokens)
    return max(1, min(limits))


def _needed(group: CacheGroup, block_tokens: int, chunk: int) -> float:
    """Blocks with which a group never runs out, however long the piece."""
    return -(-(group.window + chunk) // block_tokens) + 1 if group.kind == "window" else math.inf
