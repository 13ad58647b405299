"""The number formats of GGUF tensors: as groups of codes with scales, and as float32, exactly as the format defines.

A row consists of blocks of 32 or 256 values that share scales. Every function takes blocks as uint8 [n, bytes]. Most
formats are groups of 32 codes that share a scale and perhaps a minimum: `split` returns these, and `dequantize`
multiplies them out. Q4_K, Q5_K, Q6_K and IQ4_XS are split as super-blocks with integer scales. IQ2 and IQ3 are kept as
blocks of their file (`kernels.codebooks.RowBlocks`). Formats with groups of 16 (Q2_K, IQ1_M) do not fit codes of 8
bits; `turn` returns their values. Products are rounded in float32 in the order written here, which is that of the
format's reference. `dequantize` works in slices, so beside its result it needs a few MB.

Layouts, in bytes (d, m: float16 scale and minimum; low half bytes hold the first half of the values); `codebooks` has
those of the others:

    Q4_0  d qs[16]              Q5_0  d qh[4] qs[16]      Q8_0    d qs[32]        MXFP4   e qs[16]
    Q4_1  d m qs[16]            Q5_1  d m qh[4] qs[16]    IQ4_NL  d qs[16]        IQ4_XS  d sh[2] sl[4] qs[128]
    Q2_K  sc[16] qs[64] d m     Q3_K  hm[32] qs[64] sc[12] d
    Q4_K  d m sc[12] qs[128]    Q5_K  d m sc[12] qh[32] qs[128]    Q6_K  ql[128] qh[64] sc[16] d
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.kernels import codebooks

Blocks = NDArray[np.uint8]
Codes = NDArray[np.uint8] | NDArray[np.int8]
Floats = NDArray[np.float32]

SLICE = 1 << 19
"""Values dequantised at a time."""

IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""The sixteen values of IQ4_NL and IQ4_XS."""
FP4 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""The sixteen values of MXFP4, doubled."""


class Split(NamedTuple):
    """Groups of codes as in `kernels.base.Quantized`.

    Values are scale * (code - 8) with 4 bits and no minimum, else scale * code (+ minimum); super-blocks as defined
    there.
    """

    codes: Codes
    """[n, values]: unsigned uint8 with 4 to 6 bits, int8 with 8 bits."""
    scale: NDArray[Any]
    """[n, groups]: float16 or float32; in super-blocks uint8, or int8 with 6 bits"""
    minimum: NDArray[Any] | None = None
    """[n, groups]"""
    block_scale: NDArray[np.float16] | None = None
    """[n, 1]: only in super-blocks"""
    block_minimum: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A number format: `values` numbers in `bytes` bytes."""

    name: str
    values: int
    bytes: int
    plain: str = ""
    """Name of the type of plain numbers; "" for quantised formats."""
    bits: Literal[4, 5, 6, 8] = 8
    """Bits of the codes that `split` returns."""
    split: Callable[[Blocks], Split] | None = None
    """Converts blocks to groups of codes; None for other formats."""
    scaled: tuple[str, str] = ("float16", "")
    """Types of the scales and minima that `split` returns; "" for no minima."""
    blocks: bool = False
    """Whether `split` returns super-blocks."""
    table: Literal["", "fp4", "iq4"] = ""
    """As `Quantized.table`, for what `split` returns."""
    rows: str = ""
    """Key in `codebooks.ROW_FORMATS`, if its blocks are kept as they are."""
    turn: Callable[[Blocks], Floats] | None = None
    """Converts blocks to values, if not by `split`."""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Type of plain numbers; None for quantised formats."""
        if self.plain == "bfloat16":
            import ml_dtypes  # only here: whoever reads a file's header alone does without

            brain: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return brain
        return np.dtype(self.plain) if self.plain else None

    @property
    def exact(self) -> bool:
        """Whether blocks are held without rounding."""
        return self.split is not None or bool(self.rows)


def dequantize(kind: BlockFormat, blocks: Blocks) -> Floats:
    """Return the values of quantised blocks [n, kind.bytes] as float32 [n * kind.values]."""
    assert kind.dtype is None, "plain numbers are viewed, not dequantised"
    out = np.empty((len(blocks), kind.values), np.float32)
    step = SLICE // kind.values
    # Damaged scales may be infinite; the engine reports non-finite results.
    with np.errstate(all="ignore"):
        for at in range(0, len(blocks), step):
            part = np.ascontiguousarray(blocks[at : at + step])
            out[at : at + step] = kind.turn(part) if kind.turn is not None else _multiplied(kind, part)
    return out.reshape(-1)


def _multiplied(kind: BlockFormat, blocks: Blocks) -> Floats:
    assert kind.split is not None
    codes, scale, minimum, block_scale, block_minimum = kind.split(blocks)
    values = codes.astype(np.float32).reshape(len(blocks), scale.shape[1], -1)
    if kind.bits == 6 or (kind.bits == 4 and minimum is None):
        values -= 32 if kind.bits == 6 else 8
    values *= _floats(scale, block_scale)[:, :, None]
    if minimum is not None:
        values += _floats(minimum, block_minimum)[:, :, None]
    return values.reshape(len(blocks), -1)


def _floats(numbers: NDArray[Any], block: NDArray[np.float16] | None) -> Floats:
    wide = numbers.astype(np.float32)
    return wide if block is None else wide * block.astype(np.float32)


def _half(blocks: Blocks, at: int) -> NDArray[np.float16]:
    """Return the float16 at byte `at` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _wide(blocks: Blocks, at: int) -> Floats:
    """Return `_half` in float32, for products in float32."""
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Blocks) -> Blocks:
    """Return the bits of little-endian bytes, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _q4_0(b: Blocks) -> Split:
    return Split(_nibbles(b[:, 2:]), _half(b, 0))


def _q4_1(b: Blocks) -> Split:
    return Split(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2))


def _q5_0(b: Blocks) -> Split:
    quants = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return Split(quants.view(np.int8) - np.int8(16), _half(b, 0))


def _q5_1(b: Blocks) -> Split:
    quants = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return Split(quants.view(np.int8), _half(b, 0), _half(b, 2))


def _q8_0(b: Blocks) -> Split:
    return Split(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0))


def _iq4_nl(b: Blocks) -> Split:
    return Split(IQ4[_nibbles(b[:, 2:])], _half(b, 0))


def _mxfp4(b: Blocks) -> Split:
    # Half of 2 ** (e - 127), because the table is doubled; the two smallest exponents are denormal.
    exponent = b[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    return Split(FP4[_nibbles(b[:, 1:])], bits.view(np.float32))


def _quarters(packed: Blocks) -> Blocks:
    """Return the 2-bit numbers of [n, 64] as [n, 16, 16]: of each 32 bytes the lowest pairs first."""
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 1, 4, 1)
    pairs: Blocks = ((packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 16, 16)
    return pairs


def _q2_k(b: Blocks) -> Floats:
    scales, d, m = b[:, :16], _wide(b, 80), _wide(b, 82)
    scale = (d * (scales & 15).astype(np.float32))[:, :, None]
    least = (m * (scales >> 4).astype(np.float32))[:, :, None]
    return (scale * _quarters(b[:, 16:80]).astype(np.float32) - least).reshape(-1, 256)


def _q3_k_quants(b: Blocks) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return scales [n, 16] from -32 to 31, and the numbers [n, 16, 16] from -4 to 3 that they scale."""
    low = _nibbles(b[:, 96:104])
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 4, 1)
    high = ((b[:, None, 104:108] >> shifts) & np.uint8(3)).reshape(-1, 16)
    # A set mask bit means that 4 is not subtracted.
    places = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    mask = ((b[:, None, :32] >> places) & np.uint8(1)).reshape(-1, 16, 16)
    quants = _quarters(b[:, 32:96]).view(np.int8) - ((mask ^ np.uint8(1)) << np.uint8(2)).view(np.int8)
    return (low | high << 4).view(np.int8) - np.int8(32), quants


def _q3_k(b: Blocks) -> Floats:
    scales, quants = _q3_k_quants(b)
    scale = _wide(b, 108) * scales.astype(np.float32)
    return (scale[:, :, None] * quants.astype(np.float32)).reshape(-1, 256)


def _q3_k_split(b: Blocks) -> Split:
    """Multiply the integer scales of 16 values into the codes, without loss.

    A product ranges from -124 to 128; in groups that contain 128, codes and scale change their signs.
    """
    scales, quants = _q3_k_quants(b)
    whole = (scales.astype(np.int16)[:, :, None] * quants).reshape(-1, 8, 32)
    turned = whole.max(axis=-1) > 127
    codes = np.where(turned[:, :, None], -whole, whole).astype(np.int8).reshape(-1, 256)
    return Split(codes, np.where(turned, -_half(b, 108), _half(b, 108)))


def _six_bits(packed: Blocks) -> tuple[Blocks, Blocks]:
    """Return eight scales and eight minima of 6 bits each from [n, 12]."""
    first, second, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, mixed & 15 | (first >> 6) << 4], axis=1)
    least = np.concatenate([second & 63, mixed >> 4 | (second >> 6) << 4], axis=1)
    return scales, least


def _k_split(b: Blocks, quants: Codes) -> Split:
    """Return quants [n, 8, 32] with the scales and minima of Q4_K and Q5_K."""
    scales, least = _six_bits(b[:, 4:16])
    return Split(quants.reshape(-1, 256), scales, least, _half(b, 0), -_half(b, 2))


def _pairs(packed: Blocks) -> Blocks:
    """Return the half bytes of [n, 128] as [n, 8, 32]: of each 32 bytes all low halves, then all high ones."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(b: Blocks) -> Split:
    return _k_split(b, _pairs(b[:, 16:]))


def _q5_k(b: Blocks) -> Split:
    places = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high: Blocks = (b[:, None, 16:48] >> places) & np.uint8(1)
    return _k_split(b, _pairs(b[:, 48:]) | high << np.uint8(4))


def _q6_k(b: Blocks) -> Split:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 1, 4, 1)
    high = ((b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 8, 32)
    quants = (low | high << np.uint8(4)).reshape(-1, 256)
    return Split(quants, np.ascontiguousarray(b[:, 192:208]).view(np.int8), None, _half(b, 208))


def _iq4_xs(b: Blocks) -> Split:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (np.ascontiguousarray(b[:, 2:4]).view("<u2") >> shifts & 3).astype(np.uint8)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    return Split(IQ4[_nibbles(b[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256), scale, None, _half(b, 0))


def _values(make: Callable[[Blocks], codebooks.Grouped]) -> Callable[[Blocks], Floats]:
    """Return a function that multiplies out groups of any size."""

    def turn(blocks: Blocks) -> Floats:
        codes, scale = make(blocks)
        return (codes.reshape(*scale.shape, -1) * scale[:, :, None]).reshape(len(blocks), -1)

    return turn


def _iq1_s(b: Blocks) -> Split:
    """Split groups of three values, 8 apart, into codes of 4 bits with a minimum."""
    codes, scale = codebooks.iq1_s(b)
    steps = (codes + np.int8(9)) >> 3  # -9, -1 and 7, or -7, 1 and 9
    least = codes[:, ::32] - 8 * steps[:, ::32]
    return Split(steps.view(np.uint8), 8 * scale, least * scale)


def _one_scale(make: Callable[[Blocks], NDArray[np.int8]], at: int) -> Callable[[Blocks], Split]:
    """Return a split of small integers that share the float16 at byte `at` into codes of 4 bits."""

    def split(blocks: Blocks) -> Split:
        codes = make(blocks)
        groups = codes.shape[1] // 32
        return Split((codes + np.int8(8)).view(np.uint8), np.repeat(_half(blocks, at), groups, axis=1))

    return split


_BOTH = ("uint8", "uint8")
_WIDE = ("float32", "")
_WIDE_BOTH = ("float32", "float32")

KINDS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, "<f4"),
    1: BlockFormat("F16", 1, 2, "<f2"),
    2: BlockFormat("Q4_0", 32, 18, bits=4, split=_q4_0),
    3: BlockFormat("Q4_1", 32, 20, bits=4, split=_q4_1, scaled=("float16", "float16")),
    6: BlockFormat("Q5_0", 32, 22, split=_q5_0),
    7: BlockFormat("Q5_1", 32, 24, split=_q5_1, scaled=("float16", "float16")),
    8: BlockFormat("Q8_0", 32, 34, split=_q8_0),
    10: BlockFormat("Q2_K", 256, 84, turn=_q2_k),
    11: BlockFormat("Q3_K", 256, 110, split=_q3_k_split, turn=_q3_k),
    12: BlockFormat("Q4_K", 256, 144, bits=4, split=_q4_k, scaled=_BOTH, blocks=True),
    13: BlockFormat("Q5_K", 256, 176, bits=5, split=_q5_k, scaled=_BOTH, blocks=True),
    14: BlockFormat("Q6_K", 256, 210, bits=6, split=_q6_k, scaled=("int8", ""), blocks=True),
    16: BlockFormat("IQ2_XXS", 256, 66, turn=_values(codebooks.iq2_xxs), rows="iq2_xxs"),
    17: BlockFormat("IQ2_XS", 256, 74, turn=_values(codebooks.iq2_xs), rows="iq2_xs"),
    18: BlockFormat("IQ3_XXS", 256, 98, turn=_values(codebooks.iq3_xxs), rows="iq3_xxs"),
    19: BlockFormat("IQ1_S", 256, 50, bits=4, split=_iq1_s, scaled=_WIDE_BOTH, turn=_values(codebooks.iq1_s)),
    20: BlockFormat("IQ4_NL", 32, 18, split=_iq4_nl, table="iq4"),
    21: BlockFormat("IQ3_S", 256, 110, turn=_values(codebooks.iq3_s), rows="iq3_s"),
    22: BlockFormat("IQ2_S", 256, 82, turn=_values(codebooks.iq2_s), rows="iq2_s"),
    23: BlockFormat("IQ4_XS", 256, 136, split=_iq4_xs, scaled=("int8", ""), blocks=True, table="iq4"),
    29: BlockFormat("IQ1_M", 256, 56, turn=_values(codebooks.iq1_m)),
    30: BlockFormat("BF16", 1, 2, "bfloat16"),
    34: BlockFormat("TQ1_0", 256, 54, bits=4, split=_one_scale(codebooks.tq1_0, 52)),
    35: BlockFormat("TQ2_0", 256, 66, bits=4, split=_one_scale(codebooks.tq2_0, 64)),
    39: BlockFormat("MXFP4", 32, 17, split=_mxfp4, scaled=_WIDE, table="fp4"),
    41: BlockFormat("Q1_0", 128, 18, bits=4, split=_one_scale(codebooks.q1_0, 0)),
}
"""Number of a tensor's type -> its format."""

OTHER_KINDS = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8"},
    **{33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 42: "Q2_0"},
}
"""Unsupported types, refused by name."""
