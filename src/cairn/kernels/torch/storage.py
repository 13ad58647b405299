"""Storage on a torch device: tensors, and transfers to and from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels.stream import ThreadStream
from cairn.types.errors import DeviceError, DeviceMemoryError

Tensor = Any

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""Numpy's name of a type -> torch's type."""


class TorchStorage:
    """`kernels.storage.Storage` on a device of torch."""

    logits_rows = 64

    def __init__(self, device: str) -> None:
        """Use `device`, by torch's name: cpu, cuda:0, mps."""
        self.device = torch.device(device)
        self.select()
        self._host: dict[int, NDArray[np.int32]] = {}
        """The last upload of integers by the address of its tensor: kernels need a few of them on the host, and reading
        them back would stall the device."""

    def select(self) -> None:
        """Make this the calling thread's current device, which Triton launches on and events are recorded on."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return a zeroed tensor."""
        try:
            return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)
        except RuntimeError as error:
            raise translated(error) from error

    def first(self, array: Tensor, count: int, second: int | None = None) -> Tensor:
        """Return a view."""
        return array[:count] if second is None else array[:count, :second]

    def mirror(self, array: Tensor) -> NDArray[Any]:
        """Return zeroed numpy memory of the tensor's shape and type."""
        return np.zeros(tuple(array.shape), numpy_type(array.dtype))

    def upload(self, pairs: Sequence[tuple[Tensor, NDArray[Any]]]) -> None:
        """Copy each mirror, or the beginning of one, to the beginning of its tensor."""
        for array, mirror in pairs:
            part = array[tuple(map(slice, mirror.shape))]
            part.copy_(self.tensor(np.ascontiguousarray(mirror)))
            if mirror.dtype == np.int32:
                self._host[array.data_ptr()] = mirror.copy()

    def host(self, array: Tensor) -> NDArray[np.int32]:
        """Return an uploaded tensor of integers on the host, without reading it back if possible."""
        known = self._host.get(array.data_ptr())
        shape = tuple(array.shape)
        if (
            known is not None
            and known.ndim == len(shape)
            and all(a >= b for a, b in zip(known.shape, shape, strict=True))
        ):
            return known[tuple(map(slice, shape))]
        found: NDArray[np.int32] = array.cpu().numpy()
        return found

    def fetch(self, array: Tensor) -> NDArray[Any]:
        """Return a copy of a tensor's numbers."""
        copied = array.detach().to("cpu", copy=True).contiguous()
        if copied.dtype != torch.bfloat16:
            found: NDArray[Any] = copied.numpy()
            return found
        return np.asarray(copied.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)

    def tensor(self, source: NDArray[Any]) -> Tensor:
        """Copy a numpy array to a tensor on the device."""
        if source.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(source.view(np.int16).copy()).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(np.array(source, order="C")).to(self.device)

    def gather(self, source: Tensor, places: Tensor, out: Tensor) -> None:
        """out[R, H] = source[places[R], H]."""
        out.copy_(source[places.long()])

    def read_pages(self, pool: Tensor, blocks: Sequence[int]) -> list[memoryview]:
        """Return copies of the blocks' bytes, fetched in one transfer."""
        if not blocks:
            return []
        found = bytes_of(pool[torch.tensor(list(blocks), device=self.device)]).cpu().numpy()
        return [page.data for page in found.reshape(len(blocks), -1)]

    def write_pages(self, pool: Tensor, blocks: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Fill blocks in one transfer."""
        if not blocks:
            return
        whole = np.stack([np.frombuffer(page, np.uint8) for page in pages])
        given = self.tensor(whole).view(pool.dtype).reshape(len(blocks), *pool.shape[1:])
        pool[torch.tensor(list(blocks), device=self.device)] = given

    def copy_blocks(self, pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within a pool, in order."""
        for source, target in pairs:
            pool[target].copy_(pool[source])

    @contextlib.contextmanager
    def touching(self, pools: Sequence[Tensor], size: int) -> Iterator[None]:
        """Do nothing: `allocate` has taken the memory already."""
        yield

    def stream(self) -> ThreadStream:
        """Return a thread that drives the device."""
        made = ThreadStream(f"cairn-{self.device}", translated)
        made.submit(self.select)
        return made


def numpy_type(dtype: Any) -> Any:
    """Return numpy's type for torch's."""
    (name,) = (name for name, one in DTYPES.items() if one == dtype)
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def bytes_of(array: Tensor) -> Tensor:
    """View a contiguous tensor's bytes."""
    return array.contiguous().reshape(-1).view(torch.uint8)


def translated(error: Exception) -> Exception:
    """Return the typed error for an exception of torch; other exceptions unchanged."""
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return DeviceMemoryError(f"the device has no memory left: {_first_line(error)}")
    if isinstance(error, RuntimeError):
        return DeviceError(f"the device failed: {_first_line(error)}")
    return error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
