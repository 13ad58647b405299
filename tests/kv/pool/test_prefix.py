"""Keys of blocks: a hash chain over tokens, rooted in the model's identity and the tenant's salt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cairn.kv.pool.prefix import Chain, extend, numerics, root
from cairn.types.model_spec import CacheGroup

FULL = CacheGroup(kind="full", layers=(0, 1))
TOKENS = list(range(100, 140))


def keys(start: bytes, tokens: list[int], block_tokens: int = 4) -> list[bytes]:
    chain = Chain(start, block_tokens)
    return [chain.key(index, tokens) for index in range(len(tokens) // block_tokens)]


def test_the_digest_is_whole_and_the_same_in_every_process() -> None:
    """Keys keep all of SHA-256, and Python's `hash()` has no part in them (known failures 26, 27)."""
    start = root(b"model", b"salt", FULL, 4)
    assert len(start) == len(extend(start, (1, 2))) == 32
    code = (
        "from cairn.kv.pool.prefix import *; from cairn.types.model_spec import CacheGroup;"
        "print(extend(root(b'model', b'salt', CacheGroup(kind='full', layers=(0, 1)), 4), (1, 2)).hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == extend(start, (1, 2)).hex()


@pytest.mark.parametrize(
    "other",
    [
        root(b"model2", b"salt", FULL, 4),
        root(b"model", b"salt2", FULL, 4),
        root(b"modelsalt", b"", FULL, 4),
        root(b"", b"modelsalt", FULL, 4),
        root(b"model", b"salt", CacheGroup(kind="full", layers=(0, 2)), 4),
        root(b"model", b"salt", CacheGroup(kind="window", layers=(0, 1), window=8), 4),
        root(b"model", b"salt", FULL, 8),
        root(numerics(b"model", "q8"), b"salt", FULL, 4),
    ],
)
def test_the_root_names_everything_that_could_change_a_number(other: bytes) -> None:
    """The model's identity and the tenant's salt are in every key (known failures 28, 40)."""
    start = root(b"model", b"salt", FULL, 4)
    assert other != start
    assert not set(keys(other, TOKENS)) & set(keys(start, TOKENS))


def test_the_codec_that_changes_nothing_changes_no_key() -> None:
    assert numerics(b"model", "raw") == b"model"
    assert len({numerics(b"model", "q8"), numerics(b"mode", "lq8"), numerics(b"model", "q4"), b"model"}) == 4


def test_a_window_is_part_of_the_root() -> None:
    windows = [CacheGroup(kind="window", layers=(0,), window=window) for window in (8, 9)]
    assert root(b"", b"", windows[0], 4) != root(b"", b"", windows[1], 4)


def test_a_key_covers_all_tokens_up_to_its_end() -> None:
    """Nothing is cut off: a difference anywhere changes every later key (known failure 29)."""
    start = root(b"model", b"", FULL, 4)
    truth = keys(start, TOKENS)
    for at in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[at] += 1
        other = keys(start, changed)
        assert other[: at // 4] == truth[: at // 4]
        assert not set(other[at // 4 :]) & set(truth[at // 4 :])


def test_large_token_ids_do_not_run_into_each_other() -> None:
    assert extend(b"", (1, 0)) != extend(b"", (1 << 8, 0)) != extend(b"", (0, 1))
    assert extend(b"", (1 << 31,)) != extend(b"", (0,))


def test_keys_grow_with_the_tokens() -> None:
    start, tokens = root(b"model", b"", FULL, 4), TOKENS[:5]
    chain = Chain(start, 4)
    first = chain.key(0, tokens)
    with pytest.raises(ValueError, match="not full"):
        chain.key(1, tokens)
    tokens += TOKENS[5:9]
    assert [first, chain.key(1, tokens)] == keys(start, TOKENS)[:2]
