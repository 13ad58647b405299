"""The fake engine follows its contract: every answer depends on all that it should, and bad calls are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cairn.engine.fake import STATE, FakeEngine, fake_spec
from cairn.engine.row_results import sample
from cairn.types.request import SamplingParams
from cairn.types.step import NO_BLOCK, Row

PROMPT = list(range(7, 30))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def engine(windows: tuple[int, ...] = (0, 6), **options: object) -> FakeEngine:
    return FakeEngine(fake_spec(64, 100, windows), blocks=20, block_tokens=4, **options)  # type: ignore[arg-type]


def tables(first: int, count: int, groups: int = 2) -> tuple[list[int], ...]:
    return tuple([first + number + 2 * block for block in range(count)] for number in range(groups))


def row(tokens: list[int], start: int, end: int, where: tuple[list[int], ...], logits_from: int | None = -1) -> Row:
    wanted = end - 1 if logits_from == -1 else logits_from
    return Row(tokens, start, end, where, wanted, len(PROMPT), GREEDY, 0)


def next_token(fake: FakeEngine, it: Row) -> int | None:
    return fake.prefill([it]).wait()[0].token


@pytest.mark.parametrize("windows", [(0,), (0, 6), (5, 0, 9), (4,), (STATE,), (0, STATE), (STATE, 7, 0)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_any_chunking_gives_what_the_oracle_says(windows: tuple[int, ...], chunk: int) -> None:
    fake = engine(windows)
    tokens, where = list(PROMPT), tables(0, 8, len(windows))
    truth = fake.oracle(PROMPT, GREEDY, 6)
    start = 0
    while len(tokens) < len(PROMPT) + 6:
        end = min(len(tokens), start + chunk)
        token = next_token(fake, row(tokens, start, end, where, end - 1 if end == len(tokens) else None))
        start = end
        if token is not None:
            tokens.append(token)
    assert tokens[len(PROMPT) :] == truth


def test_a_batch_is_what_each_row_is_alone() -> None:
    batch, rows = engine(), []
    for index in range(3):
        tokens = PROMPT[index:]
        rows.append(row(tokens, 0, len(tokens), tuple([index * 6 + b for b in range(6)] for _ in range(2))))
    together = batch.prefill(rows).wait()
    assert [result.token for result in together] == [next_token(engine(), it) for it in rows]


def broken_table(it: Row, number: int, index: int, block: int) -> Row:
    where = tuple(list(table) for table in it.tables)
    where[number][index] = block
    return Row(it.tokens, it.start, it.end, where, it.logits_from, it.prompt_len, it.sampling, it.choice)


@pytest.mark.parametrize(("number", "index"), [(0, 0), (0, 2), (0, 5), (1, 4), (1, 5)])
def test_a_wrong_block_changes_the_answer(number: int, index: int) -> None:
    """Known failures 9, 17."""
    fake, good = engine(), engine()
    where = tables(0, 6)
    for it in (fake, good):
        it.prefill([row(PROMPT, 0, 22, where, None)])
    last = row(PROMPT, 22, 23, where)
    fake_logits = fake._states([(broken_table(last, number, index, 19), 22)])
    assert fake_logits != good._states([(last, 22)])
    assert next_token(good, last) == fake.oracle(PROMPT, GREEDY, 1)[0]


def test_the_window_limits_what_is_read() -> None:
    fake = engine((6,))
    tokens, other = list(PROMPT), [1, *PROMPT[1:]]
    where = tables(0, 6, 1)
    fake.prefill([row(tokens, 0, 22, where, None)])
    hidden = (([NO_BLOCK] * 4 + where[0][4:]),)
    assert next_token(fake, row(tokens, 22, 23, hidden)) == fake.oracle(PROMPT, GREEDY, 1)[0]
    # The digests still cover the whole prefix: another first token gives another answer.
    assert (fake.oracle_logits(tokens)[-1] != fake.oracle_logits(other)[-1]).any()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kv: kv[0].__setitem__((0, 0), 1),
        lambda kv: kv[0].__setitem__((8, 3), 1),
        lambda kv: kv[1].__setitem__((9, 2), 1),
    ],
)
def test_a_stale_slot_changes_the_answer(spoil: Callable[[list[np.ndarray]], None]) -> None:
    fake, good = engine(), engine()
    for it in (fake, good):
        it.prefill([row(PROMPT, 0, 22, tables(0, 6), None)])
    spoil(fake._kv)
    last = row(PROMPT, 22, 23, tables(0, 6))
    assert fake._states([(last, 22)]) != good._states([(last, 22)])


def test_a_page_can_be_read_and_written_back_elsewhere() -> None:
    fake, other = engine(), engine()
    fake.prefill([row(PROMPT, 0, 22, tables(0, 6), None)])
    moved = tables(4, 6)
    for number in range(2):
        pages = fake.read_blocks(number, tables(0, 6)[number]).wait()
        assert [page.nbytes for page in pages] == [fake.info.block_bytes[number]] * 6
        other.write_blocks(number, moved[number], pages).wait()
    assert next_token(other, row(PROMPT, 22, 23, moved)) == fake.oracle(PROMPT, GREEDY, 1)[0]


def test_logits_of_a_prompt_are_the_oracles() -> None:
    fake = engine()
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True, top_logprobs=3)
    result = fake.prefill([Row(PROMPT, 0, 23, tables(0, 6), 0, 23, scored, 0)]).wait()[0]
    truth = sample([Row(PROMPT, 0, 23, (), 0, 23, scored, 0)], fake.oracle_logits(PROMPT))[0]
    assert result == truth
    assert len(result.prompt_logprobs) == 22


def test_the_oracle_knows_seeds_choices_penalties_and_stops() -> None:
    fake = engine()
    warm = SamplingParams(max_tokens=30, temperature=1.0, seed=5, repetition_penalty=1.3)
    first = fake.oracle(PROMPT, warm, 30)
    assert first == fake.oracle(PROMPT, warm, 30)
    assert first != fake.oracle(PROMPT, warm, 30, choice=1)
    stop = SamplingParams(max_tokens=30, temperature=1.0, seed=5, repetition_penalty=1.3, stop_token_ids=(first[3],))
    assert fake.oracle(PROMPT, stop, 30) == first[: first.index(first[3]) + 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(PROMPT, 3, 3, tables(0, 6)), "cannot compute"),
        (row(PROMPT, 0, 24, tables(0, 6)), "cannot compute"),
        (row(PROMPT, 0, 23, tables(0, 5)), "block table"),
        (row(PROMPT, 0, 23, ([0, 1, 2, NO_BLOCK, 4, 5], [6, 7, 8, 9, 10, 11])), "block table"),
        (row(PROMPT, 4, 8, tables(0, 6), 2), "outside the row"),
    ],
)
def test_rows_that_break_the_contract_are_refused_and_nothing_is_written(bad: Row, message: str) -> None:
    fake = engine()
    before = [kv.copy() for kv in fake._kv]
    with pytest.raises(ValueError, match=message):
        fake.prefill([bad])
    assert all((a == b).all() for a, b in zip(before, fake._kv, strict=True))


def test_two_rows_may_not_write_one_block() -> None:
    it = row(PROMPT, 0, 4, tables(0, 6), None)
    with pytest.raises(ValueError, match="same block"):
        engine().prefill([it, row(PROMPT[::-1], 0, 4, tables(0, 6), None)])


def test_limits_of_a_call() -> None:
    with pytest.raises(ValueError, match="more rows or tokens"):
        engine(max_tokens=22).prefill([row(PROMPT, 0, 23, tables(0, 6))])
    with pytest.raises(ValueError, match="exactly one token"):
        engine().decode([row(PROMPT, 0, 2, tables(0, 6), None)])


def test_a_step_can_pretend_to_take_time() -> None:
    slept: list[float] = []
    fake = engine(step_seconds=0.25, sleep=slept.append)
    fake.prefill([row(PROMPT, 0, 23, tables(0, 6))])
    fake.prefill([row(PROMPT, 22, 23, tables(0, 6))])
    assert slept == [0.25, 0.25]


def test_pool_sizes_fit_the_groups() -> None:
    with pytest.raises(ValueError, match="pool sizes"):
        FakeEngine(fake_spec(windows=(0, 6)), blocks=(4,))
    with pytest.raises(ValueError, match="one position"):
        FakeEngine(fake_spec(windows=(1,)), blocks=4)


def test_another_model_has_another_identity() -> None:
    """Known failure 28."""
    identities = {FakeEngine(fake_spec(vocab, 100, windows), blocks=4).info.identity for vocab, windows in
                  ((64, (0,)), (65, (0,)), (64, (0, 6)), (64, (0, 7)))}  # fmt: skip
    assert len(identities) == 4


def states(*blocks: int) -> tuple[list[int]]:
    return (list(blocks),)


def test_a_state_is_left_at_the_end_of_a_row_and_wherever_the_table_has_a_block() -> None:
    fake = engine((STATE,))
    no = NO_BLOCK
    fake.prefill([row(PROMPT, 0, 22, states(no, 7, no, no, 8, 9), None)])
    others = {number: engine((STATE,)) for number in (8, 20, 22)}
    for end, other in others.items():  # blocks of 4: those after 8, 20 and 22 tokens
        other.prefill([row(PROMPT, 0, end, states(*[no] * ((end - 1) // 4), 3), None)])
    for block, end in ((7, 8), (8, 20), (9, 22)):
        assert fake._kv[0][block] == others[end]._kv[0][3]
    truth = fake.oracle(PROMPT, GREEDY, 1)[0]
    for start, table in ((8, (no, 7, no, no, no, 11)), (20, (no, no, no, no, 8, 12)), (22, (no, no, no, no, no, 9))):
        assert next_token(fake, row(PROMPT, start, 23, states(*table))) == truth


def test_another_state_changes_the_answer() -> None:
    fake = engine((STATE,))
    fake.prefill([row(PROMPT, 0, 22, states(-1, -1, -1, 4, 5, 6), None)])
    truth = fake.oracle(PROMPT, GREEDY, 1)[0]
    assert [next_token(fake, row(PROMPT, 20, 23, states(-1, -1, -1, -1, at, 7))) == truth for at in (5, 4)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("start", "table", "why"),
    [
        (20, (-1, -1, -1, -1, -1, 3), "lacks the state"),
        (20, (-1, -1, -1, -1, 3, -1), "lacks the state"),
        (22, (-1, -1, -1, -1, 3, -1), "lacks the state"),
        (0, (3, 3, 3, 3, 3), "lacks the state"),
        (20, (-1, -1, -1, -1, 3, 3), "writes over a state that is read"),
    ],
)
def test_a_table_without_the_states_that_a_row_needs_is_refused(start: int, table: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        engine((STATE,)).prefill([row(PROMPT, start, 23, states(*table))])


def test_a_state_that_one_row_reads_is_written_by_no_other() -> None:
    fake = engine((STATE,))
    reads, writes = row(PROMPT, 20, 23, states(-1, -1, -1, -1, 3, 4)), row(PROMPT[::-1], 0, 3, states(3))
    with pytest.raises(ValueError, match="writes over a state that is read"):
        fake.prefill([reads, writes])
