"""Sealed objects in a shared store: unreadable to outsiders, and refused if changed or moved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster.keys import SEALED_BYTES, ClusterKeys, new_key_file, parse_keys, read_keys
from cairn.system.posix import SystemFiles
from cairn.types.errors import ConfigError
from tests.cluster.stores import Draws, keys


def test_a_sealed_object_opens_only_under_its_name() -> None:
    sealer, reader = keys(1), keys(1000)
    data = sealer.seal("kv/a", b"a secret of the conversation")
    assert reader.open("kv/a", data) == b"a secret of the conversation"
    assert reader.open("kv/b", data) is None
    assert b"secret" not in data and len(data) == SEALED_BYTES + 28
    assert sealer.seal("kv/a", b"same") != sealer.seal("kv/a", b"same")


def test_names_tell_nothing_and_their_parts_cannot_be_shifted() -> None:
    mine, theirs = keys(), ClusterKeys(b"m" * 32, (b"k" * 32,), Draws())
    assert mine.name(b"chunk", b"x") == keys(5).name(b"chunk", b"x") != theirs.name(b"chunk", b"x")
    assert mine.name(b"chunk", b"x") != mine.name(b"chun", b"kx") and "x" not in mine.name(b"x" * 40)


def test_no_change_of_an_object_is_accepted(prove: bool, figure: Callable[[str, str], None]) -> None:
    rng, sealed = random.Random(7), keys()
    objects = [(f"kv/{number}", rng.randbytes(rng.randrange(0, 300))) for number in range(50)]
    data = {name: sealed.seal(name, content) for name, content in objects}
    tries = 100_000 if prove else 5_000
    for number in range(tries):
        name, _ = objects[number % len(objects)]
        changed = tampered(rng, data[name], data[objects[(number + 1) % len(objects)][0]])
        assert changed == data[name] or sealed.open(name, changed) is None
    for name, content in objects:
        assert sealed.open(name, data[name]) == content
    figure("tampered objects of a shared store accepted", f"0 of {tries:,}")


def tampered(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the data with a flipped bit, cut, extended, or with (a part of) another object in its place."""
    at = rng.randrange(len(data))
    match rng.randrange(6):
        case 0 | 1:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at]
        case 3:
            return data + rng.randbytes(1 + rng.randrange(20))
        case 4:
            return data[:at] + other[at:]
        case _:
            return other


def test_a_new_key_seals_and_the_old_ones_still_open() -> None:
    text = new_key_file(Draws())
    old = ClusterKeys(*parse_keys(text, "f"), Draws(10))
    rotated = ClusterKeys(*parse_keys(new_key_file(Draws(50), text), "f"), Draws(20))
    before, after = old.seal("x", b"1"), rotated.seal("x", b"2")
    assert rotated.open("x", before) == b"1" and rotated.open("x", after) == b"2"
    assert old.open("x", after) is None, "it does not know the new key"
    assert rotated.name(b"a") == old.name(b"a"), "names stay, or nothing would be found"


@pytest.mark.parametrize(
    "text", ["", "names 00", "key " + "0" * 64, "names " + "0" * 64, "nonsense\n", f"names {'0' * 64}\nkey {'g' * 64}"]
)
def test_a_bad_key_file_is_refused_by_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cluster_key_file"):
        read_keys(SystemFiles(), path, Draws())


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(new_key_file(Draws()))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(SystemFiles(), path, Draws())
    path.chmod(0o600)
    assert read_keys(SystemFiles(), path, Draws()).name(b"x")
    with pytest.raises(ConfigError, match="cairn cluster key"):
        read_keys(SystemFiles(), tmp_path / "none", Draws())
