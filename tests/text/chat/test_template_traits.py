"""Fitting messages to a template and finding them in its rendering, in about one pass over the text."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from cairn.text.chat.template_traits import LOOKS, Traits, fitted, left_out

SECONDS = 2.0
"""Limit in CPU seconds; before, it took from five seconds to minutes."""


def call(name: str) -> dict[str, Any]:
    return {"type": "function", "id": "c", "function": {"name": name, "arguments": {}}}


def said(content: str, role: str = "user", *names: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content}
    return message | ({"tool_calls": [call(name) for name in names]} if names else {})


def test_left_out_messages_are_found_whatever_the_order() -> None:
    messages = [said("one"), said(" two\n"), said("three", "assistant", "f", "g"), said("four", "tool"), said("")]
    assert left_out(messages, "one two three f g four") == []
    assert left_out(messages, "four three f one g two") == []  # moved
    assert left_out(messages, "one three g f four") == [(1, "content")]
    assert left_out(messages, "one two three f four") == [(2, "tool_calls")]
    assert left_out(messages, "") == [(0, "content"), (1, "content"), (2, "content"), (2, "tool_calls"), (3, "content")]
    assert left_out([said("a"), said("b"), said("a")], "a b") == []  # sent twice, rendered once


def test_the_search_stops_after_a_number_of_passes() -> None:
    """A message that is not found costs a pass or two. After the limit, all further ones count as rendered."""
    messages = [said(f"message {at} of many") for at in range(4096)]
    lost = left_out(messages, "x" * 1_000_000)
    assert lost == [(at, "content") for at in range(len(lost))] and LOOKS // 2 <= len(lost) <= LOOKS


NAMES = [f"tool_number_{at}" for at in range(15_000)]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([said("", "assistant", *NAMES)], " ".join(f'{{"name": "{name}", "arguments": {{}}}}' for name in NAMES)),
        ([said("", "assistant", *NAMES)], "x" * 1_000_000 + " ".join(NAMES)),
        ([said("", "assistant", *NAMES[::-1])], "x" * 1_000_000 + " ".join(NAMES)),
        ([said("", "assistant", *NAMES)], "x" * 4_000_000),
        ([said("x", "assistant", *["f"] * 60_000)], "x" * 1_000_000 + "f"),
        ([said(f"m{at} " * 200) for at in range(4096)], "x" * 4_000_000),
        ([said(f"m{at}") for at in range(4096)][::-1], "x" * 4_000_000 + " ".join(f"m{at}" for at in range(4096))),
        ([said("a" * 500 + "b")] * 4096, "a" * 4_000_000),
    ],
    ids=["calls", "calls behind", "calls the other way", "no calls", "one name", "no contents", "moved", "nearly"],
)  # fmt: skip
def test_the_search_takes_about_one_pass(messages: list[dict[str, Any]], text: str) -> None:
    began = time.process_time()
    left_out(messages, text)
    assert time.process_time() - began < SECONDS


TOLD = Traits(middle=False)


def test_many_messages_that_become_one_are_joined_once() -> None:
    piece = "x" * 4_000
    results = Traits(results=False)
    for messages, traits in (
        ([said(piece, "system")] * 4096, TOLD),
        ([said("x"), *[said(piece, "system")] * 4095], TOLD),
        ([said(piece, "tool")] * 4096, results),
    ):
        began = time.process_time()
        made = fitted(messages, traits)
        assert time.process_time() - began < SECONDS
        assert len(made) == 1 and len(made[0]["content"]) > 4095 * 4_000


def as_it_was(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Apply the same rule by joining two texts at a time."""
    made: list[dict[str, Any]] = []
    folded = False
    for message in messages:
        if message["role"] == "system" and made and made[-1]["role"] == "system":
            made[-1] = {**made[-1], "content": made[-1]["content"] + "\n\n" + message["content"]}
            continue
        late = message["role"] == "system" and bool(made)
        role = message["role"]
        if late:
            message = {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
        if message["role"] == "user" and made and made[-1]["role"] == "user" and (late or folded):
            made[-1] = {**made[-1], "content": made[-1]["content"] + "\n" + message["content"]}
        else:
            made.append(message)
        folded = late or (folded and role == "user")
    return made


def test_messages_are_joined_as_one_after_the_other() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        messages = [
            said(f"t{at}", rng.choice(["system", "user", "assistant", "tool"])) for at in range(rng.randint(0, 9))
        ]
        assert fitted(messages, TOLD) == as_it_was(messages), seed
