"""Decode steps as captured graphs: a step of known sizes is launched as one graph instead of kernel by kernel."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cairn.kernels.program import Interpreted, KernelCall, Size
from cairn.types.errors import DeviceMemoryError

log = logging.getLogger(__name__)

MOST_GRAPHS = 64
"""Most graphs a program keeps; the one used least recently goes first."""
ASKS_THE_HOST = frozenset({"experts", "adapt"})
"""Kernels that read numbers back from the device or go by the step's inputs on the host, which no graph can hold."""

Replay = Callable[[], None]


class GraphCapture:
    """Captures graphs that share the memory of their temporary tensors, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Replay) -> Replay:
        """Capture what `run` launches on this GPU as a graph and return its launch."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that cannot be ended leaves its own stream behind
            raise
        launch: Replay = graph.replay
        return launch


class CapturedProgram(Interpreted):
    """A `Program` that captures steps of one token a row when their sizes come a second time.

    The first step of some sizes runs kernel by kernel, so that all kernels are compiled before a capture. Steps with
    prompts, programs with kernels in `ASKS_THE_HOST` and those without rows or logits always do.
    """

    def __init__(self, kernels: Any, calls: Sequence[KernelCall], capture: Callable[[Replay], Replay]) -> None:
        super().__init__(kernels, calls)
        self._capture = capture
        self._captures = not any(call.kernel in ASKS_THE_HOST for call in calls)
        self._seen: set[tuple[int, ...]] = set()
        self._graphs: OrderedDict[tuple[int, ...], Replay] = OrderedDict()

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """Launch the graph of these sizes, or run the calls."""
        # The layers have rows, the head has logits.
        rows = sizes.get("rows", sizes.get("logits"))
        if not self._captures or not sizes["tokens"] or sizes["tokens"] != rows:
            super().replay(sizes)
            return
        # Fewer graphs as contexts grow: attention skips blocks that a row does not have.
        wide = dict(sizes)
        if "blocks" in sizes:
            wide["blocks"] = self._rounded(sizes["blocks"])
        key = tuple(wide[size] for size in sorted(wide))
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
        elif key not in self._seen:
            self._seen.add(key)
            super().replay(wide)
        else:
            self._launch_new(key, wide)

    def _launch_new(self, key: tuple[int, ...], sizes: Mapping[Size, int]) -> None:
        """Capture a step and launch it. If it cannot be captured, for want of memory, capture no more and run calls."""
        run = super().replay
        try:
            graph = self._capture(lambda: run(sizes))
        except (DeviceMemoryError, RuntimeError) as error:
            log.warning("steps are launched kernel by kernel from now on: a graph could not be captured (%s)", error)
            self._captures = False
            self._graphs.clear()
            run(sizes)
            return
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        graph()

    def _rounded(self, blocks: int) -> int:
        """Return the next power of two, within the widest table."""
        widest = min((slot.array.shape[1] for slot in self._slots if slot.second == "blocks"), default=blocks)
        return min(1 << max(blocks - 1, 0).bit_length(), widest) if blocks else blocks
