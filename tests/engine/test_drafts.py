"""Rows that end with guesses, and rows whose token the step before samples, give the tokens of single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.engine.fake import STATE, FakeEngine, fake_spec
from cairn.types.request import SamplingExtras, SamplingParams
from cairn.types.step import NO_TOKEN, Ready, Row, RowResult
from tests.recurrent_models import RECURRENT
from tests.tiny_models import GREEDY, KERNELS, load, prompt, write_model

START = 21
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=9, temperature=1.1, seed=7, top_k=30, logprobs=True, top_logprobs=2),
    "with a history": SamplingParams(
        max_tokens=9, temperature=0.8, seed=8, repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.3
    ),
    "at least so many": SamplingParams(
        max_tokens=9, temperature=1.4, seed=3, min_tokens=START + 3, stop_token_ids=tuple(range(0, 160, 2))
    ),
    "with extras": SamplingParams(
        max_tokens=9, temperature=1.2, seed=5, extras=SamplingExtras(dry_multiplier=0.8, xtc_probability=0.5)
    ),
}


@pytest.fixture(params=["fake", *KERNELS])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    def make() -> Any:
        if request.param == "fake":
            return FakeEngine(fake_spec(vocab=160), blocks=64)
        return load(write_model(tmp_path), kernels=request.param, step_tokens=64)

    return make


def stepwise(engine: Any, tokens: list[int], count: int, table: list[int], sampling: SamplingParams) -> list[RowResult]:
    known, start, results = list(tokens), 0, list[RowResult]()
    for _ in range(count):
        row = Row(list(known), start, len(known), (table,), len(known) - 1, 1, sampling, 0)
        (result,) = engine.prefill([row]).wait()
        start = len(known)
        known.append(result.token)
        results.append(result)
    return results


@pytest.mark.parametrize("name", SAMPLINGS)
def test_right_guesses_give_the_tokens_and_the_kv_of_single_steps(open_engine: Any, name: str) -> None:
    """Each place draws by its own position and history, whatever the row's length."""
    engine, sampling, tokens = open_engine(), SAMPLINGS[name], prompt(START)
    own, other = list(range(4)), list(range(4, 8))
    single = stepwise(engine, tokens, 6, own, sampling)
    guesses = [result.token for result in single[:5]]
    engine.prefill([Row(tokens, 0, START - 1, (other,), None, 1, sampling, 0)]).wait()
    known = [*tokens, *guesses]
    drafted = Row(known, START - 1, len(known), (other,), START - 1, 1, sampling, 0, draft=5)
    beside = Row(prompt(9, seed=4), 0, 9, ([9],), 8, 9, sampling, 3)
    (alone,) = engine.prefill([beside]).wait()
    result, neighbour = engine.prefill([drafted, beside]).wait()
    assert [msgspec.structs.replace(result, more=()), *result.more] == single
    assert neighbour == alone
    pages = [[bytes(page) for page in engine.read_blocks(0, table[:1]).wait()] for table in (own, other)]
    assert pages[0] == pages[1]
    engine.close()


def test_slots_after_a_wrong_guess_are_overwritten(open_engine: Any) -> None:
    engine, tokens = open_engine(), prompt(START)
    own, other = list(range(4)), list(range(4, 8))
    single = stepwise(engine, tokens, 6, own, GREEDY)
    right = [result.token for result in single]
    wrong = [*right[:2], (right[2] + 1) % 160, *right[3:5]]
    row = Row([*tokens, *wrong], 0, START + 5, (other,), START - 1, 1, GREEDY, 0, draft=5)
    (result,) = engine.prefill([row]).wait()
    assert [result.token, *(one.token for one in result.more[:2])] == right[:3], "up to the first wrong one"
    known, start = [*tokens, *right[:3]], START + 2
    for expected in right[3:]:
        (result,) = engine.prefill([Row(list(known), start, len(known), (other,), start, 1, GREEDY, 0)]).wait()
        assert result.token == expected
        start = len(known)
        known.append(expected)
    engine.close()


def test_scored_places_stand_before_the_drawn_ones(open_engine: Any) -> None:
    engine, tokens = open_engine(), prompt(START)
    table, scored = list(range(4)), SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=True)
    plain = Row(tokens, 0, START, (table,), 5, START, scored, 0)
    (expected,) = engine.prefill([plain]).wait()
    known = [*tokens, expected.token, 3]
    (result,) = engine.prefill([Row(known, 0, START + 2, (table,), 5, START, scored, 0, draft=2)]).wait()
    assert (result.token, result.prompt_logprobs) == (expected.token, expected.prompt_logprobs)
    assert len(result.more) == 2 and len(result.prompt_logprobs) == START - 6
    engine.close()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_pending_token_is_that_of_its_row_of_the_step_before(open_engine: Any, name: str) -> None:
    """Rows are numbered anew in each step, so two of them change places here."""
    engine, sampling, prompts = open_engine(), SAMPLINGS[name], (prompt(START), prompt(START, seed=2))
    single = [stepwise(engine, tokens, 4, list(range(4)), sampling) for tokens in prompts]
    tables = list(range(4)), list(range(4, 8))
    rows = [
        Row(tokens, 0, START, (table,), START - 1, 1, sampling, 0)
        for tokens, table in zip(prompts, tables, strict=True)
    ]
    order, known = [0, 1], [list(tokens) for tokens in prompts]
    for at in range(4):
        results = engine.prefill(rows).wait()
        for place, sequence in enumerate(order):
            assert results[place] == single[sequence][at]
        before, order = order, order[::-1]
        rows = []
        for sequence in order:
            start = START + at
            rows.append(
                Row(list(known[sequence]), start, start + 1, (tables[sequence],), start, 1, sampling, 0,
                    pending=before.index(sequence))
            )  # fmt: skip
        for sequence in order:
            known[sequence].append(single[sequence][at].token)
    engine.close()


def test_a_token_that_never_came_is_an_error_of_its_row_alone(open_engine: Any) -> None:
    engine, tokens = open_engine(), prompt(START)
    first = Row(tokens, 0, START, (list(range(4)),), None, 1, GREEDY, 0)
    other = Row(tokens, 0, START, (list(range(4, 8)),), START - 1, 1, GREEDY, 0)
    engine.prefill([first, other]).wait()
    going = [
        Row(tokens, START, START + 1, (list(range(4)),), START, 1, GREEDY, 0, pending=0),
        Row(tokens, START, START + 1, (list(range(4, 8)),), START, 1, GREEDY, 0, pending=1),
        Row(tokens, START, START + 1, (list(range(8, 12)),), START, 1, GREEDY, 0, pending=7),
    ]
    lost, kept, beyond = engine.prefill(going).wait()
    assert lost == beyond == RowResult(error=NO_TOKEN)
    assert kept.token is not None and not kept.error
    engine.close()


def test_a_refused_step_has_no_effect(open_engine: Any) -> None:
    engine, tokens = open_engine(), prompt(START)
    engine.prefill([Row(tokens, 0, START, (list(range(4)),), START - 1, 1, GREEDY, 0)]).wait()
    going = Row(tokens, START, START + 1, (list(range(4)),), START, 1, GREEDY, 0, pending=0)
    with pytest.raises(ValueError):
        engine.prefill([msgspec.structs.replace(going, tables=([-1, -1],))])
    (after,) = engine.prefill([going]).wait()
    assert after.token == stepwise(engine, tokens, 2, list(range(4, 8)), GREEDY)[1].token
    engine.close()


@pytest.mark.parametrize(
    "broken",
    [
        {"draft": 9},
        {"draft": -1},
        {"draft": 2, "end": START - 1},
        {"draft": 2, "logits_from": START - 1},
        {"draft": 2, "logits_from": None},
        {"draft": 2, "want": "hidden"},
        {"draft": 2, "mask": Ready(b"")},
        {"pending": 0},
        {"pending": 0, "draft": 1, "start": START - 1, "logits_from": START - 1},
    ],
)
def test_broken_guesses_are_refused(open_engine: Any, broken: dict[str, Any]) -> None:
    engine = open_engine()
    row = Row(prompt(START), START - 8, START, (list(range(4)),), START - 8, 1, GREEDY, 0)
    if broken.get("draft", 0) == 9:
        broken = {**broken, "draft": START}
    with pytest.raises(ValueError):
        engine.prefill([msgspec.structs.replace(row, **broken)])
    engine.close()


@pytest.mark.parametrize("kind", ["fake", *KERNELS])
def test_a_copied_state_goes_on_as_if_nothing_had_been_guessed(kind: str, tmp_path: Path) -> None:
    """A state is updated in place; after a wrong guess only a copy can bring back the one before."""
    if kind == "fake":
        engine: Any = FakeEngine(fake_spec(vocab=160, windows=(0, STATE)), blocks=32)
    else:
        engine = load(write_model(tmp_path, **RECURRENT["qwen 3.5"]), kernels=kind, step_tokens=64)
    state = next(number for number, group in enumerate(engine.info.groups) if group.kind == "state")
    own, other, spare = list(range(3)), list(range(3, 6)), 7
    tokens, tables = prompt(START), tuple(own for _ in engine.info.groups)
    (first,) = engine.prefill([Row(tokens, 0, START, tables, START - 1, 1, GREEDY, 0)]).wait()
    known = [*tokens, first.token]
    expected = stepwise_with(engine, tokens, 4, tuple(other for _ in engine.info.groups))
    engine.copy_blocks(state, [(own[START // 16], spare)]).wait()
    wrong = [*known, (expected[1].token + 1) % 160, 5, 6]
    row = Row(wrong, START, START + 4, tables, START, 1, GREEDY, 0, draft=3)
    (result,) = engine.prefill([row]).wait()
    assert result.token == expected[1].token
    engine.copy_blocks(state, [(spare, own[START // 16])]).wait()
    again = [*known, expected[1].token]
    (after,) = engine.prefill([Row(again, START, START + 2, tables, START + 1, 1, GREEDY, 0)]).wait()
    assert after.token == expected[2].token
    engine.close()


def stepwise_with(engine: Any, tokens: list[int], count: int, tables: tuple[list[int], ...]) -> list[RowResult]:
    known, start, results = list(tokens), 0, list[RowResult]()
    for _ in range(count):
        row = Row(list(known), start, len(known), tables, len(known) - 1, 1, GREEDY, 0)
        (result,) = engine.prefill([row]).wait()
        start = len(known)
        known.append(result.token)
        results.append(result)
    return results
