"""Requests of real clients: model names, unknown fields, template switches, and answers that end with their first
call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service, names_of
from cairn.types.outputs import Delta
from cairn.types.request import OutputFormat
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, events, site
from tests.scripted_model import write_scripted
from tests.service.tiny import make_model, serving
from tests.text import text_models

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(at: Site, path: str, body: Any, **headers: str) -> httpx.Response:
    async with at.http() as http:
        return await http.post(
            path, json=body, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )


# ------------------------------------------------------------------------------------------------- names of the model


@pytest.mark.parametrize("more", [{}, {"model": None}, {"model": ""}, {"model": "gpt-4o"}, {"model": "scripted"}])
async def test_one_model_answers_to_any_name_and_says_its_own(more: dict[str, Any]) -> None:
    async with site(ScriptedService()) as at:
        for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
            answer = await post(at, path, body | more)
            assert answer.status_code == 200 and answer.json()["model"] == "scripted"
            *chunks, _ = events((await post(at, path, body | more | {"stream": True})).text)
            assert {chunk["model"] for chunk in chunks} == {"scripted"}


@pytest.mark.parametrize(("options", "status"), [({}, 200), ({"strict_model": True}, 404)])
async def test_the_option_says_whether_a_name_that_is_not_the_models_is_refused(
    tmp_path: Path, options: dict[str, bool], status: int
) -> None:
    async with serving(make_model(tmp_path / "tiny"), served_name="mine", **options) as service, site(service) as at:
        for name, want in (("mine", 200), (None, 200), ("gpt-4o", status)):
            answer = await post(at, CHAT, {"messages": HI, "model": name, "max_tokens": 2})
            assert answer.status_code == want, answer.text
        if status == 404:
            assert answer.json()["error"]["code"] == "model_not_found" and "mine" in answer.json()["error"]["message"]


async def test_a_strict_server_answers_to_its_names_only() -> None:
    service = ScriptedService()
    service.strict, service.names = True, frozenset({"scripted", "other"})
    async with site(service) as at:
        for name, status in ((None, 200), ("scripted", 200), ("other", 200), ("gpt-4o", 404), ("", 404)):
            answer = await post(at, CHAT, {"messages": HI, "model": name})
            assert answer.status_code == status, name
        assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("/models/Qwen3-0.6B", {"/models/Qwen3-0.6B", "Qwen3-0.6B"}),
        ("/models/q.Q4_K_M.gguf", {"/models/q.Q4_K_M.gguf", "q.Q4_K_M.gguf", "q.Q4_K_M"}),
        ("models/folder/", {"models/folder/", "folder"}),
        ("org/name:Q4_1", {"org/name:Q4_1", "org/name", "name:Q4_1", "name"}),
        ("demo", {"demo"}),
    ],
)
def test_the_names_of_a_model(model: str, names: set[str]) -> None:
    spec = ScriptedService().spec
    assert names_of(Config(model=model), spec) >= names | {spec.name}
    assert names_of(Config(model=model, served_name="mine", alias=("a", "b")), spec) >= names | {"mine", "a", "b"}


# ----------------------------------------------------------------------------------------------------- unknown fields


async def test_unknown_fields_are_reported_and_slips_refused_unless_lenient() -> None:
    body = {"messages": [HI[0] | {"mood": "good"}], "temprature": 1}
    warnings = [
        "messages[0].mood is not a field of a message and has no effect",
        "temprature is not a field of this route and has no effect; did you mean temperature?",
    ]
    plain = {"messages": HI}
    strict = Config(strict_fields=True)
    async with site(ScriptedService()) as at, site(ScriptedService(), Config(lenient=True)) as lenient:
        assert (await post(at, CHAT, body)).status_code == 400
        foreign = await post(at, CHAT, {"messages": body["messages"]})
        assert foreign.status_code == 200 and foreign.headers.get_list("x-cairn-warning") == warnings[:1]
        assert (await post(at, TEXT, {"prompt": "hi", "of_another_maker": 1})).headers["x-cairn-warning"]
        async with site(ScriptedService(), strict) as refusing:
            assert (await post(refusing, CHAT, {"messages": body["messages"]})).status_code == 400
            assert (await post(refusing, CHAT, body, X_Cairn_Lenient="1")).status_code == 200
        assert (await post(at, CHAT, body, X_Cairn_Lenient="0")).status_code == 400
        for answer in (await post(at, CHAT, body, X_Cairn_Lenient="1"), await post(lenient, CHAT, body)):
            assert answer.status_code == 200 and answer.json()["warnings"] == warnings
            assert answer.headers.get_list("x-cairn-warning") == warnings
        for usage in ({}, {"stream_options": {"include_usage": True}}):
            stream = await post(lenient, CHAT, body | {"stream": True} | usage)
            results = [chunk["warnings"] for chunk in events(stream.text)[:-1] if "warnings" in chunk]
            assert results == [warnings] and stream.headers.get_list("x-cairn-warning") == warnings
        text = await post(lenient, TEXT, {"prompt": "hi", "temprature": 1, "stream": True})
        assert [chunk["warnings"] for chunk in events(text.text)[:-1] if "warnings" in chunk] == [warnings[1:]]
        tokens = await post(lenient, "/tokenize", {"prompt": "hi", "add": 1})
        assert tokens.status_code == 200 and "add is not a field" in tokens.json()["warnings"][0]
        quiet = await post(lenient, CHAT, plain)
        assert "warnings" not in quiet.json() and "x-cairn-warning" not in quiet.headers
        meant = await post(lenient, CHAT, plain | {"audio": {"format": "mp3"}})
        assert meant.status_code == 400, "it would change what the answer means"
        many = await post(lenient, CHAT, plain | {f"x{n}": 1 for n in range(17)} | {"\u00fc\n": 1})
        assert len(many.json()["warnings"]) == len(many.headers.get_list("x-cairn-warning")) == 16


async def test_a_mark_before_the_body() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        body = b"\xef\xbb\xbf" + json.dumps({"messages": HI}).encode()
        answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200


# -------------------------------------------------------------------------------------------- switches of the template


@pytest.mark.parametrize(
    ("template", "body", "wanted"),
    [
        ("enable_thinking", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("enable_thinking reasoning_effort", {"reasoning_effort": "minimal"}, {"enable_thinking": False}),
        ("enable_thinking", {"reasoning_effort": "high"}, {}),
        ("reasoning_effort", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ("reasoning_effort", {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        ("", {"reasoning_effort": "none"}, {}),
        ("", {"enable_thinking": True}, {"enable_thinking": True}),
        ("enable_thinking", {"enable_thinking": True, "reasoning_effort": "none"}, {"enable_thinking": True}),
        ("enable_thinking", {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
         {"enable_thinking": True, "x": 1}),
        ("enable_thinking", {"enable_thinking": None, "reasoning_effort": None}, {}),
        ("enable_thinking", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ("enable_thinking", {"thinking": {"type": "enabled", "clear_thinking": True}}, {"enable_thinking": True}),
        ("enable_thinking", {"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ("", {"thinking": {"type": "disabled"}}, {}),
        ("enable_thinking", {"thinking": {"type": "disabled"}, "enable_thinking": True}, {"enable_thinking": True}),
        ("enable_thinking", {"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ("enable_thinking", {"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ("enable_thinking", {"reasoning": {"enabled": True, "summary": "auto"}}, {"enable_thinking": True}),
        ("reasoning_effort", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("reasoning_effort", {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)  # fmt: skip
async def test_reasoning_is_turned_off_where_the_template_can(
    template: str, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    service = ScriptedService()
    service.template = template
    async with site(service) as at:
        assert (await post(at, CHAT, {"messages": HI} | body)).status_code == 200
    assert service.prompts[0][3] == wanted


async def test_thinking_and_reasoning_switch_the_template() -> None:
    service = ScriptedService(
        lambda request: [Delta(reasoning="hm", tokens=(1,)), Delta(text="hi", tokens=(2,)), done()]
    )
    service.output = OutputFormat(reasoning=True)
    async with site(service) as at:
        for more in ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"reasoning": {"max_tokens": 9}}):
            assert (await post(at, CHAT, {"messages": HI} | more)).status_code == 200
            assert service.streams[-1].request.reasoning_budget == 9
        shown = await post(at, CHAT, {"messages": HI})
        assert shown.json()["choices"][0]["message"]["reasoning_content"] == "hm"
        hidden = {"messages": HI, "reasoning": {"exclude": True}}
        assert "reasoning_content" not in (await post(at, CHAT, hidden)).json()["choices"][0]["message"]
        assert "hm" not in (await post(at, CHAT, hidden | {"stream": True})).text
        service.template = "no switch"
        response = await post(at, CHAT, {"messages": HI, "thinking": {"type": "disabled"}})
        assert "no switch for it" in response.headers["x-cairn-warning"]
        for more, field in (
            ({"thinking": {"type": "sometimes"}}, "thinking.type"),
            ({"thinking": {}}, "thinking.type"),
            ({"thinking": True}, "thinking"),
            ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
            ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ):
            wrong = await post(at, CHAT, {"messages": HI} | more)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == field, wrong.text


# --------------------------------------------------------------------------------------------- one call, and a real end

CALLS = [
    "<tool_call>", "\n", '{"name": "weather", ', '"arguments": {"city": ', '"Oslo"', "}}", "\n\n", "</tool_call>",
    "\n ", "<tool_call>", "\n\t", '{"name": "weather", "arguments": {"city": ', '"Bergen"', "}}\n", "</tool_call>",
]  # fmt: skip


async def test_an_answer_ends_with_its_first_call_without_parallel_calls(tmp_path: Path) -> None:
    """Nothing is computed beyond the call, and the answer that comes back as history is what was sampled."""
    path = write_scripted(tmp_path / "m.gguf", CALLS, template=text_models.QWEN_TEMPLATE)
    service = await Service.start(Config(model=str(path), kv_gb=0.05, kv_disk=False), in_process=True)
    body = {"messages": HI, "tools": [WEATHER], "temperature": 0}
    try:
        async with site(service) as at:
            both = (await post(at, CHAT, body)).json()
            one = (await post(at, CHAT, body | {"parallel_tool_calls": False})).json()
            stream = await post(at, CHAT, body | {"parallel_tool_calls": False, "stream": True, "stream_options": None})
            *chunks, last = events(stream.text)
            talk = [*HI, one["choices"][0]["message"], {"role": "tool", "id": "x", "content": "rain"}]
            again = (await post(at, CHAT, body | {"messages": talk, "max_tokens": 1})).json()
    finally:
        await service.close()
    assert [len(answer["choices"][0]["message"]["tool_calls"]) for answer in (both, one)] == [2, 1]
    assert one["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert one["choices"][0]["finish_reason"] == "tool_calls" and not one["choices"][0]["message"]["content"]
    assert one["usage"]["completion_tokens"] == CALLS.index("</tool_call>") + 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * (
        (one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"] - 1) // 16
    )
    deltas = [chunk["choices"][0] for chunk in chunks]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0} and last == "[DONE]"
    assert deltas[-1]["finish_reason"] == "tool_calls"


async def test_max_tokens_beyond_the_context_end_with_it(tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "m.gguf", ["one", " two", " "], end=None, context=64)
    service = await Service.start(Config(model=str(path), kv_gb=0.05, kv_disk=False), in_process=True)
    try:
        async with site(service) as at:
            for most in (32_000, -1, 32_000.0):
                for name in ("n_predict",) if most == -1 else ("max_tokens", "max_completion_tokens", "n_predict"):
                    answer = (await post(at, CHAT, {"messages": HI, name: most})).json()
                    usage = answer["usage"]
                    assert answer["choices"][0]["finish_reason"] == "length"
                    assert usage["total_tokens"] == 64 and usage["completion_tokens"] > 30
            text = (await post(at, TEXT, {"prompt": "hi", "n_predict": -1})).json()
            assert text["usage"]["total_tokens"] == 64
            long = (await post(at, TEXT, {"prompt": "x" * 70, "max_tokens": 1})).json()["error"]
            assert (long["code"], long["n_prompt_tokens"], long["n_ctx"]) == ("context_length_exceeded", 70, 64)
    finally:
        await service.close()


async def test_seed_minus_one_is_another_one_each_time() -> None:
    service = ScriptedService(lambda request: [Delta(text="a"), done()])
    async with site(service) as at:
        for _ in range(2):
            await post(at, CHAT, {"messages": HI, "seed": -1})
        for _ in range(2):
            await post(at, CHAT, {"messages": HI, "seed": 7.0})
    seeds = [stream.request.sampling.seed for stream in service.streams]
    assert seeds[0] != seeds[1] and seeds[2:] == [7, 7]


async def test_store_false_is_kept_where_the_server_says_so() -> None:
    for store_kv, wanted in (("asked", [False, True, True]), ("always", [True, True, True])):
        service = ScriptedService()
        async with site(service, Config(store_kv=store_kv)) as at:  # type: ignore[arg-type]
            for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
                for more in ({"store": False}, {"store": True}, {}):
                    assert (await post(at, path, body | more)).status_code == 200
        assert [stream.request.stored for stream in service.streams] == wanted * 2
