"""The byte-bounded cache that tenants share."""

from __future__ import annotations

import random

from cairn.system.tenant_cache import PARTS, TenantCache


def sizes(cache: TenantCache[int]) -> dict[tuple[str, object], int]:
    return dict(cache._values.items())


def keep(cache: TenantCache[int], tenant: str, key: str, size: int) -> bool:
    if cache.get(tenant, key) is not None:
        return True
    room = cache.make_room(tenant, size)
    if room:
        cache.put(tenant, key, size)
    return room


def test_the_least_recently_used_goes_first_and_a_tenant_has_a_quarter() -> None:
    cache = TenantCache[int](400, lambda size: size)
    assert keep(cache, "a", "1", 40) and keep(cache, "a", "2", 40)
    assert cache.get("a", "1") == 40 and keep(cache, "a", "3", 40)
    assert [key for _, key in sizes(cache)] == ["1", "3"], "the second was used longest ago, and 120 is above a quarter"
    for tenant in "bcde":
        assert keep(cache, tenant, "1", 100)
    assert cache.bytes() == 400 and cache.get("a", "1") is None, "the whole is bounded, too"
    assert cache.get("b", "3") is None, "no tenant has what another has"


def test_held_entries_stay_and_a_failed_insert_evicts_nothing() -> None:
    held = {50}
    cache = TenantCache[int](400, lambda size: size, lambda size: size in held)
    assert keep(cache, "a", "held", 50) and keep(cache, "a", "free", 30)
    before = sizes(cache)
    assert not keep(cache, "a", "large", 60) and sizes(cache) == before
    held.clear()
    assert keep(cache, "a", "large", 60)
    assert not cache.make_room("a", 101), "more than a tenant's part"


def test_bounds_hold_whatever_comes() -> None:
    rng = random.Random(4)
    for _ in range(200):
        held: set[int] = set()
        cache = TenantCache[int](1000, lambda size: size, held.__contains__)
        for _ in range(60):
            tenant, size = rng.choice("abcdefg"), rng.randint(1, 250)
            held ^= {rng.randint(1, 250)}
            keep(cache, tenant, str(rng.randint(0, 9)), size)
            assert cache.bytes() <= 1000
            assert all(cache.bytes(char) <= 1000 // PARTS for char in "abcdefg")


def test_growth_counts_when_the_next_entry_comes() -> None:
    grown = {"x": 10}
    cache = TenantCache[str](400, lambda name: grown[name], lambda _: False)
    assert cache.make_room("a", 10)
    cache.put("a", "x", "x")
    grown["x"] = 95
    assert cache.make_room("a", 10) and cache.bytes() == 0
