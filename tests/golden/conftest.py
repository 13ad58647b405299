"""Every model on every kind of kernels is a sweep: `make test` takes the default kernels and one other for a model."""

from __future__ import annotations

import pytest
from tests.tiny_models import KERNELS, MODELS

SWEEPS = {"test_any_chunking_gives_the_same_bits", "test_logits_and_greedy_tokens_equal_those_of_transformers"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rest of the sweeps to `make prove`. Each kind of kernels that runs here keeps several models."""
    if config.option.prove:
        return
    left = [item for item in items if isinstance(item, pytest.Function) and not _taken(item)]
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


def _taken(item: pytest.Function) -> bool:
    if item.originalname not in SWEEPS or len(KERNELS) == 1:
        return True
    given = item.callspec.params
    kind = given["kernels"] if "kernels" in given else given["load"][0]
    others = KERNELS[1:]
    return kind in (KERNELS[0], others[list(MODELS).index(given["name"]) % len(others)])
