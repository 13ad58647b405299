"""A real server process with the fake engine, through the client libraries that people use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.process import Served, served

MESSAGES: Any = [{"role": "user", "content": "Tell me something about a server that keeps what it has computed."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(max_running=4, max_queue=4) as process:
        yield process


def client(server: Served) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, verify=False, timeout=30)
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http)


def test_chat_with_the_openai_client(server: Served) -> None:
    with client(server) as api:
        options: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 20, "logprobs": True}
        options |= {"top_logprobs": 2}
        whole = api.chat.completions.create(**options)
        chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == (whole.choices[0].message.content or "")
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
        tokens = [entry.token for entry in whole.choices[0].logprobs.content]
        assert len(tokens) == 20 and all(
            len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in whole.choices[0].logprobs.content
        )
        streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
        assert [entry.token for piece in streamed for entry in piece.content or ()] == tokens
        assert whole.usage and chunks[-1].usage
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_choices_differ_and_a_seed_repeats(server: Served) -> None:
    with client(server) as api:
        options: Any = {"model": "demo", "messages": MESSAGES, "temperature": 1, "max_tokens": 16, "n": 4}
        texts = [
            [choice.message.content for choice in api.chat.completions.create(**options, seed=seed).choices]
            for seed in (7, 7, 8)
        ]
        assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 4
        unseeded = [api.chat.completions.create(**options).choices[0].message.content for _ in range(2)]
        assert unseeded[0] != unseeded[1]


def test_tools_are_offered(server: Served) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
    with client(server) as api:
        options: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
        plain = api.chat.completions.create(**options)
        offered = api.chat.completions.create(**options, tools=[tool])
        none = api.chat.completions.create(**options, tools=[tool], tool_choice="none")
        assert plain.usage and offered.usage and none.usage
        assert offered.usage.prompt_tokens > plain.usage.prompt_tokens == none.usage.prompt_tokens


def test_echo_scores_the_prompt(server: Served) -> None:
    with client(server) as api:
        options: Any = {"model": "demo", "prompt": "What is Cairn?", "echo": True, "logprobs": 1}
        scored = api.completions.create(**options, max_tokens=0)
        said = api.completions.create(**options, max_tokens=3, temperature=0)
        assert scored.choices[0].text == "What is Cairn?" and scored.choices[0].logprobs
        logprobs = scored.choices[0].logprobs
        assert logprobs.token_logprobs and logprobs.tokens and said.choices[0].logprobs
        assert logprobs.token_logprobs[0] is None and all(value is not None for value in logprobs.token_logprobs[1:])  # type: ignore[redundant-expr]
        assert "".join(logprobs.tokens) == "What is Cairn?"
        assert said.choices[0].text.startswith("What is Cairn?")
        again = said.choices[0].logprobs
        assert (again.tokens or [])[: len(logprobs.tokens)] == logprobs.tokens
        assert (again.token_logprobs or [])[: len(logprobs.tokens)] == logprobs.token_logprobs
        offsets = again.text_offset or []
        assert offsets[0] == 0 and offsets == sorted(offsets) and len(offsets) == len(again.tokens or [])


async def test_a_full_queue_is_a_429_and_what_was_taken_finishes(server: Served) -> None:
    """Known failure 41: the queue is bounded, Retry-After is in whole seconds, and nobody gets a 503 or a closed
    connection.
    """
    body = {"model": "demo", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False, timeout=60, limits=limits) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(40)))
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) + len(refused) == 40 and len(taken) >= 8 and refused
    assert len({answer.json()["choices"][0]["text"] for answer in taken}) == 1
    assert all(answer.json()["usage"]["completion_tokens"] == 300 for answer in taken)
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 600
        assert answer.json()["error"]["type"] == "rate_limit_error" and answer.json()["error"]["code"] == "overloaded"


async def test_metrics_are_recorded(server: Served) -> None:
    """Known failure 46."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False, timeout=60) as http:

        async def values() -> dict[str, float]:
            text = (await http.get("/metrics")).text
            pairs = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, _, value in pairs}

        before = await values()
        body = {"model": "demo", "prompt": "x", "max_tokens": 7, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        after = await values()
    grown = {name: value - before[name] for name, value in after.items() if value != before.get(name)}

    def growth(part: str) -> float:
        return sum(value for name, value in grown.items() if part in name)

    assert growth("generation_tokens_total") == 7 and growth("prompt_tokens_total") >= 1
    assert growth("time_to_first_token_seconds_count") == 1 and growth("e2e_request_latency_seconds_count") == 1
    assert growth('finished_reason="length"') == 1
    assert set(after) == set(before)


async def test_a_request_is_seen_and_cancelled_over_http(server: Served) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False, timeout=60) as http:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            id = answer.headers["x-request-id"]
            report = (await http.get(f"/v1/requests/{id}")).json()
            assert report["state"] in ("waiting", "running")
            cancelled = (await http.post(f"/v1/requests/cmpl-{id}/cancel")).json()
            assert cancelled["cancelled"] is True and cancelled["state"] == "cancelled"
            text = "".join([line async for line in answer.aiter_lines() if line.startswith('data: {"error"')])
        assert json.loads(text.removeprefix("data: "))["error"]["code"] == "cancelled"
        after = (await http.get(f"/v1/requests/{id}")).json()
        assert after["state"] == "cancelled" and after["completion_tokens"] >= report["completion_tokens"]
