"""Reasons for cache misses: the worker's reason, refined by the same tenant's recent contexts."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest

from cairn.frontend import miss_explainer
from cairn.frontend.miss_explainer import (
    CONTEXTS,
    SHOWN,
    TENANTS,
    TOKENS,
    PromptOrigin,
    RecentContexts,
    describe_prompt,
)
from cairn.frontend.service import Service
from cairn.types.model_spec import BLOCK_TOKENS, CHUNK_TOKENS
from cairn.types.stats import Differs, Miss, MissReason
from tests.service.tiny import Answer, collect, config, request

MINE, THEIRS = b"mine", b"theirs"
KNOWN = list(range(1000, 1200))


def spell(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore[call-overload]


def why(recent: RecentContexts, ids: list[int], at: int, told: PromptOrigin | None = None, salt: bytes = MINE) -> Miss:
    result = recent.explain(Miss(position=at, reason="never seen"), salt, ids, told or PromptOrigin(), spell)
    assert result.position == at
    return result


@pytest.fixture
def recent() -> RecentContexts:
    made = RecentContexts()
    made.note(MINE, KNOWN, 150)
    return made


def test_a_miss_shows_where_two_contexts_part_and_how_both_continue(recent: RecentContexts) -> None:
    result = why(recent, [*KNOWN[:70], 7, 8, *KNOWN[72:]], 64)
    assert result.reason == "different tokens" and result.differs is not None
    assert result.differs.position == 70
    assert result.differs.given.startswith("7 8 1072 ") and result.differs.known.startswith("1070 1071 1072 ")
    assert len(result.differs.known) == len(result.differs.given) == SHOWN


@pytest.mark.parametrize(
    ("at", "reason"), [(64, "system text changed"), (5, "system text changed"), (100, "different tokens")]
)
def test_a_system_text_that_changed_is_named(recent: RecentContexts, at: int, reason: str) -> None:
    """The system text is at positions 4 to 79; a session id or a git status in it costs everything behind it."""
    ids = [*KNOWN[:at], 7, *KNOWN[at + 1 :]]
    system = spell(ids[4:80])
    origin = describe_prompt([{"role": "system", "content": f" {system}\n"}, {"role": "user", "content": "Hello"}])
    result = why(recent, ids, at // 16 * 16, origin)
    assert result.reason == reason and result.differs is not None and result.differs.position == at
    assert (
        why(recent, ids, at // 16 * 16, describe_prompt([{"role": "user", "content": system}])).reason
        == "different tokens"
    )


def test_the_nearest_context_is_compared(recent: RecentContexts) -> None:
    recent.note(MINE, [*KNOWN[:90], 1, 2, 3], 90)
    recent.note(MINE, [*KNOWN[:20], 1, 2, 3], 20)
    result = why(recent, [*KNOWN[:90], 1, 2, 4, 5], 80)
    assert result.differs == Differs(position=92, known="3", given="4 5")


def test_another_tenants_context_changes_nothing(recent: RecentContexts) -> None:
    """Nothing in the answer depends on what another tenant asked."""
    changed = [*KNOWN[:70], 7, 8, *KNOWN[72:]]
    for ids in (changed, KNOWN, KNOWN[:64]):
        assert why(recent, ids, 0, salt=THEIRS) == Miss(position=0, reason="never seen")
    recent.note(THEIRS, [5, 6, 7], 2)
    assert why(recent, changed, 0, salt=THEIRS) == Miss(position=0, reason="never seen")


@pytest.mark.parametrize("reason", ["evicted", "not stored yet", "not stored", "damaged", "faster to compute"])
def test_the_workers_own_reason_is_kept(recent: RecentContexts, reason: MissReason) -> None:
    miss = Miss(position=64, reason=reason)
    assert recent.explain(miss, MINE, [*KNOWN[:70], 7], PromptOrigin(why="model changed"), spell) is miss


def test_new_tokens_behind_a_known_context_were_never_seen(recent: RecentContexts) -> None:
    assert why(recent, [*KNOWN, *range(40)], 192).reason == "never seen"
    assert why(recent, [*KNOWN, *range(40)], 192 + BLOCK_TOKENS).reason == "never seen"
    assert why(recent, list(range(40)), 0) == Miss(position=0, reason="never seen")


def test_evicted_tokens_are_explained(recent: RecentContexts) -> None:
    """A worker that has just started does not remember its predecessor's pool, but the front does."""
    assert why(recent, [*KNOWN, 1, 2, 3], 0) == Miss(position=0, reason="evicted")
    assert why(recent, [*KNOWN[:130], 1], CHUNK_TOKENS).reason == "evicted"
    recent.note(MINE, [*range(60), *KNOWN], 30)
    whole = CHUNK_TOKENS * 3 + BLOCK_TOKENS + 4  # its last chunk was incomplete
    assert why(recent, [*range(60), *KNOWN, 1, 2, 3], whole - whole % CHUNK_TOKENS).reason == "evicted"
    recent.note(THEIRS, KNOWN[: CHUNK_TOKENS + 40], 30)
    assert why(recent, [*KNOWN[: CHUNK_TOKENS + 40], 1, 2, 3], CHUNK_TOKENS, salt=THEIRS).reason == "not stored"


def test_evicted_tokens_are_not_reported_as_different_tokens(recent: RecentContexts) -> None:
    """The first missing token was known, wherever the contexts differ later."""
    assert why(recent, [*KNOWN[:60], 7, 8], 16).reason == "not stored"
    assert why(recent, [*KNOWN[:60], 7, 8], 48).reason == "different tokens"


def test_the_context_with_the_most_common_messages_is_compared() -> None:
    """An early message was edited; another conversation with the same beginning came later."""
    recent = RecentContexts()
    system, old, new = (
        {"role": role, "content": text} for role, text in (("system", "S"), ("user", "a"), ("user", "b"))
    )
    rest = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    recent.note(MINE, [*KNOWN[:40], 1, *range(60)], 100, describe_prompt([system, old, *rest]).messages)
    recent.note(
        MINE, [*KNOWN[:40], 2, *range(60)], 100, describe_prompt([system, {"role": "user", "content": "c"}]).messages
    )
    result = why(recent, [*KNOWN[:40], 3, *range(60)], 40, describe_prompt([system, new, *rest]))
    assert result.reason == "different tokens" and result.differs is not None
    assert result.differs.known.startswith("1 0 1") and result.differs.position == 40


def test_the_same_messages_that_became_other_tokens() -> None:
    """The template, its arguments or the tools have changed, but not the messages."""
    recent = RecentContexts()
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    then = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
    recent.note(MINE, KNOWN[:100], 80, describe_prompt(first).messages)
    recent.note(MINE, KNOWN, 180, describe_prompt(then).messages)
    other = [*KNOWN[:40], *range(200)]
    assert why(recent, other, 32, describe_prompt(then)).reason == "template"
    assert (
        why(recent, other, 32, describe_prompt([*first, {"role": "assistant", "content": "Ho"}])).reason == "template"
    )
    assert why(recent, other, 32, describe_prompt([{"role": "user", "content": "Hello"}])).reason == "different tokens"
    assert why(recent, [*KNOWN[:90], 1], 80, describe_prompt(first)).reason == "different tokens", (
        "the answer was edited"
    )
    assert why(recent, other, 32, describe_prompt(then)).differs is not None


def test_a_history_that_leaves_an_answer_out_is_other_tokens() -> None:
    """The contexts part where the template opens the answer, within text rendered from the same messages before."""
    recent = RecentContexts()
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    question, answer = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Hi"}
    recent.note(MINE, [*KNOWN[:80], 1, 2, 3, *range(50)], 83, describe_prompt(asked).messages)
    left_out = [*KNOWN[:80], 1, 5, 6, 7]
    assert why(recent, left_out, 80, describe_prompt([*asked, question])).reason == "different tokens"
    assert why(recent, left_out, 80, describe_prompt([*asked, answer, question])).reason == "template", (
        "no answer is left out"
    )
    early = [*KNOWN[:40], *range(60)]
    assert why(recent, early, 32, describe_prompt([*asked, question])).reason == "template", (
        "the beginning differs, too"
    )


def test_the_callers_reason_comes_before_a_comparison(recent: RecentContexts) -> None:
    assert why(recent, [*KNOWN[:70], 7], 64, PromptOrigin(why="model changed")) == Miss(
        position=64, reason="model changed"
    )


def test_forgotten_contexts_are_in_no_report(recent: RecentContexts) -> None:
    recent.forget(MINE)
    recent.forget(THEIRS)
    assert why(recent, [*KNOWN[:70], 7], 64) == Miss(position=64, reason="never seen")


def test_the_table_is_bounded() -> None:
    recent = RecentContexts()
    for n in range(2 * CONTEXTS):
        recent.note(MINE, [n, 1, 2, 3], 4)
    assert why(recent, [CONTEXTS - 1, 1, 9], 0).reason == "never seen"
    assert why(recent, [CONTEXTS, 1, 9], 0).reason == "different tokens"
    recent.note(MINE, range(TOKENS), 4)
    assert why(recent, [CONTEXTS, 1, 9], 0).reason == "never seen" and why(recent, [0, 9], 0).differs is not None
    recent.note(MINE, range(10, TOKENS + 11), 4)
    assert why(recent, [10, 9], 0).reason == "never seen", "more than the table holds"
    for n in range(TENANTS):
        recent.note(b"%d" % n, KNOWN, 4)
    assert why(recent, [0, 9], 0).reason == "never seen" and why(recent, [1000, 9], 0, salt=b"0").differs is not None


def test_a_context_that_is_continued_counts_once() -> None:
    recent = RecentContexts()
    for size in range(2, 2 + 3 * CONTEXTS):
        recent.note(MINE, range(size), size)
    recent.note(MINE, range(3), 3)
    (ids,) = recent._tenants[MINE, ()].by_ids
    assert len(ids) == 4 * (1 + 3 * CONTEXTS)


def test_the_nearest_of_many_contexts_is_found_without_comparing_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table answers as one that compares a prompt with each of its contexts would."""
    rng, recent, compared = random.Random(5), RecentContexts(), 0
    kept: list[tuple[list[int], list[bytes]]] = []
    common = miss_explainer._common

    def counted(one: bytes, other: bytes) -> int:
        nonlocal compared
        compared += 1
        return common(one, other)

    monkeypatch.setattr(miss_explainer, "_common", counted)
    for _ in range(600):
        ids = [rng.choice((1, 256, 70000)) for _ in range(rng.randint(1, 9))]
        said = [bytes([rng.randrange(4)]) * 8 for _ in range(rng.randint(0, 3))]
        same = max((alike(ids, other) for other, _ in kept), default=0)
        ranked = [
            (len(set(said) & set(theirs)), n) for n, (other, theirs) in enumerate(kept) if alike(ids, other) == same
        ]
        at, _, known = recent._nearest((MINE, ()), array("I", ids).tobytes(), said)
        assert at == same and known == (array("I", kept[max(ranked)[1]][0]).tobytes() if same else b"")
        if all(alike(ids, other) < min(len(ids), len(other)) for other, _ in kept):
            recent.note(MINE, ids, 0, said)
            kept = [*kept, (ids, said)][-CONTEXTS:]
    assert len(kept) > 100 and compared <= 2 * 600


def alike(one: list[int], other: list[int]) -> int:
    """Return how many leading ids two lists have in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def test_a_service_explains_a_miss_to_the_same_tenant_only(folder: Path) -> None:
    """Through the worker: an edited prompt, another tenant's, one with store: false, and the metric."""
    service = await Service.start(config(folder), in_process=True)

    async def ask(text: str, salt: bytes = MINE, told: PromptOrigin | None = None) -> Answer:
        return await collect(service.generate(request(service, text, salt=salt), told))

    first, edited = "The quick brown fox jumps over it.", "The quick brown fox leaps over it."
    try:
        await ask(first)
        miss = (await ask(edited)).cache.miss
        assert miss is not None and (miss.position, miss.reason) == (first.index("jumps"), "different tokens")
        assert miss.differs is not None and miss.differs.position == first.index("jumps")
        assert miss.differs.known.startswith("jumps over") and miss.differs.given == "leaps over it."[:16]
        assert (await ask(edited, THEIRS)).cache.miss == Miss(position=0, reason="never seen")
        assert (await ask(first, THEIRS)).cache.miss != Miss(position=0, reason="never seen"), (
            "their own context is known"
        )
        await ask("A secret of somebody, not to be kept.", told=PromptOrigin(store=False))
        kept = (await ask("A secret of nobody, which may be kept.")).cache.miss
        assert kept is not None and kept.reason == "never seen" and kept.differs is None
        assert service.metrics.misses["different tokens"] == 2
    finally:
        await service.close()
