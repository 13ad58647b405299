"""Which calls have which model, and which wait for one: a model that a call has is not unloaded for another's sake.

A call may have several models: a team's members, an embedding for a search. One that waits for another model while it
has one would wait for itself, if that had to make room. So those that wait say what they have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from cairn.router.served_model import LoadedModel, ServedModel


class Lease:
    """One call has a model. Tasks that the call has begun see when it is over, too."""

    __slots__ = ("model", "over")

    def __init__(self, model: ServedModel) -> None:
        self.model, self.over = model, False


_HELD: ContextVar[tuple[Lease, ...]] = ContextVar("held", default=())
"""What the call of this task has."""


class ModelLeases:
    """The leases of one server's models. One event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Lease, ...]] = []
        """What calls have that wait for another model: it does not get free before they have that."""

    @staticmethod
    def held() -> tuple[Lease, ...]:
        """What the call of this task has now."""
        return tuple(lease for lease in _HELD.get() if not lease.over)

    @contextlib.contextmanager
    def lease(self, model: ServedModel, loaded: LoadedModel) -> Iterator[None]:
        """The call of this task has a loaded model meanwhile."""
        loaded.users += 1
        before, lease = _HELD.get(), Lease(model)
        _HELD.set((*before, lease))
        try:
            yield
        finally:
            lease.over = True
            _HELD.set(before)
            loaded.users -= 1

    @contextlib.contextmanager
    def waiting(self, model: ServedModel) -> Iterator[tuple[Lease, ...]]:
        """The call of this task waits for a model meanwhile; what it has."""
        held = self.held()
        model.waiting += 1
        self._waiting.append(held)
        try:
            yield held
        finally:
            model.waiting -= 1
            self._waiting.remove(held)

    def waits(self, model: ServedModel) -> bool:
        """Whether a call that has this model waits for another one."""
        return any(lease.model is model and not lease.over for held in self._waiting for lease in held)
