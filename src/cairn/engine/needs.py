"""A model's memory needs, estimated from the headers of its files before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cairn.config.config import Config, draft_options
from cairn.engine import memory
from cairn.engine.cpu_experts import divided
from cairn.engine.mtp_head import fit_head
from cairn.kernels.devices import free_memory
from cairn.models.hub.hub import locate
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.models.spec.judge import with_judge


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model needs, in bytes, and the sizes of its pools."""

    weights: int
    """Including a draft model or an MTP head, with their pools and buffers."""
    pool: int
    buffers: int
    loading: int = 0
    """Most that loading takes beside the weights for a while."""
    mapped: int = 0
    """Experts that stay in a mapped file, not counted elsewhere."""
    blocks: tuple[int, ...] = ()
    """How many blocks the pool of each group has."""

    @property
    def held(self) -> int:
        """Bytes for as long as it is loaded."""
        return self.weights + self.pool + self.buffers

    @property
    def most(self) -> int:
        """Bytes at the worst moment of loading."""
        return self.weights + max(self.pool + self.buffers, self.loading)


def needs(config: Config, place: Path, free: int, blocks: tuple[int, ...] = ()) -> Needs:
    """Return the memory that the model at `place` needs. Raise ModelError if it cannot be served.

    Its pool is sized for `free` bytes of memory unless `blocks` gives the size of each group's pool.
    """
    spec, head = with_judge(load_spec(place, identify=False), place, config.kind), 0
    if config.engine == "fake":  # which holds no weights; they count as if it did
        taken = memory.WeightMemory(memory.weight_bytes(spec), 0)
    else:
        held = HeldWeights(open_weights(place, spec), form_of(spec, config.weights))
        own = free_memory(config.device)
        free = free if own is None else own  # weights and pools are there, whatever the machine has
        taken = memory.placed(spec, config, divided(spec, config, held, free), free)
        fitted = None if spec.whole or config.tp > 1 or taken.mapped else fit_head(spec, place, config, held.form)
        head = 0 if fitted is None or isinstance(fitted, str) else fitted.bytes
    blocks = blocks or memory.pool_blocks(spec, config, free - head, taken)
    pool, buffers = memory.beside_weights(spec, config, blocks)
    draft = 0
    if config.draft_model is not None and config.speculate != "off":
        draft = needs(draft_options(config), locate(config.draft_model), free).held
    return Needs(
        weights=taken.held + taken.apart + draft + head,
        pool=pool,
        buffers=buffers,
        loading=taken.passing,
        mapped=taken.mapped,
        blocks=blocks,
    )
