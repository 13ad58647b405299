"""Decoding of GGUF's types of one to three bits, whose weights are rows of a codebook, into codes and group scales.

A row of a codebook is four or eight integers. A codebook is a subset of all such rows, given as a bit string over their
numbers, with the first integer as the lowest digit. The subset is part of the format; ggml's sources list it in tables
(ggml-common.h, `iq2xxs_grid` and so on).

Every function takes blocks of 256 values as uint8 [n, bytes] and returns codes [n, 256] and mostly scales float32
[n, groups]. Their products are exact, since each has less than 24 bits.

Layouts, in bytes (d: float16 scale):

    IQ2_XXS  d [8]{row[4] signs+scale[4]}    IQ2_XS  d row+signs[64] sc[8]    IQ2_S  d row[32] signs[32] high[8] sc[8]
    IQ3_XXS  d row[64] signs+scale[32]       IQ3_S   d row[64] high[8] signs[32] sc[4]
    IQ1_S    d row[32] high+scale[16]        IQ1_M   row[32] high[16] sc+d[8]
    TQ1_0    trits[48] trits[4] d            TQ2_0   pairs[64] d              Q1_0   d bits[16] (of 128 values)
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Bytes = NDArray[np.int8]
Floats = NDArray[np.float32]
Grouped = tuple[Bytes, Floats]
"""Codes and scales."""


def _grid(width: int, values: tuple[int, ...], bits: str) -> Bytes:
    """Return the rows [n, width] of a codebook over `values`; `bits` is its compressed bit string."""
    named = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(bits)), np.uint8), bitorder="little")
    digits = np.flatnonzero(named)[:, None] // len(values) ** np.arange(width) % len(values)
    rows: Bytes = np.array(values, np.int8)[digits]
    return rows


_IQ2_XXS = _grid(
    8,
    (8, 25, 43),
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd4M"
    "w`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uK"
    "QIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
)
_IQ2_XS = _grid(
    8,
    (8, 25, 43),
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>oJ="
    "N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*"
    "&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy"
    "%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
)
_IQ2_S = _grid(
    8,
    (8, 25, 43),
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBE"
    "EtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24"
    ")#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS"
    "7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
)
_IQ3_XXS = _grid(
    4,
    (4, 12, 20, 28, 36, 44, 52, 62),
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjrX>"
    "q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm="
    "J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5",
)
_IQ3_S = _grid(
    4,
    (1, 3, 5, 7, 9, 11, 13, 15),
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OX"
    "CI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3"
    "a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4"
    "D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
)
_IQ1 = _grid(
    8,
    (-1, 0, 1),
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8VtnD"
    "uD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1y"
    "xWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av"
    "8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXv"
    "Hn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj"
    "@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90"
    "+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@"
    "dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
)

_SIGNS = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
_SIGNED = np.where(_SIGNS, -1, 1).astype(np.int8)
"""Signs (1 or -1) of eight numbers, for each byte of sign bits."""
_EVEN = _SIGNED[np.arange(128) + 128 * (_SIGNS[:128].sum(axis=1) % 2).astype(np.int64)]
"""The same for seven stored sign bits; the eighth makes the number of minus signs even."""


def _at(blocks: Blocks, begin: int, end: int, dtype: str = "u1") -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype)


def _scale(blocks: Blocks, at: int) -> Floats:
    return _at(blocks, at, at + 2, "<f2").astype(np.float32)


def _halves(packed: Blocks) -> Floats:
    """Return the half bytes of [n, k] in order, as [n, 2k]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).astype(np.float32)


def _with_high(low: Blocks, high: Blocks, bits: int) -> NDArray[np.uint16]:
    """Combine row numbers' low bytes with `bits` high bits each from bytes [n, k], lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    above = (high[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(low.shape)
    return low | above.astype(np.uint16) << np.uint16(8)


def _signed(rows: Bytes, signs: Bytes) -> Bytes:
    return (rows.reshape(signs.shape) * signs).reshape(len(rows), -1)


def _seven(words: NDArray[np.uint32]) -> Bytes:
    """Unpack words [n, k], each with four times seven sign bits below a scale of four bits, to signs [n, k, 4, 8]."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    signs: Bytes = _EVEN[words[:, :, None] >> shifts & np.uint32(127)]
    return signs


def iq2_xxs(b: Blocks) -> Grouped:
    """Decode IQ2_XXS blocks: groups of 32, whose codes fit 8 bits."""
    words = _at(b, 2, 66, "<u4").reshape(-1, 8, 2)
    scale = _scale(b, 0) * (np.float32(0.5) + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    rows = _IQ2_XXS[np.ascontiguousarray(words[:, :, 0]).view(np.uint8)]
    return _signed(rows, _seven(words[:, :, 1])), scale


def iq2_xs(b: Blocks) -> Grouped:
    """Decode IQ2_XS blocks: groups of 16."""
    words = _at(b, 2, 66, "<u2")
    scale = _scale(b, 0) * (np.float32(0.5) + _halves(b[:, 66:74])) * np.float32(0.25)
    return _signed(_IQ2_XS[words & 511], _EVEN[words >> 9]), scale


def iq2_s(b: Blocks) -> Grouped:
    """Decode IQ2_S blocks: groups of 16."""
    scale = _scale(b, 0) * (np.float32(0.5) + _halves(b[:, 74:82])) * np.float32(0.25)
    return _signed(_IQ2_S[_with_high(b[:, 2:34], b[:, 66:74], 2)], _SIGNED[b[:, 34:66]]), scale


def iq3_xxs(b: Blocks) -> Grouped:
    """Decode IQ3_XXS blocks: groups of 32, whose codes fit 8 bits."""
    words = _at(b, 66, 98, "<u4")
    scale = _scale(b, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _signed(_IQ3_XXS[b[:, 2:66]], _seven(words)), scale


def iq3_s(b: Blocks) -> Grouped:
    """Decode IQ3_S blocks: groups of 32, odd codes from -15 to 15."""
    scale = _scale(b, 0) * (1 + 2 * _halves(b[:, 106:110]))
    return _signed(_IQ3_S[_with_high(b[:, 2:66], b[:, 66:74], 1)], _SIGNED[b[:, 74:106]]), scale


class RowFormat(NamedTuple):
    """A format whose blocks are kept in memory as they are in the file."""

    bytes: int
    """Bytes of a block of 256 weights."""
    bits: int
    """Approximate bits of a weight."""
    group: int
    """Weights that share a scale."""
    rows: Bytes
    """The codebook: rows of four or eight magnitudes."""
    meaning: Callable[[Blocks], Grouped]
    """Decodes blocks to codes and scales."""


ROW_FORMATS = {
    "iq2_xxs": RowFormat(66, 2, 32, _IQ2_XXS, iq2_xxs),
    "iq2_xs": RowFormat(74, 2, 16, _IQ2_XS, iq2_xs),
    "iq2_s": RowFormat(82, 2, 16, _IQ2_S, iq2_s),
    "iq3_xxs": RowFormat(98, 3, 32, _IQ3_XXS, iq3_xxs),
    "iq3_s": RowFormat(110, 3, 32, _IQ3_S, iq3_s),
}
_WEIGHTS = 256
"""Weights in a block."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """A weight matrix [out, in] as blocks of a `RowFormat`, exactly as in the file; `in` is a multiple of 256.

    Products with these weights round activations to 8 bits in groups of 32: see `kernels.quantized`.
    """

    kind: str
    """Its key in `ROW_FORMATS`."""
    blocks: Blocks
    """uint8 [out, in / 256 * bytes of a block]"""

    def __post_init__(self) -> None:
        size = ROW_FORMATS[self.kind].bytes
        if self.blocks.dtype != np.uint8 or self.blocks.ndim != 2 or self.blocks.shape[1] % size:
            raise ValueError(f"blocks of {self.kind} are bytes [out, in / {_WEIGHTS} * {size}]")

    @property
    def bits(self) -> int:
        """Approximate bits of a weight."""
        return ROW_FORMATS[self.kind].bits

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.blocks), self.blocks.shape[1] // ROW_FORMATS[self.kind].bytes * _WEIGHTS

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return self.blocks.nbytes

    def rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> RowBlocks:
        """Return the matrix with its rows reordered: `change` reorders the rows of an array."""
        return RowBlocks(self.kind, change(self.blocks))

    def codes(self) -> Grouped:
        """Return codes [out, in] and scales [out, in / group]."""
        form = ROW_FORMATS[self.kind]
        codes, scale = form.meaning(self.blocks.reshape(-1, form.bytes))
        return codes.reshape(self.shape), scale.reshape(len(self.blocks), -1)

    def values(self) -> Floats:
        """Return the weights [out, in] in float32."""
        codes, scale = self.codes()
        values = codes.astype(np.float32).reshape(*scale.shape, -1) * scale[:, :, None]
        return values.reshape(self.shape)


def iq1_s(b: Blocks) -> Grouped:
    """Decode IQ1_S blocks: groups of 32; codes are 8 times a codebook row, plus or minus 1 for the whole group."""
    words = _at(b, 34, 50, "<u2")
    scale = _scale(b, 0) * (2 * (words >> 12 & 7) + 1).astype(np.float32) * np.float32(0.125)
    shifts = np.arange(0, 12, 3, dtype=np.uint16)
    high = (words[:, :, None] >> shifts & np.uint16(7)).reshape(-1, 32)
    more = np.where(words & 0x8000, -1, 1).astype(np.int8)
    return (8 * _IQ1[b[:, 2:34] | high << 8].reshape(-1, 8, 32) + more[:, :, None]).reshape(-1, 256), scale


def iq1_m(b: Blocks) -> Grouped:
    """Decode IQ1_M blocks: groups of 16; codes are 8 times a codebook row, plus or minus 1 for each eight numbers."""
    words = _at(b, 48, 56, "<u2")
    # The float16 scale is spread over the highest half bytes of the words.
    d = (words >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    whole = np.bitwise_or.reduce(d, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    shifts = np.arange(0, 12, 3, dtype=np.uint16)
    scale = whole * (2 * (words[:, :, None] >> shifts & 7) + 1).reshape(-1, 16).astype(np.float32) * np.float32(0.125)
    high = np.stack([b[:, 32:48] & 15, b[:, 32:48] >> 4], axis=-1).reshape(-1, 32)
    more = np.where(high & 8, -1, 1).astype(np.int8)
    return (8 * _IQ1[b[:, :32] | (high & 7).astype(np.uint16) << 8] + more[:, :, None]).reshape(-1, 256), scale


def tq1_0(b: Blocks) -> Bytes:
    """Decode TQ1_0 blocks: codes from -1 to 1, five in a byte, as digits of a fraction in base three."""
    parts = ((b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4))
    digits = [one[:, None] * (np.uint8(3) ** np.arange(count, dtype=np.uint8))[:, None] for one, count in parts]
    whole = np.concatenate([one.reshape(len(b), -1) for one in digits], axis=1)
    return (whole.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)


def tq2_0(b: Blocks) -> Bytes:
    """Decode TQ2_0 blocks: codes from -1 to 2, four in a byte; the lowest bits of 32 bytes come first."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (b[:, :64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256).view(np.int8) - np.int8(1)


def q1_0(b: Blocks) -> Bytes:
    """Decode Q1_0 blocks: 128 codes, -1 or 1."""
    return np.unpackbits(b[:, 2:18], axis=1, bitorder="little").view(np.int8) * np.int8(2) - np.int8(1)
