"""Reasoning and calls on the real engine: what clients get, also in the next turn."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.text.tokens.gguf import CONTROL, USER
from tests.scripted_model import CHATML, write_scripted

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "f",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
]
ASKED = [{"role": "user", "content": "Say it."}]
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHATML + "{# <think> #}"
TAGS = {"<think>": CONTROL, "</think>": USER, "<tool_call>": CONTROL, "</tool_call>": CONTROL}


@pytest.mark.parametrize(
    ("pieces", "text", "reasoning", "calls", "reason"),
    [
        (["Use ", "`", "<think>", "x", "</think>", "` for"], "Use `<think>x</think>` for", "", [], "stop"),
        (["<think>", "hm", "</think>", "So ", "<think>"], "So <think>", "hm", [], "stop"),
        (["<tool_call>", '{"name": "f", "argu', 'ments": {"n": None,', "}", "</tool_call>"],
         "", "", [("f", {"n": None})], "tool_calls"),
        (["Hm", "<tool_call>", '{"name": "g", "arguments": {"n": 1', " oops}}", "</tool_call>"],
         'Hm<tool_call>{"name": "g", "arguments": {"n": 1 oops}}</tool_call>', "", [], "stop"),
        (["Hm", "<tool_call>", '{"name": "f", "arguments": {"n": 1', " oops}}", "</tool_call>"],
         "Hm", "", [("f", '{"n": 1 oops}}')], "tool_calls"),
        (["```json\n", '{"name": "f", ', '"arguments": {"n": 2}}', "\n```"],
         "", "", [("f", {"n": 2})], "tool_calls"),
    ],
)  # fmt: skip
def test_an_answer_is_reasoning_content_and_whole_calls(
    tmp_path: Path, pieces: list[str], text: str, reasoning: str, calls: list[tuple[str, Any]], reason: str
) -> None:
    path = write_scripted(tmp_path / "m.gguf", pieces, kinds=TAGS, template=TEMPLATE)
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        answer = llm.chat(ASKED, TOOLS, temperature=0, max_tokens=20)
        assert (answer.text, answer.reasoning, answer.finish_reason) == (text, reasoning, reason)
        made = [(tool_call.name, tool_call.arguments) for tool_call in answer.tool_calls]
        assert made == [
            (name, arguments if isinstance(arguments, str) else json.dumps(arguments)) for name, arguments in calls
        ]
        stream = llm.chat(ASKED, TOOLS, temperature=0, max_tokens=20, stream=True)
        assert "".join(delta.text for delta in stream) == text
        # The next turn begins with this one's very ids, so its whole KV is reused.
        more = {"role": "tool", "content": "4"} if calls else {"role": "user", "content": "And?"}
        again = llm.chat([*ASKED, answer.message, more], TOOLS, temperature=0, max_tokens=2)
        assert again.usage is not None and answer.usage is not None
        whole = answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert again.usage.cached_tokens >= whole // 16 * 16


@pytest.mark.parametrize(
    "pieces",
    [
        [f"{letter}\u0301" for letter in "aeiouyncszlrgkmpw"],
        ["\u212b", "e", "\u0301", *(f"{letter}\u0323\u0307" for letter in "sdhklmnrtvwyz")],
        [chr(0x1100 + i) + chr(0x1161 + i) for i in range(17)],
    ],
)
def test_text_that_is_not_nfc_comes_back_to_its_cache(tmp_path: Path, pieces: list[str]) -> None:
    """Its tokenizer normalises to NFC, so an answer in another form cannot be encoded to its ids: it is put back as
    ids. A question in another form gives the same prompt as in NFC.
    """
    path = write_scripted(tmp_path / "m.gguf", pieces, extra={"tokenizer.ggml.pre": "qwen2"})
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        asked = [{"role": "user", "content": "Where is the cafe\u0301 of A\u030angstro\u0308m, which is so good?"}]
        answer = llm.chat(asked, temperature=0, max_tokens=20)
        assert answer.text == "".join(pieces) != unicodedata.normalize("NFC", answer.text)
        assert answer.usage is not None
        whole = answer.usage.prompt_tokens + answer.usage.completion_tokens
        composed = [{"role": "user", "content": unicodedata.normalize("NFC", str(asked[0]["content"]))}]
        for first in (asked, composed):
            more = [*first, answer.message, {"role": "user", "content": "And where else?"}]
            again = llm.chat(more, temperature=0, max_tokens=2)
            assert again.usage is not None and again.usage.cached_tokens >= whole // 16 * 16
            assert again.cache.miss is None or again.cache.miss.position >= whole // 16 * 16
