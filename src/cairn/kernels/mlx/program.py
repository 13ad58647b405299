"""Replay of a program over values: an array that a call overwrites becomes another value of its cell.

All calls of a step are one lazy graph, which is computed at the end. Cells keep what later programs may read; pools are
written in place, because nothing else holds their arrays by then (see `kernels.mlx.cells`). A step of one token in each
row may be compiled: its graph depends on few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from cairn.kernels.base import EFFECTS, Kernels
from cairn.kernels.effects import parameters_of
from cairn.kernels.mlx import attention, operations, recurrent
from cairn.kernels.mlx.cells import Blank, Cell, Cut, LaterWrite, Pool
from cairn.kernels.mlx.places import Places
from cairn.kernels.mlx.storage import out_of_memory
from cairn.kernels.mlx.weights import stacked
from cairn.kernels.program import KernelCall, Size, Slot
from cairn.types.errors import DeviceError, DeviceMemoryError

Array = Any

OPERATIONS: dict[str, Callable[..., Any]] = {
    name: next(getattr(module, name) for module in (operations, attention, recurrent) if hasattr(module, name))
    for name in EFFECTS
}
"""Kernel -> the function that computes it."""
_PARAMETERS = parameters_of(Kernels)
_POOLS = frozenset(("kv", "states"))
_STACKS = {"experts": ("gate_up", "down"), "latent_queries": ("keys",), "latent_values": ("values",)}
"""Kernel -> arguments that are matrices of one shape, which become one array."""
BUCKET = 8
"""Compiled steps read a multiple of so many blocks, so that a longer context rarely compiles anew."""
_GRAPHS = 64
"""Most compiled graphs of a program; the oldest goes."""


@dataclass(frozen=True, slots=True)
class _Read:
    """An argument that is a cell's value, cut to the step's sizes."""

    cell: Cell
    sizes: tuple[Size | int | None, Size | int | None] = (None, None)
    """Of its first axes: by the step, fixed, or whole."""

    def lengths(self, sizes: Mapping[Size, int]) -> tuple[int, int | None]:
        first, second = (sizes[one] if isinstance(one, str) else one for one in self.sizes)
        return len(self.cell) if first is None else first, second


@dataclass(frozen=True, slots=True)
class _Where:
    """The arguments `rows` and `tables` of a call."""

    rows: _Read
    tables: _Read


@dataclass(frozen=True, slots=True)
class _Write:
    """An argument that is overwritten whole."""

    place: _Read


@dataclass(frozen=True, slots=True)
class _PreparedCall:
    """One call, ready to be replayed."""

    kernel: str
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    changed: tuple[Cell, ...]
    """The cells that get what the operation returns."""


Graph = Callable[[list[Array], list[Array], list[Array]], tuple[list[Array], ...]]
"""Takes inputs, pools, and the arrays of places; returns kept values, pools, and the arrays of later writes."""


class MlxProgram:
    """A `kernels.program.Program` over cells."""

    def __init__(
        self,
        active: Callable[[], Any],
        calls: Sequence[KernelCall],
        compiled: bool = False,
        instead: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Prepare the calls.

        `active`: a context for the kernel set's stream. `compiled`: compile steps of single tokens. `instead`:
        operations that stand for some of `OPERATIONS`.
        """
        self.calls = tuple(calls)
        self._active, self._compiled = active, compiled
        with active():
            self._steps = [_prepared(call, instead or {}) for call in calls]
        passing = {id(one.array) for call in calls for one in call.arguments if isinstance(one, Slot) and one.passing}
        changed = {id(cell): cell for step in self._steps for cell in step.changed}
        self._kept = [cell for key, cell in changed.items() if key not in passing]
        """Cells that are written and may be read elsewhere."""
        pools = {id(cell): cell for step in self._steps for cell in step.arguments if isinstance(cell, Cell)}
        self._pools: list[Pool] = [cell.as_pool() for cell in pools.values()]
        looks = [_look(step) for step in self._steps]
        self._looks = list(dict.fromkeys(one for one in looks if one is not None))
        self._wheres = list(dict.fromkeys(where for where, _, _ in self._looks))
        self._inputs = self._first_reads()
        self._graphs: dict[tuple[tuple[int, ...], ...], tuple[Graph, list[tuple[int, int, int]]]] = {}

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """`Program.replay`. A `DeviceError` means that the pools are lost, a `DeviceMemoryError` that they are not."""
        if not self._steps:
            return
        with self._active():
            places = self._places(sizes)
            single = self._compiled and bool(places) and all(one.single for one in places.values())
            held = [pool.arrays for pool in self._pools]
            try:
                values = self._compile(sizes, places) if single else self._run(sizes, places, {})
            except BaseException:
                # Of a step that cannot be built some layers may hold its tokens, which are computed again.
                for pool, arrays in zip(self._pools, held, strict=True):
                    pool.arrays, pool.later = arrays, []
                raise
            del held
            self._compute(values)

    def _run(self, sizes: Mapping[Size, int], places: Mapping[_Where, Places], env: dict[int, Array]) -> list[Array]:
        """Build the step's graph; return the values of the kept cells."""
        for step in self._steps:
            given = [self._given(one, sizes, places, env) for one in step.arguments]
            found = step.operation(*given)
            for cell, value in zip(step.changed, found if isinstance(found, tuple) else (found,), strict=False):
                env[id(cell)] = value
        return [env[id(cell)] for cell in self._kept]

    def _compute(self, values: list[Array]) -> None:
        pools = [array for pool in self._pools for array in pool.arrays]
        later = [one.numbers for pool in self._pools for one in pool.later]
        try:
            mx.eval(values, pools, later)
            del pools, later
            self._settle()
        except RuntimeError as error:
            self._recover(error)
        for cell, value in zip(self._kept, values, strict=True):
            cell.take(value)

    def _settle(self) -> None:
        """Write the states, now that nothing of the step reads them."""
        waiting = [pool for pool in self._pools if pool.later]
        for pool in waiting:
            pool.settle()
        mx.eval([pool.arrays for pool in waiting])

    def _recover(self, error: RuntimeError) -> None:
        """Raise the typed error; for want of memory only if the pools can be had as they would be after the step."""
        try:
            for pool in self._pools:
                pool.later = []
                mx.eval(pool.arrays)
        except RuntimeError as lost:
            raise DeviceError(f"the device failed, and the KV is lost: {str(error)[:300]}") from lost
        kind = DeviceMemoryError if out_of_memory(error) else DeviceError
        raise kind(f"the device failed in a step: {str(error)[:300]}") from error

    def _given(
        self, one: Any, sizes: Mapping[Size, int], places: Mapping[_Where, Places], env: dict[int, Array]
    ) -> Any:
        """Return an argument as an operation takes it."""
        kind = type(one)
        if kind is _Read:
            found = env.get(id(one.cell))
            if found is None:
                found = env[id(one.cell)] = one.cell.cut(*one.lengths(sizes))
            return found
        if kind is _Write:
            return Blank(Cut(one.place.cell, *one.place.lengths(sizes)).shape)
        if kind is _Where:
            return places[one]
        return one.pool if kind is Cell else one

    def _places(self, sizes: Mapping[Size, int]) -> dict[_Where, Places]:
        made: dict[tuple[Any, ...], Places] = {}
        found = {}
        for one in self._wheres:
            key = (id(one.rows.cell), id(one.tables.cell), one.rows.lengths(sizes), one.tables.lengths(sizes))
            if key not in made:
                rows = one.rows.cell.integers(one.rows.lengths(sizes)[0])
                tables = one.tables.cell.integers(*one.tables.lengths(sizes))
                made[key] = Places(rows, tables, BUCKET if self._compiled else 1)
            found[one] = made[key]
        return found

    def _first_reads(self) -> list[_Read]:
        """Return what the program reads before it writes it: the inputs of a compiled step."""
        known, found = set[int](), []
        for step in self._steps:
            for one in step.arguments:
                if type(one) is _Read and id(one.cell) not in known:
                    known.add(id(one.cell))
                    found.append(one)
            known.update(id(cell) for cell in step.changed)
        return found

    # ------------------------------------------------------------------------------------------------ compiled steps

    def _compile(self, sizes: Mapping[Size, int], places: Mapping[_Where, Places]) -> list[Array]:
        """Run the step's compiled graph, compiling it for sizes not seen yet."""
        for where, window, both in self._looks:
            if window is None:
                places[where].states()
            else:
                places[where].sights(window, both)
        wheres = list(dict.fromkeys(places.values()))
        given = [array for one in wheres for array in one.arrays]
        inputs = [one.cell.cut(*one.lengths(sizes)) for one in self._inputs]
        key = tuple(tuple(array.shape) for array in (*inputs, *given))
        if key not in self._graphs:
            if len(self._graphs) >= _GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._graph(dict(sizes), dict(places), wheres)
        graph, waiting = self._graphs[key]
        pools = [array for pool in self._pools for array in pool.arrays]
        for pool in self._pools:
            pool.arrays = [None] * len(pool.arrays)
        values, pools, later = graph(inputs, pools, given)
        written, numbers = iter(pools), iter(later)
        for number, pool in enumerate(self._pools):
            pool.arrays = [next(written) for _ in pool.arrays]
            pool.later = [
                LaterWrite(layer, next(numbers), first, next(numbers))
                for owner, layer, first in waiting
                if owner == number
            ]
        return values

    def _graph(
        self, sizes: Mapping[Size, int], places: Mapping[_Where, Places], wheres: list[Places]
    ) -> tuple[Graph, list[tuple[int, int, int]]]:
        """Return a compiled graph, and what its first run fills: pool, layer and first number of each later write."""
        waiting: list[tuple[int, int, int]] = []

        def graph(inputs: list[Array], pools: list[Array], given: list[Array]) -> tuple[list[Array], ...]:
            arrays, held = iter(given), iter(pools)
            swapped = {one: one.with_arrays(arrays) for one in wheres}
            env = {id(one.cell): value for one, value in zip(self._inputs, inputs, strict=True)}
            for pool in self._pools:
                pool.arrays, pool.later = [next(held) for _ in pool.arrays], []
            values = self._run(sizes, {where: swapped[one] for where, one in places.items()}, env)
            waiting[:] = [
                (number, one.layer, one.first) for number, pool in enumerate(self._pools) for one in pool.later
            ]
            later = [array for pool in self._pools for one in pool.later for array in (one.blocks, one.numbers)]
            return values, [array for pool in self._pools for array in pool.arrays], later

        return mx.compile(graph), waiting


def _prepared(call: KernelCall, instead: Mapping[str, Callable[..., Any]]) -> _PreparedCall:
    """Resolve a call's arguments."""
    effect, names = EFFECTS[call.kernel], _PARAMETERS[call.kernel]
    given: list[Any] = []
    changed = []
    where = None
    if "tables" in names:
        where = _Where(*(_place(call.arguments[names.index(name)]) for name in ("rows", "tables")))
    for number, (name, one) in enumerate(zip(names, call.arguments, strict=False)):
        place = _read(one)
        if name == "members":
            given.append(None)
        elif where is not None and name in ("rows", "tables"):
            given.append(where)
        elif place is not None and name in _POOLS:
            place.cell.as_pool()
            given.append(place.cell)
        elif place is not None:
            given.append(_Write(place) if number in effect.writes else place)
            if number in effect.changes:
                changed.append(place.cell)
        else:
            given.append(stacked(one) if name in _STACKS.get(call.kernel, ()) else one)
    operation = instead.get(call.kernel, OPERATIONS[call.kernel])
    return _PreparedCall(call.kernel, operation, tuple(given), tuple(changed))


def _read(one: Any) -> _Read | None:
    """Return the place of a cell, a slot of one, or the first entries of one; None for a constant."""
    if isinstance(one, Slot):
        return _Read(one.array, (one.size, one.second))
    if isinstance(one, Cut):
        return _Read(one.cell, (one.count, one.second))
    return _Read(one) if isinstance(one, Cell) else None


def _place(one: Any) -> _Read:
    found = _read(one)
    if found is None:
        raise TypeError(f"a {type(one).__name__} is no cell")
    return found


def _look(step: _PreparedCall) -> tuple[_Where, int | None, bool] | None:
    """Return where a call looks, its window and whether it sees both ways; without a window for a state's layer."""
    where = next((one for one in step.arguments if isinstance(one, _Where)), None)
    if where is None:
        return None
    if step.kernel == "latent_attention":
        return where, 0, False
    if step.kernel != "attention":
        return where, None, False
    names = _PARAMETERS["attention"]
    given = dict(zip(names, step.arguments, strict=False))
    return where, given["window"], given.get("both", False)
