"""The declared effects of kernels on their arguments, against the reference kernels."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from cairn.kernels.base import EFFECTS, Kernels
from cairn.kernels.effects import Effect, effect, effects_of
from cairn.kernels.reference import ReferenceKernels
from cairn.kernels.storage import Storage
from tests.kernels.arguments import Call, calls

PACKING = {"vector", "table", "matrix", "rope", "numerics", "sampler", "program", "close", "logits_rows"}
"""Members that compute nothing in a step."""


def results(call: Call, noise: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return all arrays before and after a call; overwritten ones start with other numbers for another `noise`."""
    kernels = ReferenceKernels()
    arguments = call.given(kernels)
    rng = np.random.default_rng(noise)
    for place in EFFECTS[call.kernel].writes:
        arguments[place][...] = rng.integers(0, 99, arguments[place].shape)
    before = [arguments[place].copy() for place in call.arrays()]
    with np.errstate(all="ignore"):
        getattr(kernels, call.kernel)(*arguments)
    kernels.close()
    return before, [arguments[place] for place in call.arrays()]


def equal(first: np.ndarray, second: np.ndarray) -> bool:
    return first.tobytes() == second.tobytes()


def test_every_operation_has_an_effect_and_arguments_to_try_it() -> None:
    operations = {name for name, one in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")}
    operations -= PACKING | set(dir(Storage))
    assert set(EFFECTS) == operations == {call.kernel for call in calls()}
    assert all(one.changes for one in EFFECTS.values())


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_a_kernel_changes_what_it_declares_and_reads_nothing_that_it_overwrites(kernel: str) -> None:
    own = EFFECTS[kernel]
    for call in (call for call in calls() if call.kernel == kernel):
        before, after = results(call, 1)
        changed = {place for place, old, new in zip(call.arrays(), before, after, strict=True) if not equal(old, new)}
        assert changed == set(own.changes), call.arguments
        _, again = results(call, 2)
        for place, one, other in zip(call.arrays(), after, again, strict=True):
            if place in own.writes:
                assert equal(one, other), "what it held before counts, so it is an update"


@pytest.mark.parametrize("kernel", sorted(name for name, one in EFFECTS.items() if one.updates))
def test_an_updated_arguments_old_value_matters(kernel: str) -> None:
    """If it did not, the argument would only be overwritten, and more calls could be fused."""
    call = next(call for call in calls() if call.kernel == kernel)
    for place in EFFECTS[kernel].updates:
        other = [*call.arguments]
        noise = np.random.default_rng(9).standard_normal(other[place].shape).astype(np.float32)
        other[place] = (np.asarray(other[place], np.float32) + noise).astype(other[place].dtype)
        _, first = results(call, 1)
        _, second = results(Call(kernel, tuple(other)), 1)
        changed = [call.arrays().index(change) for change in EFFECTS[kernel].changes]
        assert not all(equal(first[index], second[index]) for index in changed)


def test_effects_are_declared_by_parameter_names() -> None:
    class Two:
        @effect(writes="out", updates="kv states")
        def first(self, x: int, kv: int, out: int, states: int) -> None: ...

        def second(self, x: int) -> None: ...

    assert effects_of(Two) == {"first": Effect(writes=(2,), updates=(1, 3))}
    assert effects_of(Two)["first"].changes == (1, 2, 3)
    with pytest.raises(ValueError):

        @effect(writes="nothing")
        def third(x: int) -> None: ...
