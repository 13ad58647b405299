"""Tokens that a grammar forces: they are appended without sampling, for the same answer in fewer steps."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.scheduler.sequence import MOST_FORCED, Matcher
from cairn.text.grammar.grammar import Shape, Structure
from cairn.text.grammar.vocabulary import GrammarTokenizer, Vocabulary
from cairn.types.errors import InvalidRequest
from cairn.types.outputs import FinishReason
from cairn.types.request import Grammar, OutputFormat, Request, SamplingExtras, SamplingParams
from cairn.types.step import Pending
from cairn.worker.grammar_matcher import BudgetMatcher, CompiledGrammar, GrammarMatcher, Masks
from tests.scheduler.test_scheduler import Rig
from tests.text.walks import checked

PIECES = (b"name", b"na", b"am", b"me", b'":', b'"', b"ab", b"abc", b"bc", b"the", b"th", b"he", b'{"', b'"}', b', "')
END = 63
GRAMMARS = (
    '"name(ab|th)e(na)?me"',
    "abc(d|e)thethe(-[a-c]{1,3}){2}name",
    "(abc|abd)(name)*",
    '\\{"name": "(the|ab)", "(e|f)": "abcabc"\\}',
    "thename",
    "[a-e]{2}namename[a-e]{2}the",
)
STEADY = tuple(SamplingExtras(mirostat=form, mirostat_tau=2.0) for form in (1, 2))
LONG = "([a-f]{2}-name){3}[a-f]{20}"


@cache
def vocabulary() -> Vocabulary:
    """Return the 64 tokens of the rig's engine: letters, some pieces of words, and one that ends an answer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [bytes([97 + i]) for i in range(26)] + [bytes([byte]) for byte in b'-{}:," '] + list(PIECES)
    tokens = list(dict.fromkeys(tokens))
    tokens += [b"\xff<|%d|>" % i for i in range(len(tokens), END)] + [b"\xff<|end|>"]
    special = [i for i, token in enumerate(tokens) if token.startswith(b"\xff")]
    wrapper = TokenizerWrapper(GrammarTokenizer(tokens, special, END, lambda text: []))
    made = Vocabulary(LLTokenizer(wrapper, eos_token=[END], slices=[]), frozenset(special))
    return made._replace(closes={"": tuple(tokens.index(bytes([byte])) for byte in b"the")})


@cache
def compiled(pattern: str) -> CompiledGrammar:
    text = checked(Shape(structure=Structure(kind="regex", text=pattern)))
    return CompiledGrammar(vocabulary(), Grammar(text=text))


class OneByOne:
    """A matcher that never reports a forced token."""

    def __init__(self, inner: Matcher) -> None:
        self.inner = inner

    @property
    def over(self) -> bool:
        return self.inner.over

    def mask(self) -> Pending[bytes] | None:
        return self.inner.mask()

    def consume(self, token: int) -> None:
        self.inner.consume(token)

    def forced(self) -> int | None:
        return None


MASKS = Masks()


def follows(request: Request, pattern: str, *, appended: bool, budget: int | None = None) -> Matcher:
    matcher: Matcher = GrammarMatcher(compiled(pattern), (END,), MASKS)
    if budget is not None:
        matcher = BudgetMatcher(matcher, vocabulary(), budget, OutputFormat(reasoning=True, reasoning_open=True))
    for token in request.generated:
        matcher.consume(token)
    return matcher if appended else OneByOne(matcher)


def made(id: int, **fields: Any) -> Request:
    sampling = SamplingParams(
        **{"max_tokens": 60, "temperature": 1.0, "seed": id, "stop_token_ids": (END,)} | fields.pop("sampling", {})
    )
    return Request(id=id, prompt=(id, 3, 4), sampling=sampling, grammar=Grammar(text="is followed"), **fields)


def answers(
    requests: Sequence[Request], patterns: Sequence[str], *, appended: bool, **limits: Any
) -> tuple[list[tuple[list[int], FinishReason | None]], Rig]:
    rig = Rig(**limits)
    for request, pattern in zip(requests, patterns, strict=True):
        rig.scheduler.add(request, follows(request, pattern, appended=appended))
    rig.run()
    assert rig.nothing_held()
    return [(rig.tokens(request.id), rig.finish(request.id)) for request in requests], rig


def some(count: int, chance: random.Random) -> tuple[list[Request], list[str]]:
    """Return requests with all kinds of options, and the pattern of each."""
    requests = [
        made(
            id,
            choice=chance.randrange(3),
            sampling={
                "max_tokens": chance.choice((1, 2, 5, 9, 60, 60)),
                "temperature": chance.choice((0.0, 1.0)),
                "repetition_penalty": chance.choice((1.0, 1.4)),
                "presence_penalty": chance.choice((0.0, 0.5)),
                "min_tokens": chance.choice((0, 0, 4)),
                "logit_bias": chance.choice(((), ((7, 3.0),))),
                "logprobs": chance.random() < 0.1,
                "seed": chance.randrange(100),
                "extras": chance.choice((None, None, *STEADY)),
            },
        )
        for id in range(1, count + 1)
    ]
    return requests, [chance.choice((*GRAMMARS, LONG, LONG, LONG)) for _ in requests]


def test_the_answer_is_the_same_in_fewer_steps() -> None:
    """In batches with too few blocks, in small steps and large ones, over layer groups with windows and states."""
    preemptions = 0
    for seed in range(6):
        chance = random.Random(seed)
        requests, patterns = some(12, chance)
        limits: dict[str, Any] = {"windows": ((0,), (0, 7), (0, -1))[seed % 3]}
        plain, rig = answers(requests, patterns, appended=False, **limits)
        pairs = zip(requests, patterns, strict=True)
        alone = [answers([one], [held], appended=True, **limits)[0][0] for one, held in pairs]
        tight = limits | {"blocks": 11, "step_tokens": (12, 64)[seed % 2]}
        together, crowded = answers(requests, patterns, appended=True, **tight)
        roomy, quick = answers(requests, patterns, appended=True, **limits)
        assert plain == alone == together == roomy
        assert sum(len(plan.rows) for plan in quick.plans) < sum(len(plan.rows) for plan in rig.plans)
        preemptions += crowded.scheduler.stats().preemptions
    assert preemptions > 1


def test_forced_tokens_are_drafted_where_they_cannot_be_appended() -> None:
    """With log-probabilities each token needs logits of its own: they are the same, in fewer steps."""
    steps, accepted = [0, 0], 0
    for pattern, seed in itertools.product((*GRAMMARS, LONG), range(4)):
        results = []
        for place, policy in enumerate((None, MeasuredPolicy(fixed=7))):
            rig = Rig(drafts=policy)
            request = made(1, sampling={"logprobs": True, "seed": seed})
            rig.scheduler.add(request, follows(request, pattern, appended=True))
            rig.run()
            assert rig.nothing_held()
            results.append([logprob for output in rig.outputs[1] for logprob in output.logprobs])
            assert [one.token for one in results[-1]] == rig.tokens(1)
            steps[place] += len(rig.plans)
            accepted += rig.scheduler.stats().accepted
        assert results[0] == results[1]
    assert steps[1] < 0.7 * steps[0] and accepted >= steps[0] - steps[1]


@pytest.mark.parametrize("pattern", GRAMMARS)
def test_a_death_anywhere_changes_nothing(pattern: str) -> None:
    """Also in the middle of a run of forced tokens: a new worker continues from what was sent."""
    request = made(1)
    ((whole, finish),), _ = answers([request], [pattern], appended=False)
    for count in range(len(whole)):
        again = made(1, generated=tuple(whole[:count]))
        ((rest, ended),), _ = answers([again], [pattern], appended=True)
        assert (whole[:count] + rest, ended) == (whole, finish)


@pytest.mark.parametrize("form", [1, 2])
def test_mirostat_goes_on_where_it_was(form: int) -> None:
    """Its state is sent with the tokens and comes back with them; without it, a resumed request cannot start anew."""
    extras = SamplingExtras(mirostat=form, mirostat_tau=1.5, mirostat_eta=0.9)
    for pattern in ("", LONG, GRAMMARS[0]):

        def rigged(request: Request, held: str = pattern) -> Rig:
            rig = Rig()
            rig.scheduler.add(request, follows(request, held, appended=True) if held else None)
            rig.run()
            return rig

        sampling = {"extras": extras, "max_tokens": 25}
        rig = rigged(made(1, sampling=sampling))
        whole, said = rig.tokens(1), list[int]()
        for output in rig.outputs[1][:-1]:
            said += output.tokens
            assert output.mu is not None
            again = rigged(made(1, sampling=sampling, generated=tuple(said), mu=output.mu))
            assert said + again.tokens(1) == whole
        with pytest.raises(InvalidRequest, match="mirostat"):
            rigged(made(1, sampling=sampling, generated=tuple(whole[:1])))


@pytest.mark.parametrize("pattern", GRAMMARS)
def test_a_limit_within_a_run_cuts_it_there(pattern: str) -> None:
    ((whole, _),), _ = answers([made(1)], [pattern], appended=False)
    for most in range(1, len(whole) + 1):
        cut, _ = answers([made(1, sampling={"max_tokens": most})], [pattern], appended=True)
        assert cut == answers([made(1, sampling={"max_tokens": most})], [pattern], appended=False)[0]
        assert len(cut[0][0]) == most


def test_the_context_ends_within_a_run() -> None:
    for context in range(4, 9):
        cut, _ = answers([made(1)], ["thenamethenamethename"], appended=True, context=context)
        plain, _ = answers([made(1)], ["thenamethenamethename"], appended=False, context=context)
        assert cut == plain and cut[0][1] is FinishReason.LENGTH


def test_an_answer_without_any_choice_takes_no_step() -> None:
    ((tokens, finish),), rig = answers([made(1)], ["thename"], appended=True)
    assert finish is FinishReason.STOP and not any(plan.rows for plan in rig.plans)
    assert [tokens] == [answers([made(1)], ["thename"], appended=False)[0][0][0]]
    report = rig.outputs[1][0].cache
    assert report is not None and (report.computed, report.cached, report.miss) == (0, len(made(1).prompt), None)


def test_any_of_several_tokens_ends_an_answer_and_only_where_the_grammar_may_end() -> None:
    """As in Llama 3, where one token ends messages and another turns; a third control token never comes."""
    other, ends = END - 1, set()
    for appended in (False, True):
        for seed in range(60):
            rig = Rig()
            request = made(1, sampling={"stop_token_ids": (other, END), "seed": seed})
            matcher: Matcher = GrammarMatcher(compiled("name(ab)*"), (other, END), MASKS)
            rig.scheduler.add(request, matcher if appended else OneByOne(matcher))
            rig.run()
            *said, end = rig.tokens(1)
            ends.add(end)
            text = vocabulary().tokenizer.decode_bytes(said)
            assert re.fullmatch(rb"name(ab)*", text) and rig.finish(1) is FinishReason.STOP, text
    assert ends == {other, END}


def test_a_long_run_is_appended_in_parts() -> None:
    """Long runs are processed in parts."""
    text = "abcdefghij" * 12
    (one,), rig = answers([made(1, sampling={"max_tokens": 300})], [text], appended=True)
    assert (one,) == tuple(answers([made(1, sampling={"max_tokens": 300})], [text], appended=False)[0])
    added = [len(output.tokens) for output in rig.outputs[1]]
    assert max(added) <= 2 * MOST_FORCED + 1 and len(rig.plans) < 6


def test_looking_for_forced_tokens_takes_bounded_time_of_a_step() -> None:
    """The clock advances with every look. Tokens for which no time is left are sampled, and the answer is the same."""
    plain, slow = answers([made(1)], [GRAMMARS[1]], appended=True), Rig()
    now = itertools.count()
    slow.clock.now = lambda: next(now) * 0.002  # type: ignore[method-assign]
    slow.scheduler.add(made(1), follows(made(1), GRAMMARS[1], appended=True))
    slow.run()
    assert [(slow.tokens(1), slow.finish(1))] == plain[0]
    assert len(plain[1].plans) < len(slow.plans) and max(len(one.tokens) for one in slow.outputs[1]) in (2, 3, 4)


def test_log_probabilities_are_those_of_every_token() -> None:
    request = made(1, sampling={"logprobs": True, "top_logprobs": 2})
    results = [answers([request], [GRAMMARS[0]], appended=appended)[1].outputs[1] for appended in (False, True)]
    scores = [[score for output in outputs for score in output.logprobs] for outputs in results]
    tokens = [[token for output in outputs for token in output.tokens] for outputs in results]
    assert scores[0] == scores[1] and [score.token for score in scores[0]] == tokens[0] == tokens[1]


def test_a_grammar_without_an_allowed_token_ends_with_an_error() -> None:
    """The sampler reports it, not the grammar."""
    extras = SamplingExtras(allowed_token_ids=(1, 2, 3))
    request = made(1, sampling={"extras": extras})
    results = [answers([request], ["thename"], appended=appended)[0] for appended in (False, True)]
    assert results[0] == results[1] and results[0][0][1] is FinishReason.ERROR


def test_the_end_of_a_budget_is_appended() -> None:
    """The tag that ends reasoning is the only allowed continuation."""
    results = []
    for appended in (False, True):
        rig = Rig()
        request = made(1)
        matcher = follows(request, "[a-z]{3,12}(the)?namename", appended=appended, budget=2)
        rig.scheduler.add(request, matcher)
        rig.run()
        results.append((rig.tokens(1), rig.finish(1), len(rig.plans)))
    assert results[0][:2] == results[1][:2] and results[1][2] < results[0][2]


def test_a_run_is_what_the_masks_say_one_by_one() -> None:
    """Tokenizing a forced text as a whole may differ from tokenizing it token by token, which is what counts."""
    for pattern, seed in itertools.product(GRAMMARS, range(4)):
        chance = random.Random(seed)
        matcher = GrammarMatcher(compiled(pattern), (END,), MASKS)
        while not matcher.over:
            forced = matcher.forced()
            mask = matcher.mask().wait()
            may = [token for token in range(64) if mask[token >> 3] >> (token & 7) & 1]
            assert forced is None or may == [forced]
            token = chance.choice(may)
            if token == END:
                break
            matcher.consume(token)
