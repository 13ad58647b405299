"""A check of how much a lossy codec changes a model's answers, and its saved result in a store's folder.

The model reads a text twice, one chunk after another: once with every full chunk put through `raw` before the next one
is computed, once through the codec. So each later position sees only pages that went through the store, and what is
computed from them goes through it again, as with a context that is stored and loaded turn after turn.

The distributions of the next token are compared: their divergence at every position, and the perplexity of the text.
The share of positions at which both have the same likeliest token is reported but not judged: where two tokens are
nearly equally likely, which for a small model is often, a negligible change swaps them.

    <folder>/checked-<digest of the identity>      see `record`

`identity` is the one under which the chunks are stored: the engine's, with the codec in it (`prefix.numerics`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cairn.kv.disk.codec import Codec, Raw, state_groups
from cairn.kv.disk.folder import StoreFolder
from cairn.kv.disk.record import read_record, write_record
from cairn.system.interfaces import FileSystem
from cairn.types.errors import ModelError
from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup
from cairn.types.outputs import TokenLogprob
from cairn.types.request import SamplingParams
from cairn.types.step import NO_BLOCK, Engine, EngineInfo, Row

POSITIONS = 2000
"""Tokens that are predicted in a check."""
MOST_DIFFERENCE = 0.01
"""Most relative difference of the perplexities, up or down. Beyond this or one of the next two limits a codec is
refused."""
MOST_DIVERGENCE = 0.01
"""Nats, the mean of all positions: at this divergence about a hundred tokens are needed to tell the two apart."""
MOST_AT_A_PLACE = 0.1
"""Nats, for 99 % of the positions: no mean hides positions at which the model says something else."""
POOL_Q8 = "q8 in the pool"
"""The name of a comparison of a pool of q8 with one of the usual type."""
TOP = 64
"""Tokens whose probabilities are compared at each position, the likeliest of each side; all others count as one."""
_MAGIC = b"cairn kv check 2"
_ROUNDING = 1e-6
"""Probability below the rounding error of a sum of so many others."""

_SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True, top_logprobs=TOP)


class Comparison(msgspec.Struct, frozen=True):
    """The result of comparing a codec with `raw` on one model."""

    codec: str
    positions: int
    """Tokens that both predicted."""
    agreed: int
    """Positions where both have the same likeliest token."""
    raw_perplexity: float
    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence of the codec's distribution from that of `raw`, in nats."""
    at_a_place: float
    """The divergence that 99 of 100 positions do not exceed."""
    beside: str = "raw"
    """The codec `raw`, or the type of the other pool, that it was compared with. Figures called raw belong to that."""

    @property
    def agreement(self) -> float:
        """Share of positions that agree, 0 to 1."""
        return self.agreed / self.positions

    @property
    def difference(self) -> float:
        """Relative difference of the perplexity from that of `raw`: 0.01 is 1 % worse."""
        return self.perplexity / self.raw_perplexity - 1

    @property
    def refusal(self) -> str:
        """Why the codec may not be used on the model, as a sentence with the figures; empty if it may."""
        within = abs(self.difference) <= MOST_DIFFERENCE
        if within and self.divergence <= MOST_DIVERGENCE and self.at_a_place <= MOST_AT_A_PLACE:
            return ""
        return (
            f"over {self.positions:,} tokens of this model {self.codec} diverges from {self.beside} by "
            f"{self.divergence:.4f} nats in the mean and {self.at_a_place:.4f} at the worst place in a hundred, and "
            f"the perplexity differs by {self.difference:+.3%}; at most {MOST_DIVERGENCE}, {MOST_AT_A_PLACE} and "
            f"{MOST_DIFFERENCE:.0%} are allowed"
        )


class _SavedComparison(msgspec.Struct, frozen=True, array_like=True):
    identity: bytes
    result: Comparison


def compare(engine: Engine, codec: Codec, tokens: Sequence[int]) -> Comparison:
    """Predict `tokens[1:]` through `raw` and through the codec; the engine's KV is overwritten.

    A text longer than the context is read in pieces. Raise `ModelError` for a model whose KV the codec cannot hold.
    """
    return judged(codec.name, "raw", predict(engine, tokens), predict(engine, tokens, codec))


def judged(name: str, beside: str, plain: Sequence[TokenLogprob], coded: Sequence[TokenLogprob]) -> Comparison:
    """Compare two results of `predict` for one text: `coded` of the codec `name`, and `plain` of `beside`."""
    agreed = sum(one.top[0][0] == other.top[0][0] for one, other in zip(plain, coded, strict=True))
    apart = sorted(_divergence(one, other) for one, other in zip(plain, coded, strict=True))
    return Comparison(
        name,
        len(plain),
        agreed,
        _perplexity(plain),
        _perplexity(coded),
        math.fsum(apart) / len(apart),
        apart[-1 - len(apart) // 100],
        beside,
    )


def remember(files: FileSystem, folder: Path, identity: bytes, result: Comparison) -> None:
    """Save a result durably in a store's folder that this process holds. Raises `OSError`."""
    store = StoreFolder(files, folder)
    store.remove_leftovers()
    write_record(store, _file_name(identity), _MAGIC, _SavedComparison(identity, result))


def recall(files: FileSystem, folder: Path, identity: bytes, codec: str) -> Comparison | None:
    """Return the saved result; None if there is none or it is damaged. Raises `OSError` if the disk fails."""
    saved = read_record(StoreFolder(files, folder), _file_name(identity), _MAGIC, _SavedComparison)
    if saved is None:
        return None
    result = saved.result
    valid = saved.identity == identity and result.codec == codec and result.positions >= POSITIONS
    return result if valid else None


def _file_name(identity: bytes) -> str:
    return f"checked-{hashlib.sha256(identity).hexdigest()[:32]}"


def _divergence(one: TokenLogprob, other: TokenLogprob) -> float:
    """Return how far `other` diverges from `one`, in nats, over the tokens that both report.

    The remaining probability of each side counts as one token.
    """
    log_p, log_q = dict(one.top) | {one.token: one.logprob}, dict(other.top) | {other.token: other.logprob}
    found, left_p, left_q = [], 1.0, 1.0
    for token in log_p.keys() & log_q.keys():
        p = math.exp(log_p[token])
        found.append(p * (log_p[token] - log_q[token]))
        left_p, left_q = left_p - p, left_q - math.exp(log_q[token])
    if left_p > _ROUNDING:
        found.append(left_p * math.log(left_p / max(left_q, _ROUNDING)))
    return max(0.0, math.fsum(found))


def _perplexity(scores: Sequence[TokenLogprob]) -> float:
    mean = -math.fsum(score.logprob for score in scores) / len(scores)
    return math.exp(mean) if mean < 700 else math.inf


def predict(engine: Engine, tokens: Sequence[int], codec: Codec | None = None) -> list[TokenLogprob]:
    """Return the model's score of each of `tokens[1:]`, with KV that goes through the codec (default `raw`).

    The engine's KV is overwritten. A text longer than the context is read in pieces. Raise `ModelError` for a model
    whose KV the codec cannot hold.
    """
    if len(tokens) < 2:
        raise ValueError("a check needs a text of at least two tokens")
    codec = codec or Raw(engine.info.block_bytes, state_groups(engine.info.groups))
    span = _span(engine.info)
    scores: list[TokenLogprob] = []
    for at in range(0, len(tokens) - 1, span):
        scores += _read_piece(engine, codec, tokens[at : at + span + 1])
    return scores


def _read_piece(engine: Engine, codec: Codec, tokens: Sequence[int]) -> list[TokenLogprob]:
    info, last = engine.info, len(tokens) - 1
    size = CHUNK_BLOCKS * info.block_tokens
    scores: list[TokenLogprob] = []
    state = 0
    for start in range(0, last, size):
        end = min(last, start + size)
        for low in range(start, end, info.max_tokens):
            high = min(end, low + info.max_tokens)
            row = Row(tokens, low, high, _tables(info, low, high, state), low, len(tokens), _SCORED, 0)
            state = _left(info, low, high, state)
            (result,) = engine.prefill([row]).wait()
            if result.error:
                raise ModelError(f"the model cannot read the text with {codec.name}: {result.error}")
            scores += result.prompt_logprobs
        if end - start == size:
            _store(engine, codec, start // info.block_tokens)
    return scores


def _store(engine: Engine, codec: Codec, first: int) -> None:
    """Put the chunk that begins at block `first` through the codec, in every group that has KV."""
    for group, (pool, page) in enumerate(zip(engine.info.blocks, engine.info.block_bytes, strict=True)):
        if engine.info.groups[group].kind == "state":
            continue
        ids = [place % pool for place in range(first, first + CHUNK_BLOCKS)]
        pages = b"".join(engine.read_blocks(group, ids).wait())
        try:
            back = memoryview(codec.decode(group, memoryview(codec.encode(group, pages))))
        except ValueError as error:
            raise ModelError(f"{codec.name} cannot hold this model's KV: {error}") from error
        views = [back[at : at + page] for at in range(0, len(pages), page)]
        engine.write_blocks(group, ids, views).wait()


def _left(info: EngineInfo, low: int, high: int, state: int) -> int:
    """Return the block in which a row leaves its state, which it found in block `state`."""
    begun = (low - 1) // info.block_tokens if low else 0
    return state if begun == (high - 1) // info.block_tokens else 1 - state


def _tables(info: EngineInfo, low: int, high: int, state: int) -> tuple[list[int], ...]:
    """Return the block tables of a row: blocks in order, a window going round in its pool, a state in two blocks.

    Rows of at most one chunk begin and end in one block, or in two of which one is `state`.
    """
    tables = []
    for group, pool in zip(info.groups, info.blocks, strict=True):
        count = -(-high // info.block_tokens)
        if group.kind == "state":
            table = [NO_BLOCK] * count
            table[(low - 1) // info.block_tokens if low else 0] = state % pool
            table[-1] = _left(info, low, high, state) % pool
            tables.append(table)
            continue
        first = max(0, low - group.window + 1) // info.block_tokens if group.kind == "window" else 0
        tables.append([NO_BLOCK] * first + [place % pool for place in range(first, count)])
    return tuple(tables)


def _span(info: EngineInfo) -> int:
    """Return the positions that can be read in one piece: whole chunks, or all that the context has."""
    size = CHUNK_BLOCKS * info.block_tokens
    limits = [info.context]
    for group, pool in zip(info.groups, info.blocks, strict=True):
        if pool < _needed(group, info.block_tokens, size):
            limits.append(pool * info.block_tokens)
    return max(1, min(limits))


def _needed(group: CacheGroup, block_tokens: int, chunk: int) -> float:
    """Return the number of blocks with which a group never runs out, however long the piece."""
    if group.kind == "state":
        return 1
    return -(-(group.window + chunk) // block_tokens) + 1 if group.kind == "window" else math.inf
