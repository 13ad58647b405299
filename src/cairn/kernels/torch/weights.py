"""Weights of the torch kernels: floats in their own type, quantised codes packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cairn.kernels.base import GROUP, Packed
from cairn.kernels.codebooks import RowBlocks
from cairn.kernels.quantized import LARGEST_CODE, LEAST_MAGNITUDE

Tensor = Any


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A `Packed` matrix on a device: two codes of 4 bits in a byte, or one code of any other kind."""

    bits: int
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    block_scale: Tensor | None
    block_minimum: Tensor | None

    def floats(self, which: Tensor | None = None) -> Tensor:
        """Return the weights [out, in] in float32, of all outputs or of those in `which`."""

        def of(one: Tensor | None) -> Any:
            return one if which is None or one is None else one[which]

        codes = of(self.codes)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(len(codes), -1)
        scale = _whole(of(self.scale), of(self.block_scale))
        found = codes.float().reshape(len(codes), scale.shape[1], -1)
        if self.bits == 6:
            found -= 32
        elif self.bits == 4 and self.minimum is None:
            found -= 8
        found *= scale[..., None]
        if self.minimum is not None:
            found += _whole(of(self.minimum), of(self.block_minimum))[..., None]
        return found.reshape(len(codes), -1)


def _whole(numbers: Tensor, block: Tensor | None) -> Tensor:
    """Return scales in float32; integers of super-blocks are multiplied by the block's own scale."""
    if block is None:
        return numbers.float()
    return numbers.float() * block.float().repeat_interleave(numbers.shape[1] // block.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    """A matrix in parts, whose outputs are concatenated in order."""

    parts: tuple[Tensor | PackedCodes, ...]
    """Tensors [out, in] of floats, or codes."""
    biases: tuple[Tensor | None, ...]
    inner: int

    def product(self, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return x[M, in] @ matrix + bias as [M, out]; write it to `out`, or add it, if there is one."""
        found, low = [], None
        for part, bias in zip(self.parts, self.biases, strict=True):
            if isinstance(part, PackedCodes):
                low = rounded(x) if low is None else low
                made = low @ part.floats().T
            else:
                made = x @ part.float().T
            found.append(made if bias is None else made + bias)
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        if out is None:
            return whole
        return out.add_(whole) if add else out.copy_(whole)

    def rows(self, which: Tensor) -> Tensor:
        """Return the weights [n, in] of the outputs `which`, in float32."""
        if len(self.parts) == 1:  # as a table of embeddings has it; nothing then is read back from the device
            (part,) = self.parts
            return part.floats(which) if isinstance(part, PackedCodes) else part[which].float()
        found = torch.zeros((len(which), self.inner), device=which.device)
        first = 0
        for part in self.parts:
            count = len(part.codes) if isinstance(part, PackedCodes) else len(part)
            inside = ((which >= first) & (which < first + count)).nonzero()[:, 0]
            places = which[inside] - first
            found[inside] = part.floats(places) if isinstance(part, PackedCodes) else part[places].float()
            first += count
        return found


def pack(weights: Sequence[Any], biases: Sequence[Any], tensor: Callable[[Any], Tensor]) -> TorchMatrix:
    """Pack matrices with the same input into one; `tensor` copies a numpy array to the device."""
    parts = tuple(_codes(one, tensor) if isinstance(one, Packed) else tensor(one) for one in weights)
    added = tuple(None if bias is None else tensor(bias).float() for bias in biases)
    return TorchMatrix(parts, added, int(weights[0].shape[1]))


def _codes(one: Packed, tensor: Callable[[Any], Tensor]) -> PackedCodes:
    if isinstance(one, RowBlocks):
        found, shares = one.codes()
        return PackedCodes(8, tensor(found), tensor(shares), None, None, None)
    codes = tensor(one.codes)
    if one.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    numbers = (one.scale, one.minimum, one.block_scale, one.block_minimum)
    return PackedCodes(one.bits, codes, *(None if part is None else tensor(part) for part in numbers))


def rounded(x: Tensor) -> Tensor:
    """Round activations x[M, in] as products with quantised weights do: see `kernels.quantized`."""
    groups = x.reshape(len(x), -1, GROUP)
    most = groups.abs().amax(dim=-1, keepdim=True)
    finite = most.isfinite()
    usable = finite & (most >= float(LEAST_MAGNITUDE))
    factor = torch.where(usable, LARGEST_CODE / most, 0.0)
    scale = torch.where(usable, most / LARGEST_CODE, torch.where(finite, 0.0, torch.nan))
    codes = torch.round(torch.where(usable, groups, 0.0) * factor)
    return (codes * scale).reshape(x.shape)


__all__ = ["PackedCodes", "TorchMatrix", "pack", "rounded"]
