"""Random schedules keep their laws: scheduler, streams, speculation, texts and agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.laws import agents, simulator, speculation, streams, text_fuzz
from tests.laws.simulator import Broken


def test_every_schedule_keeps_the_laws(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 2, 6, 7, 8, 9, 11, 12, 13, 14, 15, 17, 32, 33, 34, 36, 38."""
    total = simulator.run_many(0, 20_000 if prove else 600)
    figure(
        "scheduler simulator",
        f"{total['schedules']:,} schedules clean ({total['steps']:,} steps, {total['finished']:,} requests, "
        f"{total['preemptions']:,} preemptions, {total['beside']:,} overtaken beside a long prompt, "
        f"{total['slowed']:,} steps short of time, {total['forced']:,} tokens forced, "
        f"{total['loaded']:,} tokens loaded)",
    )
    share = 2 if prove else 1
    # A simulator that never gets into trouble proves nothing.
    assert total["preemptions"] > 50 * share
    assert total["beside"] > 10 * share
    assert total["slowed"] > 50 * share
    assert total["forced"] > 150 * share
    assert total["hits"] > 5_000 * share
    assert total["within"] > 300 * share
    assert total["loaded"] > 1_000 * share
    assert total["finished"] > 4 * total["schedules"]


def test_every_stream_equals_the_right_answer(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 2, 19, 22."""
    count = 100_000 if prove else 5_000
    tokens = streams.run_many(0, count)
    figure("stream simulator", f"{count:,} streams right ({tokens:,} tokens)")
    assert tokens > 8 * count


@pytest.mark.parametrize("seed", simulator.AGAIN)
def test_a_schedule_that_once_broke_a_law_keeps_it(seed: int) -> None:
    simulator.run(seed)


def test_a_schedule_is_the_same_again() -> None:
    first, second = simulator.run(12), simulator.run(12)
    assert (first.steps, first.finished, first.clock.time) == (second.steps, second.finished, second.clock.time)


def test_a_broken_law_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.FakeEngine, "oracle", lambda *_: [0, 0, 0])
    with pytest.raises(simulator.Broken, match=r"seed \d+, step \d+"):
        simulator.run_many(0, 20)


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


def test_every_answer_is_parsed_correctly_however_it_is_cut(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 15, 19, 22, 24."""
    count = 10_000 if prove else 250
    tokens = 0
    for seed in range(count):
        try:
            tokens += text_fuzz.answer(seed)
        except Broken as error:
            raise Broken(f"seed {seed}: {error}") from error
    figure("text fuzz, answers", f"{count:,} answers right ({tokens:,} tokens, each cut three ways)")
    assert tokens > 20 * count


async def test_chats_go_on_with_the_very_ids(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 9, 22, 23, 24."""
    count = 3_000 if prove else 80
    chats = await text_fuzz.Chats.start()
    exact = 0
    try:
        for seed in range(count):
            try:
                exact += await chats.run(seed)
            except Broken as error:
                raise Broken(f"seed {seed}: {error}") from error
    finally:
        await chats.chat.close()
    figure("text fuzz, chats", f"{count:,} chats right ({exact:,} turns continued exactly)")
    assert exact > count


def test_agents_match_their_history_and_deletion_leaves_nothing(
    prove: bool, figure: Callable[[str, str], None]
) -> None:
    """Known failures 31, 38: whatever is said, forked, rolled back and deleted, and whenever the power goes."""
    count = agents.run_many(0, 200 if prove else 12)
    figure("agents: schedules of turns, forks, rollbacks and deletions, equal to a plain model", f"{count}")
