"""A model as its KV is stored: its weights, and the adapters that its requests are computed with.

Each combination of adapters and scales has an identity of its own, from which nothing can be read. So agents, and
contexts that may have to be erased, keep the variant itself.
"""

from __future__ import annotations

import hashlib
import math
import struct
from weakref import WeakValueDictionary

from cairn.types.request import MAX_APPLIED, MAX_SCALE, Adapters, adapted_salt

_DOMAIN = b"cairn adapted identity 1"


class ModelVariant:
    """A model with adapters, or without any. Make it with `variant`."""

    __slots__ = ("__weakref__", "adapters", "base", "identity")

    def __init__(self, base: bytes, adapters: Adapters) -> None:
        self.base, self.adapters = base, adapters
        self.identity = adapted_identity(base, adapters)

    def salt(self, salt: bytes) -> bytes:
        """Return the salt under which the base stores KV of a tenant with this salt."""
        return adapted_salt(salt, self.adapters)


_in_use: WeakValueDictionary[bytes, ModelVariant] = WeakValueDictionary()
"""Every variant that somebody holds, by its identity."""


def variant(base: bytes, adapters: Adapters = ()) -> ModelVariant:
    """Return the variant of the model with the identity `base`: the same object as long as somebody holds it."""
    made = ModelVariant(base, adapters)
    known = _in_use.setdefault(made.identity, made)
    if adapters and not known.adapters:  # an imported file may claim that an adapted identity is a model's own
        known = _in_use[made.identity] = made
    return known


def known_variant(identity: bytes) -> ModelVariant | None:
    """Return the variant with this identity, if somebody holds it."""
    return _in_use.get(identity)


def recorded_variant(identity: bytes, base: bytes, adapters: Adapters | None) -> ModelVariant | None:
    """Return the variant with this identity as a record describes it; None if the description is not of this identity.

    `base`: empty for a model without adapters. `adapters`: None in old records.
    """
    if not identity or adapters is None or len(adapters) > MAX_APPLIED:
        return None
    if not all(math.isfinite(scale) and abs(scale) <= MAX_SCALE for _, scale in adapters):
        return None
    found = variant(base or identity, adapters)
    return found if found.identity == identity else None


def adapted_identity(identity: bytes, adapters: Adapters) -> bytes:
    """Return an identity combined with adapters and their scales; the identity itself without adapters."""
    if not adapters:
        return identity
    digest = hashlib.sha256(_DOMAIN)
    for one, scale in adapters:
        digest.update(struct.pack("<qf", len(one), scale) + one)
    return hashlib.sha256(digest.digest() + identity).digest()
