from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.laws import speculation


@pytest.mark.parametrize("model", [*speculation.MODELS, *speculation.AHEAD, speculation.REAL])
def test_guesses_change_nothing_on_real_kernels(model: str, prove: bool, figure: Callable[[str, str], None]) -> None:
    real = model == speculation.REAL
    count = (20 if real else 200) if prove else 1 if real else 8
    total = speculation.run_many(model, 0, count)
    figure(
        f"speculation, {model}",
        f"{count} schedules the same with guesses as without ({total['tokens']:,} tokens, {total['accepted']:,} of "
        f"{total['offered']:,} guesses right, {total['preemptions']:,} preemptions)",
    )
    # Drafts that are never made, or never wrong, prove nothing.
    assert total["accepted"] > 5 * count
    assert total["offered"] > total["accepted"] + 3 * count
    assert total["tokens"] > 15 * count
    if model in speculation.AHEAD:
        assert total["said"] > 2 * count, "the head is never right"
        assert total["asked"] > total["said"] + 2 * count
