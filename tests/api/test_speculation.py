"""Speculative decoding over HTTP: the same answers with and without it, usage, metrics, and `prediction`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.process import Served, served

WORDS = " the and that with from this not are for have"
"""Words of one token each, so that any text of them encodes to the ids that were generated."""
PROMPT = "Say it again:" + WORDS * 4


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    """Yield a server that drafts seven tokens wherever text repeats, and one that never drafts."""
    with served(speculate="7") as guessing, served(speculate="off") as plain:
        yield guessing, plain


def post(server: Served, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, trust_env=False, verify=False, timeout=60)
    return answer.json() | {"status": answer.status_code}


def words(server: Served) -> list[int]:
    tokens: list[int] = post(server, "/tokenize", {"prompt": WORDS, "add_special_tokens": False})["tokens"]
    return tokens


def asked(server: Served, **more: Any) -> dict[str, Any]:
    """Return a chat whose answer consists of a few words only, so that it repeats itself."""
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 120, "ignore_eos": True}
    return body | {"allowed_token_ids": words(server)[:3], "temperature": 0} | more


def details(usage: dict[str, Any]) -> tuple[int, int]:
    completion_tokens_details = usage["completion_tokens_details"]
    return completion_tokens_details["accepted_prediction_tokens"], completion_tokens_details[
        "rejected_prediction_tokens"
    ]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "seed": 5}, {"temperature": 1, "seed": 2, "n": 3}])
def test_answers_are_the_same_and_usage_counts_guesses(servers: tuple[Served, Served], more: dict[str, Any]) -> None:
    guessing, plain = (post(server, "/v1/chat/completions", asked(server, **more)) for server in servers)
    texts = [[choice["message"]["content"] for choice in one["choices"]] for one in (guessing, plain)]
    assert texts[0] == texts[1] and all(texts[0])
    accepted, rejected = details(guessing["usage"])
    assert accepted > 0 and rejected > 0 and details(plain["usage"]) == (0, 0)
    assert guessing["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] > accepted


def test_a_stream_tells_the_same(servers: tuple[Served, Served]) -> None:
    guessing, _ = servers
    whole = post(guessing, "/v1/chat/completions", asked(guessing))
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    with openai.OpenAI(base_url=guessing.url + "/v1", api_key="none", max_retries=0, http_client=http) as api:
        body = asked(guessing)
        extra = {name: body.pop(name) for name in ("ignore_eos", "allowed_token_ids")}
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
        chunks = list(api.chat.completions.create(**body, **options))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == (whole["choices"][0]["message"]["content"])
    )
    usage = chunks[-1].usage
    assert usage and usage.completion_tokens_details
    counted = usage.completion_tokens_details
    assert (counted.accepted_prediction_tokens, counted.rejected_prediction_tokens) == details(whole["usage"])


def test_a_stop_text_ends_an_answer_in_the_middle_of_guesses(servers: tuple[Served, Served]) -> None:
    """The front ends the answer, perhaps before the worker knows; drafts until then are counted nevertheless."""
    whole = post(servers[0], "/v1/chat/completions", asked(servers[0]))["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 12]
    results = [post(server, "/v1/chat/completions", asked(server, stop=stop)) for server in servers]
    assert results[0]["choices"] == results[1]["choices"] and results[0]["choices"][0]["finish_reason"] == "stop"
    assert details(results[0]["usage"])[0] > 0


def test_metrics_and_other_dialects_report_guesses(servers: tuple[Served, Served]) -> None:
    guessing, _ = servers

    def counted(name: str) -> float:
        text = httpx.get(guessing.url + "/metrics", trust_env=False, verify=False).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"cairn:{name}_total")]
        return float(line.rpartition(" ")[2])

    names = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "generation_tokens_forced"
    before = [counted(name) for name in names]
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    text = post(guessing, "/v1/completions", body | {"allowed_token_ids": words(guessing)[:3]})
    accepted, rejected = details(text["usage"])
    after = [counted(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [accepted + rejected, accepted, 0]
    spoken = post(guessing, "/v1/responses", {"model": "demo", "input": PROMPT, "max_output_tokens": 30})
    assert {"accepted_prediction_tokens", "rejected_prediction_tokens"} <= spoken["usage"][
        "output_tokens_details"
    ].keys()


@pytest.mark.parametrize("parts", [False, True])
def test_a_predicted_answer_takes_fewer_steps_and_is_the_same(servers: tuple[Served, Served], parts: bool) -> None:
    """An answer without repetition can only be drafted from a prediction."""
    guessing, plain = servers
    messages = [{"role": "user", "content": "x"}]
    more = {"messages": messages, "allowed_token_ids": words(guessing), "temperature": 1, "seed": 9, "max_tokens": 30}
    expected = post(plain, "/v1/chat/completions", asked(plain, **more))["choices"][0]["message"]["content"]
    text = " " + expected.lstrip()
    content: Any = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if parts else text
    response = post(
        guessing, "/v1/chat/completions", asked(guessing, **more, prediction={"type": "content", "content": content})
    )
    alone = post(guessing, "/v1/chat/completions", asked(guessing, **more))
    assert response["choices"] == alone["choices"] and response["choices"][0]["message"]["content"] == expected
    assert details(response["usage"])[0] >= 15 > details(alone["usage"])[0]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ([], "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "image", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, "prediction.content[0].type"),
    ],
)
def test_an_invalid_prediction_is_refused(servers: tuple[Served, Served], prediction: Any, field: str) -> None:
    response = post(servers[0], "/v1/chat/completions", asked(servers[0], prediction=prediction))
    assert response["status"] == 400 and response["error"]["param"] == field, response


def test_a_prediction_longer_than_the_context_is_refused(servers: tuple[Served, Served]) -> None:
    """Refused by its number of tokens, or, if it is far too long, before it is tokenized."""
    for count in (6000, 200_000):
        prediction = {"type": "content", "content": WORDS * (count // 10)}
        response = post(servers[0], "/v1/chat/completions", asked(servers[0], prediction=prediction))
        assert (
            response["status"] == 400 and response["error"]["param"] == "prediction" and "context" in str(response)
        ), response


def test_an_agents_turn_takes_a_prediction_too(servers: tuple[Served, Served]) -> None:
    guessing, _ = servers
    agent = post(guessing, "/v1/agents", {})["id"]
    body = asked(guessing, prediction={"type": "content", "content": WORDS[:10]})
    turn = post(guessing, f"/v1/agents/{agent}/turns", body)
    assert turn["status"] == 200 and details(turn["usage"])[0] >= 0, turn
    wrong = post(guessing, f"/v1/agents/{agent}/turns", body | {"prediction": {"type": "content", "content": 1}})
    assert wrong["status"] == 400 and wrong["error"]["param"] == "prediction.content"
