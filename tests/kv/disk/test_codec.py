"""Codecs: pages as they are written to a store."""

from __future__ import annotations

import numpy as np
import pytest

from cairn.kv.disk.codec import Q8, Raw, error_bound, open_codec

BLOCKS = (256, 512)
"""Bytes of a block in each group: 4 and 8 rows of 16 numbers."""


def pages(seed: int, group: int = 0, scale: float = 1.0) -> bytes:
    rng = np.random.default_rng(seed)
    return bytes((rng.standard_normal(BLOCKS[group]) * scale).astype("<f4").tobytes())


def test_raw_is_the_very_bits() -> None:
    codec = Raw(BLOCKS)
    for group in (0, 1):
        data = np.random.default_rng(1).bytes(4 * BLOCKS[group])
        written = codec.encode(group, data)
        assert len(written) == codec.size(group) == len(data)
        assert bytes(codec.decode(group, memoryview(bytes(written)))) == data
    assert codec.lossless and open_codec("raw", BLOCKS, 16).name == "raw"


@pytest.mark.parametrize("name", ["raw", "q8"])
def test_a_wrong_size_or_group_is_refused(name: str) -> None:
    codec = open_codec("q8" if name == "q8" else "raw", BLOCKS, 16)
    for data in (b"", pages(1)[:-4], pages(1) + b"...."):
        with pytest.raises(ValueError, match="bytes are not whole blocks"):
            codec.encode(0, data)
        with pytest.raises(ValueError, match="bytes are not whole blocks"):
            codec.decode(0, memoryview(data))
    for group in (-1, 2):
        with pytest.raises(ValueError, match="cache group"):
            codec.encode(group, pages(1))


NARROW = (1.0, 6e4, 1e-6)
WIDE = (*NARROW, 1e30, 1e-30, 1e-42)
SCALES = {"float32": WIDE, "bfloat16": WIDE, "float16": NARROW}


@pytest.mark.parametrize(("dtype", "scale"), [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales])
def test_q8_moves_no_number_further_than_half_a_step(dtype: str, scale: float) -> None:
    kind = np.dtype(dtype)
    codec = Q8([size // 4 * kind.itemsize for size in BLOCKS], 16, dtype)
    for seed in range(50):
        wide = np.frombuffer(pages(seed, seed % 2, scale), "<f4")
        clipped = np.clip(wide, -65504, 65504).astype(kind) if dtype == "float16" else wide.astype(kind)
        written = codec.encode(seed % 2, clipped.tobytes())
        assert len(written) == codec.size(seed % 2) == len(clipped) // 16 * 20
        back = np.frombuffer(codec.decode(seed % 2, memoryview(bytes(written))), kind)
        for row, was in zip(*(one.astype(float).reshape(-1, 16) for one in (back, clipped)), strict=True):
            assert np.abs(row - was).max() <= error_bound(float(np.abs(was).max()), dtype)
    assert not codec.lossless


def test_q8_keeps_zeros_and_refuses_non_finite_numbers() -> None:
    codec = Q8(BLOCKS, 16)
    zeros = bytes(4 * BLOCKS[0])
    assert bytes(codec.decode(0, memoryview(bytes(codec.encode(0, zeros))))) == zeros
    for bad in (np.nan, np.inf, -np.inf):
        numbers = np.frombuffer(pages(1), "<f4").copy()
        numbers[37] = bad
        with pytest.raises(ValueError, match="not finite"):
            codec.encode(0, numbers.tobytes())
    with pytest.raises(ValueError, match="are not rows of"):
        Q8((100,), 16)
    with pytest.raises(ValueError, match="are not rows of 16 bfloat16 numbers"):
        Q8((48,), 16, "bfloat16")
    for dtype in ("bfloat16", "float16"):
        small = Q8((64,), 16, dtype)
        assert bytes(small.decode(0, memoryview(bytes(small.encode(0, bytes(256)))))) == bytes(256)
        with pytest.raises(ValueError, match="not finite"):
            small.encode(0, b"\xff" * 256)


@pytest.mark.parametrize("name", ["raw", "q8"])
def test_states_are_left_as_they_are_and_a_chunk_has_one(name: str) -> None:
    """Also with numbers that are not finite: those are the sequence's own problem."""
    codec = open_codec("q8" if name == "q8" else "raw", (256, 44, 512), 16, states=(1,))
    state = np.array([1e30, -1e-42, np.nan, np.inf, *range(7)], "<f4").tobytes()
    assert codec.size(1) == len(codec.encode(1, state)) == 44
    assert bytes(codec.decode(1, memoryview(bytes(codec.encode(1, state))))) == state
    with pytest.raises(ValueError, match="bytes are not whole blocks"):
        codec.encode(1, 4 * state)
    assert codec.size(2) == (2048 if name == "raw" else 4 * 8 * 20)
