"""Structured answers and calls of a real server process."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.api.process import Served, served

ASKED: Any = [{"role": "user", "content": "Tell me of a city, as JSON."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    people: int = pydantic.Field(ge=0, le=99)
    tags: list[str] = pydantic.Field(max_length=0)


NOT: dict[str, Any] = {"not": {"type": "string"}, "maxLength": 8}
"""A schema that cannot be enforced."""
WRONG: dict[str, Any] = {"type": "strin"}
"""An invalid schema."""
CITY = City.model_json_schema() | {"additionalProperties": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(max_running=8, max_queue=32) as process:
        yield process


def client(server: Served) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http)


def ask(server: Served, **more: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 200, "temperature": 1, **more}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60, trust_env=False, verify=False)


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def test_openai_python_parses_what_a_schema_was_asked_of(server: Served) -> None:
    with client(server) as api:
        for seed in range(5):
            result = api.chat.completions.parse(
                model="demo", messages=ASKED, response_format=City, seed=seed, temperature=1, max_tokens=400
            )
            city = result.choices[0].message.parsed
            assert isinstance(city, City) and result.choices[0].finish_reason == "stop"


def test_openai_python_parses_calls_of_strict_tools(server: Served) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=5)

    with client(server) as api:
        result = api.chat.completions.parse(
            model="demo",
            messages=ASKED,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        )
    assert result.choices[0].finish_reason == "tool_calls" and result.choices[0].message.tool_calls
    (call,) = result.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize(
    ("more", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"]),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ["red", "green"]),
        ({"guided_regex": "(a|b)1"}, ["a1", "b1"]),
        ({"structured_outputs": {"regex": "x[yz]"}}, ["xy", "xz"]),
        ({"guided_json": {"enum": [1, "a"]}}, ["1", '"a"']),
        ({"guided_grammar": 'root ::= "up" | "down"'}, ["up", "down"]),
        ({"guided_grammar": 'start: "left" | "right"'}, ["left", "right"]),
        ({"grammar": 'root ::= "in" | "out"'}, ["in", "out"]),
        ({"json_schema": {"const": None}}, ["null"]),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, ["7"]),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a" "b"'}}, ["ab"]),
    ],
)
def test_every_field_for_a_schema_is_enforced(server: Served, more: dict[str, Any], allowed: list[str]) -> None:
    assert content(ask(server, **more)) in allowed
    text = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": "It is", "max_tokens": 50, **more},
        timeout=60,
        trust_env=False,
        verify=False,
    )
    assert text.json()["choices"][0]["text"] in allowed


def test_an_answer_with_a_seed_is_the_same_alone_streamed_and_in_company(server: Served) -> None:
    more: dict[str, Any] = {"response_format": {"type": "json_object", "schema": CITY}, "seed": 5}
    alone = content(ask(server, **more))
    City.model_validate_json(alone)
    with httpx.Client(trust_env=False, verify=False, timeout=60) as http:
        body = {"messages": ASKED, "temperature": 1, **more, "stream": True}
        stream = http.post(server.url + "/v1/chat/completions", json=body).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == alone
    many = ask(server, **more, n=4).json()["choices"]
    assert many[0]["message"]["content"] == alone and len({one["message"]["content"] for one in many}) > 1
    assert all(City.model_validate_json(one["message"]["content"]) for one in many)


def test_log_probabilities_are_of_the_plain_distribution(server: Served) -> None:
    answer = ask(server, guided_choice=["zebra"], logprobs=True, top_logprobs=3).json()["choices"][0]
    assert answer["message"]["content"] == "zebra"
    first = answer["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 3
    assert first["logprob"] < first["top_logprobs"][0]["logprob"], "the model wanted something else"


@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({}, "stop"),
        ({"stop": ['"people', "gs"]}, "stop"),
        ({"max_tokens": 3}, "length"),
        ({"temperature": 0, "repeat_penalty": 1.3, "presence_penalty": 0.5}, "stop"),
        ({"mirostat": 2, "mirostat_tau": 3}, "stop"),
        ({"n": 3, "top_k": 5, "logit_bias": {"65": 2}}, "stop"),
    ],
)
def test_tokens_that_are_forced_change_no_answer(server: Served, more: dict[str, Any], finish: str) -> None:
    """With log-probabilities each token takes a step of its own; the answers must be equal, token for token."""
    for seed in range(3):
        body = {"response_format": {"type": "json_object", "schema": CITY}, "seed": seed, **more}
        forced, single = ask(server, **body).json(), ask(server, **body, logprobs=True).json()
        results = [
            [(choice["message"]["content"], choice["finish_reason"]) for choice in each["choices"]]
            for each in (forced, single)
        ]
        assert results[0] == results[1] and {reason for _, reason in results[0]} == {finish}
        assert forced["usage"]["completion_tokens"] == single["usage"]["completion_tokens"]
        streamed = ask(server, **body, stream=True).text
        chunks = [json.loads(line[6:])["choices"] for line in streamed.splitlines() if line.startswith("data: {")]
        for index, (text, _) in enumerate(results[0]):
            parts = [one["delta"].get("content") or "" for each in chunks for one in each if one["index"] == index]
            assert "".join(parts) == text


def test_a_worker_that_dies_within_an_object_is_followed_by_one_that_goes_on(server: Served) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 60, "maxItems": 60}
    more: dict[str, Any] = {"guided_json": schema, "seed": 3, "max_tokens": 600}
    whole = content(ask(server, **more))
    with httpx.Client(trust_env=False, verify=False, timeout=60) as http:
        body = {"messages": ASKED, "temperature": 1, "stream": True, **more}
        with http.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
            said, killed = "", False
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                said += chunk["choices"][0]["delta"].get("content") or ""
                if not killed and len(said) > 40:
                    status = http.get(server.url + "/health").json()
                    os.kill(status["worker_pid"] if "worker_pid" in status else _worker(server), signal.SIGKILL)
                    killed = True
    assert killed and said == whole and len(json.loads(said)) == 60


def _worker(server: Served) -> int:
    """Return the process of the server's worker."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as line:
                    parent, command = int(stat.read().rpartition(")")[2].split()[1]), line.read()
            except OSError:
                continue
            if parent == server.process.pid and "cairn.worker.worker" in command:
                return pid
    raise AssertionError("there is no worker")


def test_length_may_cut_an_object(server: Served) -> None:
    answer = ask(server, response_format={"type": "json_object"}, max_tokens=2, temperature=0, guided_json=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NOT, "strict": True}}},
            "response_format.json_schema.schema",
            '"not"',
        ),
        ({"guided_json": WRONG}, "guided_json", "strin"),
        ({"guided_json": {"type": "integer", "minimum": 2**60}}, "guided_json", "minimum is beyond 2^53"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": 'start: "a" nothing'}, "guided_grammar", "nothing"),
        ({"grammar": "root ::= ("}, "grammar", "GBNF"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "which ends itself"),
        ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "which ends itself"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice", "names a tool"),
    ],
)
def test_an_unfollowable_schema_is_named(server: Served, more: dict[str, Any], field: str, words: str) -> None:
    answer = ask(server, **more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [{"json_schema": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"guided_choice": ["a"], "allowed_token_ids": [5]}],
)
def test_an_impossible_answer_is_a_4xx(server: Served, more: dict[str, Any]) -> None:
    """Clients retry after a 5xx, which would never succeed."""
    assert ask(server, **more).status_code == 400
    assert '"invalid_request"' in ask(server, **more, stream=True).text


def placed(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Return (path, body, field name) of every dialect's way to ask for a schema."""
    return [
        (
            "/v1/responses",
            {"input": "x", "store": False, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {"messages": ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
        ("/api/chat", {"messages": ASKED, "format": schema, "stream": False}, "format"),
        ("/api/generate", {"prompt": "x", "format": schema, "stream": False}, "format"),
        ("/api/generate", {"prompt": "x", "format": schema, "raw": True, "stream": False}, "format"),
        ("/completion", {"prompt": "x", "json_schema": schema}, "json_schema"),
        ("/v1/completions", {"prompt": "x", "guided_json": schema}, "guided_json"),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "response_format.json_schema.schema",
        ),
    ]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *placed(WRONG),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "tree"}}}, "text.format.type"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": NOT, "strict": True}}},
            "text.format.schema",
        ),
    ],
)
def test_every_dialect_names_its_own_field(server: Served, path: str, body: dict[str, Any], field: str) -> None:
    answer = httpx.post(server.url + path, json={"max_tokens": 5} | body, timeout=60, trust_env=False, verify=False)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert said.startswith(field + " ") and (not isinstance(error, dict) or error.get("param", field) == field)


@pytest.mark.parametrize(("path", "body", "field"), placed(NOT))
def test_unenforced_constraints_give_a_warning_unless_strict(
    server: Served, path: str, body: dict[str, Any], field: str
) -> None:
    limits = {"/v1/responses": {"max_output_tokens": 60}, "/api/chat": {}, "/api/generate": {}}
    body = limits.get(path, {"max_tokens": 60}) | body
    answer = httpx.post(server.url + path, json=body, timeout=60, trust_env=False, verify=False)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-cairn-warning"] == f'{field}: "not" is not enforced'
    body = body | {"stream": True}
    with httpx.Client(trust_env=False, verify=False, timeout=60) as http:
        stream = http.post(server.url + path, json=body)
    assert stream.status_code == 200 and stream.headers["x-cairn-warning"] == f'{field}: "not" is not enforced'


def test_a_bomb_costs_its_own_request_alone(server: Served) -> None:
    bombs: list[Any] = [
        {"enum": [f"x{i}" * 3 for i in range(15_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 200} for i in range(3_000)}},
        {"type": "string", "pattern": "^((((a{1,400}){1,400}){1,400}){1,400})$"},
    ]
    for bomb in bombs:
        began = time.monotonic()
        answer = ask(server, guided_json=bomb, max_tokens=1)
        assert answer.status_code in (200, 400) and time.monotonic() - began < 40, answer.text
    assert content(ask(server, guided_choice=["well"])) == "well"


# ------------------------------------------------------------------------------------------------------------ calls


def calls(answer: Any) -> list[tuple[str, Any]]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    made = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if made else "stop"), choice
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}, {"now"}),
    ],
)
def test_an_answer_is_made_to_call(server: Served, choice: Any, names: set[str]) -> None:
    for seed in range(3):
        more: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice, "seed": seed}
        made = calls(ask(server, **more, parallel_tool_calls=False))
        assert len(made) == 1 and made[0][0] in names
        for name, arguments in made:
            assert arguments == {} if name == "now" else set(arguments) == {"city", "days"}
            assert name == "now" or (len(arguments["city"]) <= 8 and arguments["days"] <= 9)


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "edit"}, "required", "auto"])
def test_a_custom_tool_gets_what_its_lark_allows(server: Served, choice: Any) -> None:
    """Also with `tool_choice: auto`: any call that is made follows the grammar."""
    lark = 'start: head line{1,2}\nhead: "*** " ("add" | "cut") LF\nline: SIGN /[a-z]{1,6}/ LF\nSIGN: "+" | "-"\n'
    form = {"type": "grammar", "syntax": "lark", "definition": lark + "%import common.LF\n"}
    tools = [{"type": "custom", "name": "edit", "description": "changes a file", "format": form}]
    for n in range(4):
        body = {"input": f"Add line {n}.", "tools": tools, "tool_choice": choice, "max_output_tokens": 150}
        answer = httpx.post(server.url + "/v1/responses", json=body, timeout=60, trust_env=False, verify=False)
        assert answer.status_code == 200 and "x-cairn-warning" not in answer.headers, answer.text
        calls = [item for item in answer.json()["output"] if item["type"] == "custom_tool_call"]
        assert calls or choice == "auto"
        for call in calls:
            assert re.fullmatch(r"\*\*\* (add|cut)\n([+-][a-z]{1,6}\n){1,2}", call["input"]), call


def test_tools_and_a_schema_together(server: Served) -> None:
    """The answer either calls a tool or follows the schema."""
    for seed in range(4):
        answer = ask(server, tools=[TIME], response_format={"type": "json_object", "schema": {"const": 1}}, seed=seed)
        made = calls(answer)
        assert [name for name, _ in made] == ["now"] * len(made)
        assert made or answer.json()["choices"][0]["message"]["content"] == "1"


def test_a_strict_tool_that_cannot_be_held_to_is_named_and_another_is_not(server: Served) -> None:
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"type": "null"}}}}
    strict = {"type": "function", "function": {**loose["function"], "strict": True}}  # type: ignore[dict-item]
    refused = ask(server, tools=[strict])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools" and "not" in refused.text
    answer = ask(server, tools=[loose], tool_choice="required", parallel_tool_calls=False, max_tokens=20)
    assert answer.json()["choices"][0]["finish_reason"] in ("tool_calls", "length")
    assert answer.headers["x-cairn-warning"] == 'tools: f: "not" is not enforced'


def test_a_turn_of_an_agent_is_held_to_its_form(server: Served) -> None:
    with httpx.Client(trust_env=False, verify=False, timeout=60, base_url=server.url) as http:
        assert http.post("/v1/agents", json={"id": "formal", "tools": [WEATHER]}).status_code < 300
        turns = "/v1/agents/formal/turns"
        for number in range(3):
            form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "green"]}}}
            body: Any = {"messages": ASKED, "max_tokens": 200, "seed": number, "response_format": form}
            answer = http.post(turns, json=body)
            message = answer.json()["choices"][0]["message"]
            assert message["content"] in ('"red"', '"green"') or message["tool_calls"][0]["function"]["name"]
        response = http.post(turns, json={"messages": ASKED, "max_tokens": 60, "guided_json": NOT})
        assert response.headers["x-cairn-warning"] == 'guided_json: "not" is not enforced'
        refused = http.post(turns, json={"messages": ASKED, "guided_regex": "("})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "guided_regex"


def test_presets_of_other_servers_are_sampled_with_and_repeat(server: Served) -> None:
    preset: dict[str, Any] = {
        **{"typical_p": 0.95, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.1, "dry_multiplier": 0.8},
        **{"dry_sequence_breakers": ["\n"], "dynatemp_range": 0.3, "bad_words": ["the"], "logit_bias": [["a", -1.5]]},
        **{"samplers": "edskypmxt", "seed": 4, "max_tokens": 20},
    }
    texts = {ask(server, **preset).json()["choices"][0]["message"]["content"] for _ in range(2)}
    assert len(texts) == 1
    four = ask(server, **preset, n=4).json()["choices"]
    assert four[0]["message"]["content"] in texts and "the" not in four[0]["message"]["content"].split()
    only = ask(server, allowed_token_ids=[100], max_tokens=3, logprobs=True).json()["choices"][0]
    assert len({one["token"] for one in only["logprobs"]["content"]}) == 1
