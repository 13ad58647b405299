"""Reasoning budgets: the end tag is forced when the budget is used up, and nothing else changes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.frontend.request_options import RequestParams, SamplingOptions, requests
from cairn.scheduler.sequence import Matcher
from cairn.system.posix import SystemClock
from cairn.text.grammar.grammar import Shape, Structure
from cairn.types.errors import InvalidRequest
from cairn.types.outputs import FinishReason
from cairn.types.request import Grammar, OutputFormat, Request, SamplingExtras, SamplingParams
from cairn.worker.grammar_matcher import BudgetMatcher, CompiledGrammar, GrammarMatcher, Masks
from cairn.worker.grammars import Grammars, ReadyRequest
from tests.agents.house import Heard, House, hear, house, talking_model
from tests.scheduler.test_scheduler import Rig
from tests.service.tiny import VOCAB
from tests.text.text_models import QWEN_TEMPLATE
from tests.text.walks import END, byte_vocabulary, checked
from tests.worker.test_grammars import letters

TAG = b"</think>"
THINKS = OutputFormat(reasoning=True, reasoning_open=True)


def budget(tokens: int, *, opened: bool = True, inner: Matcher | None = None) -> BudgetMatcher:
    output = OutputFormat(reasoning=True, reasoning_open=opened)
    return BudgetMatcher(inner, byte_vocabulary()._replace(closes={"": tuple(TAG)}), tokens, output)


def forced(matcher: Matcher) -> int | None:
    """Return the only allowed token, or None if any is allowed."""
    pending = matcher.mask()
    if pending is None:
        return None
    mask = pending.wait()
    results = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
    assert len(results) == 1
    return results[0]


def ends_at(matcher: BudgetMatcher, said: bytes) -> int | None:
    """Return after how many tokens of `said` the end tag is forced, or None; fail if anything else is forced."""
    for at, token in enumerate(said):
        if (only := forced(matcher)) is not None:
            assert only == TAG[0]
            for byte in TAG:
                assert forced(matcher) == byte
                matcher.consume(byte)
            for other in b"<think>more and more</think>":
                assert forced(matcher) is None, "it is over"
                matcher.consume(other)
            return at
        matcher.consume(token)
    return None


@pytest.mark.parametrize(
    ("tokens", "opened", "said", "at"),
    [
        (5, True, b"I think that", 5),
        (0, True, b"I think that", 0),
        (5, True, b"abc</think>" + b"x" * 20, 5),  # within its own tag
        (11, True, b"abc</think>" + b"x" * 20, None),
        (5, False, b"<think>I think that", 12),
        (0, False, b"<think>I think that", 7),
        (5, False, b" \n<think>I think that", 14),
        (5, False, b"I answer at once. <think>I think that", None),
        (5, False, b" " * 17 + b"<think>I think that", None),  # content, as the front parses it
        (5, False, b"<thinner than that>", None),
        (2, True, "a\u20acbc".encode(), 4),  # not within a character
        (2, True, b"a\xe2\xe2\xe2\xe2\xe2", None),  # bytes that never become a character delay it only while they last
        (2, True, b"a\xe2\xe2b and so on", 4),
        (3, True, bytes([97, END & 255, 98, 99, 100]), 3),
    ],
)
def test_where_reasoning_ends(tokens: int, opened: bool, said: bytes, at: int | None) -> None:
    assert ends_at(budget(tokens, opened=opened), said) == at


def test_control_tokens_are_no_text_and_count(tokens: int = 3) -> None:
    matcher = budget(tokens, opened=False)
    for token in (END, *b"<think>", END, *b"ab"):
        assert forced(matcher) is None
        matcher.consume(token)
    assert forced(matcher) == TAG[0]


@pytest.mark.parametrize("reasoning", ["open", "may"])
def test_a_grammar_goes_on_behind_the_tag(reasoning: Any) -> None:
    vocabulary, masks = byte_vocabulary(), Masks()
    text = checked(Shape(structure=Structure(kind="regex", text="7"), reasoning=reasoning))
    inner = GrammarMatcher(CompiledGrammar(vocabulary, Grammar(text=text)), (END,), masks)
    matcher = budget(4, opened=reasoning == "open", inner=inner)
    for token in b"abcd" if reasoning == "open" else b"<think>abcd":
        pending = matcher.mask()
        assert pending is not None and len(pending.wait()) == 36 and not matcher.over
        matcher.consume(token)
    for byte in TAG:
        assert forced(matcher) == byte
        matcher.consume(byte)
    matcher.consume(ord("7"))
    assert matcher.over
    masks.close()


def test_preemption_changes_nothing() -> None:
    """There are blocks for one sequence only: the others are preempted, and each answer is the one it gets alone."""
    vocabulary = letters()._replace(closes={"": (9, 1, 8)})

    def answers(blocks: int, ids: Sequence[int], most: int | None) -> tuple[dict[int, list[int]], int]:
        rig = Rig(blocks=blocks)
        for id in ids:
            sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=id)
            made = Request(id=id, prompt=tuple(range(3, 23)), sampling=sampling, reasoning_budget=most, output=THINKS)
            matcher = None if most is None else BudgetMatcher(None, vocabulary, most, THINKS)
            rig.scheduler.add(made, matcher)
        rig.run()
        assert all(rig.finish(id) is FinishReason.LENGTH for id in ids)
        return {id: rig.tokens(id) for id in ids}, rig.scheduler.stats().preemptions

    alone = {id: answers(200, [id], 12)[0][id] for id in range(1, 5)}
    together, preemptions = answers(22, range(1, 5), 12)
    assert preemptions > 0 and together == alone
    free = answers(200, range(1, 5), None)[0]
    for id, tokens in alone.items():
        assert tokens[:12] == free[id][:12] and tokens[12:15] == [9, 1, 8]


def test_generated_tokens_count() -> None:
    """A request that is resumed elsewhere keeps its count, at every token."""
    said = b"<think>abc" + TAG + b"more"
    for cut in range(len(said)):
        here, there = budget(3, opened=False), budget(3, opened=False)
        for token in said[:cut]:
            here.consume(token)
            forced(here)
            there.consume(token)
        assert forced(here) == forced(there) == (said[cut] if 10 <= cut < 18 else None)


def test_requests_that_may_have_a_budget(spec: Any) -> None:
    def asked(value: Any, output: OutputFormat) -> int | None:
        options = SamplingOptions(reasoning_budget=value)
        (made,) = requests(spec, [1], options, RequestParams(output=output), ids=lambda: 1)
        return made.reasoning_budget

    assert asked(7, THINKS) == 7 and asked(0, THINKS) == 0
    assert asked(-1, THINKS) is None is asked(None, THINKS)
    assert asked(7, OutputFormat()) is None, "nothing is thought"
    for value, output in ((-2, THINKS), (1 << 31, THINKS), (True, THINKS), (7, OutputFormat(continues=True))):
        with pytest.raises(InvalidRequest) as caught:
            asked(value, output)
        assert caught.value.field == "reasoning_budget"


@pytest.fixture
def spec() -> Any:
    from tests.api.scripted import SPEC

    return SPEC


@contextlib.asynccontextmanager
async def thinker(folder: Path) -> AsyncIterator[House]:
    """Yield agents of a model whose prompts open the reasoning, and which never ends it."""
    talking_model(folder)
    path = folder / "tokenizer_config.json"
    opening = QWEN_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    assert opening != QWEN_TEMPLATE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": opening}))
    async with house(folder) as at:
        yield at


async def test_a_turn_that_is_resumed_keeps_its_budget(tmp_path: Path) -> None:
    """End to end: the answer is what it would be, cut at the budget, also after a crash."""
    options = SamplingOptions(temperature=1, seed=4, max_tokens=600, ignore_eos=True)
    few = SamplingOptions(temperature=1, seed=4, max_tokens=600, ignore_eos=True, reasoning_budget=20)
    async with thinker(tmp_path / "m") as at:
        for id in ("free", "whole", "cut"):
            await at.agents.create("default", id=id, messages=[{"role": "system", "content": "x"}])
        free = await at.say("free", "Think.", options=options)
        whole = await at.say("whole", "Think.", options=few)
        close = at.service.tokenizer.token_id("</think>")
        assert close is not None and close < VOCAB
        assert whole.tokens[:20] == free.tokens[:20] and whole.tokens[20] == close and len(whole.tokens) == 600
        assert len(whole.text) > len(free.text), "what follows is content"
        running = await at.begin("cut", "Think.", options=few)
        said = await hear(running, stop_after=5)
        assert len(said.tokens) >= 5
        await at.again()
        turn = at.agents.get("default", "cut")
        assert turn.state == "interrupted"
        resumed = await hear(await at.agents.resume("default", "cut", request=at.service.next_id()))
        assert resumed.tokens == whole.tokens and resumed.text == whole.text


@pytest.mark.parametrize(
    ("close", "field", "extras"),
    [
        ((), "reasoning_budget", {}),
        ((5, 6), "allowed_token_ids", {"allowed_token_ids": (1, 5)}),
        ((5, 6), "bad_words", {"bad_words": ((1, 2), (3, 6))}),
        ((5, 6), None, {"allowed_token_ids": (1, 5, 6), "bad_words": ((6, 2),)}),
    ],
)
def test_a_budget_whose_tag_cannot_come_is_refused(
    close: tuple[int, ...], field: str | None, extras: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=9, extras=SamplingExtras(**extras))
    vocabulary = byte_vocabulary()._replace(closes={"": close})
    grammars = Grammars(lambda marks: vocabulary, lambda: None, SystemClock())
    grammars.add(Request(id=1, prompt=(1,), sampling=sampling, reasoning_budget=3, output=THINKS))
    results: list[ReadyRequest] = []
    while not results:
        results = grammars.ready()
    grammars.close()
    assert (results[0].error.field if isinstance(results[0].error, InvalidRequest) else None) == field
    assert (results[0].matcher is None) == (field is not None)


async def test_the_tag_comes_whatever_else_is_asked_or_it_is_refused(tmp_path: Path) -> None:
    async with thinker(tmp_path / "m") as at:
        await at.agents.create("default", id="ada")
        close = at.service.tokenizer.token_id("</think>")
        assert close is not None

        async def ask(**more: Any) -> Heard:
            return await at.say(
                "ada", "Think.", options=SamplingOptions(max_tokens=12, ignore_eos=True, reasoning_budget=4, **more)
            )

        refused = (await ask(allowed_token_ids=[65, 66])).error
        assert isinstance(refused, InvalidRequest) and refused.field == "allowed_token_ids"
        await at.agents.rollback("default", "ada", turn=0)
        for more in ({"allowed_token_ids": [65, 66, close]}, {"bad_words": ["x"]}, {"logit_bias": {close: -100}}):
            heard = await ask(**more)
            assert heard.error is None and len(heard.tokens) == 12 and close in heard.tokens[:8], (
                more
            )  # the tag waits for the end of a character
