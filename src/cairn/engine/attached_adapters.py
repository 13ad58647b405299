"""The adapters attached to a recorded engine, and the program that applies them.

Steps without adapters run the program that was recorded at load, so they cost nothing. Attaching and detaching record
the other program again, which takes some milliseconds; weights are packed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.kernels.base import Kernels, LowRank, LowRankUp
from cairn.kernels.program import Program
from cairn.models.adapters.adapter import AdapterWeights
from cairn.models.adapters.read_adapter import read_adapter
from cairn.models.forward import decoder
from cairn.models.forward.buffers import Buffers
from cairn.models.safetensors.weights import expected_tensors
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec
from cairn.types.step import AdapterFacts


class AdapterBank:
    """The attached adapters of one model. All methods but `read` run on the engine's stream."""

    def __init__(
        self, kernels: Kernels, spec: ModelSpec, built: decoder.Decoder, kv: Sequence[Any], buffers: Buffers
    ) -> None:
        self._kernels, self._spec = kernels, spec
        self._shapes = expected_tensors(spec)
        self._recorded: tuple[decoder.Decoder, Sequence[Any], Buffers] | None = (built, kv, buffers)
        self._places: dict[str, int] = {}
        """Place in the decoder's matrices of each one that may be adapted; filled at the first use."""
        self._paths: dict[int, dict[int, LowRank]] = {}
        """The side paths of each matrix, by its place and the adapter's number."""
        self.slots: dict[bytes, int] = {}
        """Number of each attached adapter, by its digest. A new mapping for each change."""
        self._facts: dict[bytes, AdapterFacts] = {}
        self.program: Program | None = None
        """The program that applies them; None without any."""

    def read(self, place: Path) -> AdapterWeights:
        """Read an adapter, on any thread. Raise `ModelError` if it is broken or changes what cannot be adapted."""
        found = read_adapter(place, self._spec)
        places = self._adaptable()
        for name in found.parts:
            if name not in places:
                raise ModelError(
                    f"{place}: the adapter changes {name}, which is not supported; supported are the projections of "
                    "attention, of recurrent layers and of dense MLPs, not experts, embeddings and the output"
                )
        return found

    def attach(self, adapter: AdapterWeights) -> AdapterFacts:
        """Pack an adapter, and record the program with it."""
        if adapter.digest in self.slots:
            return self._facts[adapter.digest]
        built, _, _ = self._open()
        slot = next(one for one in range(len(self.slots) + 1) if one not in self.slots.values())
        named = {self._adaptable()[name] for name in adapter.parts}
        paths = {place: self._packed(slot, built.matrices[place], adapter) for place in named}
        for place, path in paths.items():
            self._paths.setdefault(place, {})[slot] = path
        self.slots = {**self.slots, adapter.digest: slot}
        self._record()
        self._facts[adapter.digest] = AdapterFacts(adapter.digest, adapter.rank, len(adapter.parts), adapter.nbytes)
        return self._facts[adapter.digest]

    def detach(self, digest: bytes) -> None:
        """Free an adapter, and record the program without it. Unknown ones are ignored."""
        if (slot := self.slots.get(digest)) is None:
            return
        for paths in self._paths.values():
            paths.pop(slot, None)
        self.slots = {one: number for one, number in self.slots.items() if one != digest}
        del self._facts[digest]
        self._record()

    def close(self) -> None:
        """Free all memory."""
        self._recorded = self.program = None
        self._paths.clear()

    def _adaptable(self) -> dict[str, int]:
        """Return the place of each matrix that may be adapted, by the name of each tensor in it."""
        if not self._places:
            built, kv, buffers = self._open()
            places = decoder.projected(self._kernels, built, kv, buffers)
            self._places = {name: place for place in places for name in built.matrices[place].names}
        return self._places

    def _open(self) -> tuple[decoder.Decoder, Sequence[Any], Buffers]:
        if self._recorded is None:
            raise RuntimeError("the engine is closed")
        return self._recorded

    def _packed(self, slot: int, named: decoder.NamedMatrix, adapter: AdapterWeights) -> LowRank:
        """Pack what an adapter adds to one matrix, whose outputs may be those of several tensors."""
        downs, ups, first, column = [], list[LowRankUp](), 0, 0
        for name in named.names:
            part = adapter.parts.get(name)
            if part is not None:
                downs.append(part.down)
                packed = self._kernels.matrix([part.up], [None])
                ups.append(LowRankUp(first, part.rank, column, len(part.up), packed))
                first += part.rank
            column += self._shapes[f"{name}.weight"][0]
        return LowRank(slot, self._kernels.matrix(downs, [None] * len(downs)), tuple(ups))

    def _record(self) -> None:
        """Record the program that applies all attached adapters."""
        if not self.slots:
            self.program = None
            return
        paths = {place: tuple(own.values()) for place, own in self._paths.items() if own}
        self.program = decoder.record_adapted(self._kernels, *self._open(), paths)
