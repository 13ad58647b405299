"""Grammars in the worker: answers follow them through preemption, a worker's death and every other event."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.scheduler.sequence import Matcher
from cairn.system.posix import SystemClock
from cairn.text.grammar.call_grammar import Offered, lark_of_calls
from cairn.text.grammar.grammar import LIMITS, Shape, Structure
from cairn.text.grammar.vocabulary import GrammarTokenizer, Vocabulary, compile_grammar
from cairn.text.output.call_formats import BY_NAME
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import DeadlineExceeded, InvalidRequest
from cairn.types.outputs import FinishReason
from cairn.types.request import Grammar, Request, SamplingParams
from cairn.worker import grammar_matcher
from cairn.worker.grammar_matcher import CompiledGrammar, GrammarMatcher, Masks
from cairn.worker.grammars import Grammars, ReadyRequest, read_vocabulary
from tests.scheduler.test_scheduler import Rig
from tests.service import tiny
from tests.text import text_models
from tests.text.walks import END, byte_vocabulary, checked


def grammar(kind: Any, text: str, reasoning: Any = "") -> str:
    return checked(Shape(structure=Structure(kind=kind, text=text), reasoning=reasoning))


AB = grammar("regex", "(ab)+")
DIGITS = grammar("regex", "[0-9]{3}")


def request(text: str = AB, id: int = 1, *, bytes: int = 0, growth: int = 0, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(END,))
    grammar = Grammar(text=text, bytes=bytes, growth=growth)
    return Request(id=id, prompt=(1,), sampling=sampling, grammar=grammar, **fields)


class Site:
    """Grammars over a vocabulary of bytes."""

    def __init__(self, vocabulary: Any = byte_vocabulary) -> None:
        self.woken = 0
        self.read = 0
        self._vocabulary = vocabulary
        self.grammars = Grammars(self._read, self._wake, SystemClock())

    def _read(self, marks: tuple[str, ...]) -> Vocabulary:
        self.read += 1
        return self._vocabulary()  # type: ignore[no-any-return]

    def _wake(self) -> None:
        self.woken += 1

    def ready(self, count: int = 1) -> list[ReadyRequest]:
        results: list[ReadyRequest] = []
        deadline = time.monotonic() + 20
        while len(results) < count and time.monotonic() < deadline:
            results += self.grammars.ready()
            time.sleep(0.001)
        return results

    def matcher(self, text: str = AB, **fields: Any) -> Matcher:
        self.grammars.add(request(text, **fields))
        (one,) = self.ready()
        assert one.matcher is not None, one.error
        return one.matcher


@pytest.fixture
def site() -> Any:
    made = Site()
    yield made
    made.grammars.close()


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask().wait()
    return {token for token in range(257) if mask[token >> 3] >> (token & 7) & 1}


def test_a_mask_has_the_allowed_tokens_and_the_end(site: Site) -> None:
    matcher = site.matcher()
    assert allowed(matcher) == {ord("a")}
    matcher.consume(ord("a"))
    assert allowed(matcher) == {ord("b")}
    matcher.consume(ord("b"))
    assert allowed(matcher) == {ord("a"), END} and not matcher.over
    matcher = site.matcher(DIGITS)
    for digit in b"123":
        assert not matcher.over
        matcher.consume(digit)
    assert matcher.over, "nothing can follow"


def test_generated_tokens_are_consumed_and_copies_are_independent(site: Site) -> None:
    first, second = site.matcher(), site.matcher(id=2, generated=tuple(b"aba"))
    assert allowed(first) == {ord("a")} and allowed(second) == {ord("b")}
    assert site.read == 1, "the vocabulary is read once"


def test_a_disallowed_token_disables_the_matcher(site: Site) -> None:
    matcher = site.matcher()
    matcher.consume(ord("x"))
    assert matcher.mask().wait() == b"" and not matcher.over


def test_only_the_requests_own_ends_end_it(site: Site) -> None:
    plain = request()
    sampling = msgspec.structs.replace(plain.sampling, stop_token_ids=(ord("a"),))
    site.grammars.add(msgspec.structs.replace(plain, sampling=sampling, generated=tuple(b"ab")))
    (one,) = site.ready()
    assert one.matcher is not None and allowed(one.matcher) == {ord("a")}


def test_a_grammar_that_does_not_compile_refuses_its_request_alone(site: Site) -> None:
    site.grammars.add(request("start: nothing"))
    site.grammars.add(request(id=2))
    results = {one.request.id: one for one in site.ready(2)}
    assert isinstance(results[1].error, InvalidRequest) and results[2].error is None
    assert not site.grammars.pending


def test_a_vocabulary_that_cannot_be_read_is_an_error_of_the_request() -> None:
    def broken() -> Any:
        raise OSError("gone")

    site = Site(broken)
    site.grammars.add(request())
    (one,) = site.ready()
    assert one.error is not None and "gone" in str(one.error)
    site.grammars.close()


def test_a_dropped_request_does_not_return(site: Site) -> None:
    site.grammars.add(request())
    assert site.grammars.pending
    site.grammars.drop(1)
    site.grammars.drop(7)
    assert not site.grammars.pending and site.grammars.ready() == []
    site.grammars.add(request(id=2, timeout=100.0))
    (one,) = site.ready()
    assert one.request.timeout is not None and 99 < one.request.timeout < 100
    assert site.woken >= 1


def test_a_preempted_answer_continues_within_its_grammar() -> None:
    """There are blocks for one sequence only: the others are preempted, and each answer is the one it gets alone."""
    vocabulary, masks = letters(), Masks()
    text = grammar("regex", "([a-f]{2}-){4}[a-f]{9}")

    def matcher(made: Request) -> Matcher:
        return GrammarMatcher(CompiledGrammar(vocabulary, Grammar(text=text)), (), masks)

    def answers(blocks: int, ids: range) -> tuple[dict[int, list[int]], int]:
        rig = Rig(blocks=blocks)
        for id in ids:
            sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=id)
            made = Request(id=id, prompt=tuple(range(3, 23)), sampling=sampling, grammar=Grammar(text=text))
            rig.scheduler.add(made, matcher(made))
        rig.run()
        assert all(rig.finish(id) is FinishReason.STOP for id in ids)
        return {id: rig.tokens(id) for id in ids}, rig.scheduler.stats().preemptions

    alone = {id: answers(200, range(id, id + 1))[0][id] for id in range(1, 5)}
    together, preemptions = answers(22, range(1, 5))
    assert preemptions > 0 and together == alone
    assert all(len(tokens) == 21 and tokens[2] == tokens[5] == 1 for tokens in alone.values())
    masks.close()


def letters() -> Vocabulary:
    """Return the 64 tokens of the rig's engine: 1 is a dash, letters follow from 2 on."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [b"\xff<|0|>", b"-", *(bytes([97 + i]) for i in range(26))]
    tokens += [b"\xff<|%d|>" % i for i in range(len(tokens), 64)]
    special = [0, *range(28, 64)]
    wrapper = TokenizerWrapper(GrammarTokenizer(tokens, special, 0, lambda text: []))
    return Vocabulary(LLTokenizer(wrapper, eos_token=[0], slices=[]), frozenset(special))


def test_the_vocabulary_of_a_model(tmp_path: Any) -> None:
    """Text is bytes, reasoning tags are text, and other control tokens are not."""
    folder = tiny.make_model(tmp_path / "m")
    tokenizer = Tokenizer.load(folder)
    vocabulary = read_vocabulary(folder, None, tiny.VOCAB, (tokenizer.token_id("<|im_end|>") or 0,))
    assert vocabulary.tokenizer.decode_bytes(tokenizer.encode("h\u00e9 {")) == "h\u00e9 {".encode()
    think = tokenizer.token_id("<think>")
    assert think is not None and vocabulary.tokenizer.decode_bytes([think]) == b"<think>"
    controls = {tokenizer.token_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert vocabulary.controls >= controls and think not in vocabulary.controls
    assert tokenizer.token_id("<|im_end|>") in vocabulary.tokenizer.eos_tokens


@pytest.mark.parametrize(
    ("reasoning", "good", "bad"),
    [
        ("", ["7"], ["<think>a</think>7", "", "77"]),
        (
            "may",
            ["7", "<think>a</think>7", "<think>\nx\n</think>\n\n7"],
            ["<think>a7", "a</think>7", "<think></think>"],
        ),
        ("open", ["a</think>7", "</think>\n\n7", "{<x></think>7"], ["7", "a</think>", "a</think>8"]),
    ],
)
def test_reasoning_may_stand_before_what_is_wanted(reasoning: Any, good: list[str], bad: list[str]) -> None:
    from tests.text.walks import accepts

    text = grammar("json", json.dumps({"const": 7}), reasoning)
    assert all(accepts(text, one) for one in good), good
    assert not any(accepts(text, one) for one in bad), bad


def test_random_company_changes_no_mask(site: Site) -> None:
    """Masks are computed in threads, by copies of one matcher."""
    rng = random.Random(3)
    matchers = [site.matcher(id=id) for id in range(8)]
    said = [b"" for _ in matchers]
    for _ in range(40):
        pending = [matcher.mask() for matcher in matchers]
        for number, one in enumerate(pending):
            mask = one.wait()
            expected = {ord("b")} if len(said[number]) % 2 else {ord("a")} | ({END} if said[number] else set())
            assert {token for token in range(257) if mask[token >> 3] >> (token & 7) & 1} == expected
            if rng.random() < 0.7:
                token = b"b" if len(said[number]) % 2 else b"a"
                matchers[number].consume(token[0])
                said[number] += token


def test_a_tag_that_is_a_token_is_forced_as_that_token(tmp_path: Path) -> None:
    """Spelled in letters, the model would not recognise it."""
    folder = text_models.write_model(tmp_path / "m", text_models.byte_level(), text_models.QWEN_CONFIG)
    tokenizer = Tokenizer.load(folder)
    vocabulary = read_vocabulary(folder, None, tokenizer.largest_id + 1, sorted(tokenizer.end_ids))
    tools = [Offered("f", {"type": "object", "properties": {}, "additionalProperties": False})]
    calls = lark_of_calls(BY_NAME["hermes"], tools, required=True, parallel=False)
    matcher = compile_grammar(vocabulary.tokenizer, checked(Shape(calls=calls)))
    mask = matcher.compute_bitmask()
    allowed = [token for token in range(tokenizer.largest_id + 1) if mask[token >> 3] >> (token & 7) & 1]
    assert allowed == [tokenizer.token_id("<tool_call>")]
    assert tokenizer.decode(matcher.compute_ff_tokens(), skip_special=False).startswith('<tool_call>\n{"name": "f"')


# ------------------------------------------------------------------------------------------- what they cost together

MIB = 1 << 20


def numbered(number: int) -> str:
    return grammar("regex", f"(ab)+{number}")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the grammars that are compiled, in order."""
    made: list[str] = []
    real = grammar_matcher.compile_grammar

    def counts(tokenizer: Any, text: str) -> Any:
        made.append(text)
        return real(tokenizer, text)

    monkeypatch.setattr(grammar_matcher, "compile_grammar", counts)
    return made


def test_compiled_grammars_are_cached_by_their_bytes(site: Site, compilations: list[str]) -> None:
    """The limit is not a number of grammars: 64 of one client took 3.6 GB."""
    for number in range(5):
        site.matcher(numbered(number), bytes=20 * MIB)
    assert site.grammars.kept_bytes == 60 * MIB, "a quarter of 256 MiB is the tenant's"
    site.matcher(numbered(4), bytes=20 * MIB)
    assert len(compilations) == 5, "the newest are cached"
    site.matcher(numbered(0), bytes=20 * MIB)
    assert len(compilations) == 6, "the oldest is not"
    for tenant in "bcdefgh":
        site.matcher(AB, bytes=60 * MIB, share=tenant)
    assert site.grammars.kept_bytes <= 256 * MIB
    for number in range(300):
        site.matcher(AB, bytes=1, share=f"t{number}")
    assert site.grammars.kept_bytes <= 256 * MIB


def test_a_grammar_in_use_is_not_evicted_and_the_next_one_waits(site: Site) -> None:
    """64 answers of one tenant that each follow a grammar of 40 MiB would take 2.5 GB."""
    first = site.matcher(numbered(1), bytes=40 * MIB)
    site.grammars.add(request(numbered(2), id=2, bytes=40 * MIB))
    site.grammars.add(request(numbered(1), id=3, bytes=40 * MIB))
    site.grammars.add(request(AB, id=4, bytes=40 * MIB, share="other"))
    assert {one.request.id for one in site.ready(2)} == {3, 4}, (
        "requests that need no more room pass, and so do other tenants"
    )
    time.sleep(0.05)
    assert site.grammars.ready() == [] and site.grammars.pending
    del first
    (second,) = site.ready()
    assert second.request.id == 2 and second.matcher is not None
    assert site.grammars.kept_bytes <= 2 * 40 * MIB


def test_waiting_for_room_has_a_time_limit(site: Site) -> None:
    first = site.matcher(numbered(1), bytes=64 * MIB)
    site.grammars.add(request(numbered(2), id=2, bytes=64 * MIB, timeout=0.05))
    (late,) = site.ready()
    assert late.request.id == 2 and isinstance(late.error, DeadlineExceeded) and not site.grammars.pending
    assert first is not None


def test_growth_while_following_counts(site: Site, compilations: list[str]) -> None:
    """A string of bounded length has a state for each of its characters."""
    matcher = site.matcher(AB, bytes=MIB, growth=4 * MIB)
    for token in b"ab" * 5:
        matcher.consume(token)
    assert site.grammars.kept_bytes == 41 * MIB
    again = site.matcher(AB, bytes=MIB, growth=4 * MIB)
    assert len(compilations) == 1
    for token in b"ab" * 20:
        again.consume(token)
    assert site.grammars.kept_bytes == 129 * MIB, "its growth has a limit"
    del matcher, again
    site.matcher(AB, bytes=MIB, growth=4 * MIB)
    assert len(compilations) == 2 and site.grammars.kept_bytes == MIB, "a grown grammar is compiled anew"


def test_a_cancelled_request_is_not_compiled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    go = threading.Event()
    real = grammar_matcher.compile_grammar

    def waits(tokenizer: Any, text: str) -> Any:
        made.append(text)
        go.wait(20)
        return real(tokenizer, text)

    monkeypatch.setattr(grammar_matcher, "compile_grammar", waits)
    for id in range(1, 30):
        site.grammars.add(request(numbered(id), id=id))
    for id in range(1, 30):
        site.grammars.drop(id)
    go.set()
    site.grammars.add(request(AB, id=100))
    (one,) = site.ready()
    assert one.request.id == 100 and len(made) == 2, "the running one, and the one that is waited for"


def test_the_next_tenant_waits_for_one_grammar_of_each_other(site: Site, compilations: list[str]) -> None:
    for id in range(1, 20):
        site.grammars.add(request(numbered(id), id=id, share="a"))
    for id in range(21, 30):
        site.grammars.add(request(numbered(id), id=id, share="b"))
    site.grammars.add(request(AB, id=50, share="c"))
    site.grammars.add(request(DIGITS, id=51, share="c"))
    site.ready(30)
    assert compilations.index(AB) <= 3 and compilations.index(DIGITS) <= 6


STATES = grammar("regex", r"(ab)+|((.|\n)*a(.|\n){300}x)+")
"""One branch is cheap to follow. In the other, any text makes new states, until there are too many."""


def follow_to_its_end(matcher: Matcher, rng: random.Random) -> bool:
    """Return whether a random answer becomes too complex to follow."""
    for _ in range(2000):
        mask = matcher.mask().wait()
        if not mask:
            return True
        may = [token for token in range(256) if mask[token >> 3] >> (token & 7) & 1]
        matcher.consume(rng.choice([*(token for token in b"ab" if token in may), rng.choice(may)]))
    return False


def test_an_answer_that_becomes_too_complex_ends_and_no_other(
    site: Site, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a llguidance matcher share what they learn, so that one of them disabled all others and all later
    ones.
    """
    monkeypatch.setitem(LIMITS, "max_lexer_states", 500)
    cheap, costly = site.matcher(STATES, id=1), site.matcher(STATES, id=2)
    for token in b"abab":
        assert cheap.mask().wait()
        cheap.consume(token)
    assert follow_to_its_end(costly, random.Random(1))
    assert {ord("a"), END} <= allowed(cheap) and ord("b") in allowed(site.matcher(STATES, generated=tuple(b"aba")))
    cheap.consume(ord("a"))
    assert ord("b") in allowed(cheap) and cheap.forced() is None
    assert len(compilations) == 4, "the first, one for each of the two, and the late one's"


def test_masks_that_take_too_long_together_end_their_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step waits for masks, and so do all other answers."""
    seconds = itertools.count(0.0, 0.02)
    monkeypatch.setattr(grammar_matcher, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(grammar_matcher, "perf_counter", lambda: next(seconds))
    matcher = site.matcher()
    for number in range(200):
        if not matcher.mask().wait():
            break
        matcher.consume(b"ab"[number % 2])
    assert 60 <= number <= 70, "15 ms over the limit each, and a second in all"
