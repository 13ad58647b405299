"""Clients that resend the whole conversation, against a real server that is restarted in between.

Whatever clients do to resent messages without changing what was said, everything but the last incomplete chunk and the
new message comes from stored KV.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.agents.house import talking_model
from tests.api.process import Served, free_port, served
from tests.service.tiny import CONTROLS

CHUNK = 64
CONTROL_IDS = 256
"""First id of the byte tokenizer's control tokens, which come in order."""
BOOK = "The house book. " + " ".join(
    f"On day {day} the yard was swept and {day % 7} hens were fed." for day in range(20)
)
"""The shared beginning of conversations, after a word of each one's own: the tests share a server."""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Messages = list[dict[str, Any]]
Ask = Callable[[Served, Messages], dict[str, Any]]


class Home:
    """A server that can be restarted on its folders."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folders = {"agents_dir": str(folder / "agents"), "kv_dir": str(folder / "kv")}
        self._options = {"kv_load": "always", "port": free_port(), **folders, **options}
        self.server = Served(**self._options)

    def restart(self) -> None:
        """Stop the server as a user does, and start it again."""
        self.server.post("/v1/cache/flush", {})
        self.server.signal()
        assert self.server.wait() == 0
        self.server = Served(**self._options)
        self.server.wait_ready()


DEMO: dict[str, Any] = {"model": "demo", "engine": "cpu", "kernels": "auto"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = Home(tmp_path_factory.mktemp("demo"), **DEMO)
    try:
        home.server.wait_ready()
        yield home
    finally:
        home.server.end()


def body(messages: Messages, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 40} | more


def with_openai(server: Served, messages: Messages, **more: Any) -> dict[str, Any]:
    """Return the answer as plain JSON."""
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http) as api:
        answer = api.chat.completions.create(**body(messages, **more))
        return answer.model_dump(exclude_none=True)


def with_curl(server: Served, messages: Messages, **more: Any) -> dict[str, Any]:
    command = ["curl", "-sS", "--noproxy", "*", "-H", "content-type: application/json", "-d", "@-"]
    sent = json.dumps(body(messages, **more)).encode()
    done = subprocess.run([*command, server.url + "/v1/chat/completions"], input=sent, capture_output=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def whole(answer: dict[str, Any]) -> int:
    """Return the number of tokens in whole chunks of KV after this answer; its last token was never an input."""
    usage = answer["usage"]
    return int((usage["prompt_tokens"] + usage["completion_tokens"] - 1) // CHUNK * CHUNK)


def said(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def wording(answer: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the content of an answer without the ids of its calls."""
    return said(answer).get("content"), [call["function"] for call in said(answer).get("tool_calls") or ()]


@pytest.mark.parametrize("client", [with_openai, with_curl])
def test_a_conversation_that_is_resent_is_computed_once(demo: Home, client: Ask) -> None:
    """Known failures 27, 39: four questions, with a restart before the third and fourth."""
    if client is with_curl and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    messages: Messages = [{"role": "system", "content": f"{client.__name__}. {BOOK}"}]
    last = None
    for number, question in enumerate(("Hi, I am Zorvak.", "What is my name?", "And who feeds the hens?", "Thanks.")):
        if number >= 2:
            demo.restart()
        messages.append({"role": "user", "content": question})
        answer = client(demo.server, messages)
        if last is not None:
            assert cached(answer) >= whole(last) > 250, f"question {number}"
        elif number == 0:
            assert cached(answer) < 16, "at most the beginning that all chats share"
        messages.append({"role": "assistant", "content": said(answer)["content"]})
        last = answer
    assert last is not None
    report = last["usage"]["cairn"]
    assert report["disk"] >= CHUNK * 4 and report["computed"] + cached(last) == last["usage"]["prompt_tokens"]


def test_a_reformatted_tool_call_is_the_same_and_an_edited_one_is_not(demo: Home, tmp_path: Path) -> None:
    messages: Messages = [{"role": "system", "content": BOOK}]
    for question in ("What is the weather in Paris?", "Please look up the weather in Oslo.", "Weather in Rome?"):
        asked = [*messages, {"role": "user", "content": question}]
        answer = with_openai(demo.server, asked, tools=[WEATHER])
        if said(answer).get("tool_calls"):
            break
    (call,) = said(answer)["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=4, ensure_ascii=True)
    assert arguments != call["function"]["arguments"]
    other = {**call, "function": {**call["function"], "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    demo.restart()
    for content in (None, ""):
        resent = [*asked, {"role": "assistant", "content": content, "tool_calls": [other]}, result]
        again = with_openai(demo.server, resent, tools=[WEATHER])
        assert cached(again) >= whole(answer) > 250
    edited = {**call, "function": {**call["function"], "arguments": '{"city": "Xanadu by the sea"}'}}
    resent = [*asked, {"role": "assistant", "content": None, "tool_calls": [edited]}, result]
    changed = with_openai(demo.server, resent, tools=[WEATHER])
    stranger = Home(tmp_path / "stranger", **DEMO)  # knows nothing but what it is sent
    try:
        stranger.server.wait_ready()
        reference = with_openai(stranger.server, resent, tools=[WEATHER])
    finally:
        stranger.server.end()
    assert cached(reference) == 0
    assert changed["usage"]["prompt_tokens"] == reference["usage"]["prompt_tokens"]
    assert wording(changed) == wording(reference)
    (miss,) = changed["usage"]["cairn"]["miss"]
    assert "Xanadu" in json.dumps(miss), "the edited text is used, and the report shows it"


def test_reasoning_that_a_client_leaves_out_is_put_back(tmp_path: Path) -> None:
    """Most clients do not send it back. Only letters and end tokens are likely for the fake model here."""
    home = Home(tmp_path, model=str(talking_model(tmp_path / "model")), served_name="demo")
    try:
        home.server.wait_ready()
        letters = [home.server.post("/tokenize", {"prompt": char})["tokens"][0] for char in "abcdefghijklmnop"]
        ends = [CONTROL_IDS + CONTROLS.index(one) for one in ("</think>", "<|im_end|>")]
        extra = {"chat_template_kwargs": {"force_thinking": True}}
        more: dict[str, Any] = {"extra_body": extra, "temperature": 1, "logit_bias": {id: 60 for id in letters + ends}}
        messages: Messages = [{"role": "system", "content": BOOK[:300]}, {"role": "user", "content": "Why?"}]
        for seed in range(40):
            answer = with_openai(home.server, messages, seed=seed, **more)
            message = said(answer)
            whole_answer = answer["choices"][0]["finish_reason"] == "stop"
            if whole_answer and message.get("content") and len(message.get("reasoning_content", "")) > 10:
                break
        else:
            raise AssertionError("the fake model never thinks and then speaks")
        home.restart()
        resent = [*messages, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And?"}]
        again = with_openai(home.server, resent, **more)
        assert cached(again) >= whole(answer) > 250
        spoken = again["usage"]["prompt_tokens"]
        resent[2] = {"role": "assistant", "content": message["content"] + " No."}
        edited = with_openai(home.server, resent, **more)
        assert edited["usage"]["prompt_tokens"] < spoken, "the edited answer is rendered without its former reasoning"
    finally:
        home.server.end()


BLOCK = 16


def test_a_first_exchange_is_there_after_a_restart(tmp_path: Path) -> None:
    """Also a short exchange that belongs to no known conversation, on a server that is stopped before it was ever
    idle.
    """
    options: dict[str, Any] = {"model": "demo", "kv_dir": str(tmp_path / "kv")}
    prompt = [3 + 7 * at % 90 for at in range(50)]
    asked = {"prompt": prompt, "n_predict": 190, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    with served(**options) as server:
        first = server.post("/completion", asked)
        assert first["cairn"]["computed"] == len(prompt) and len(first["tokens"]) == 190
        twice = server.post("/completion", asked | {"prompt": prompt[:9]})
        assert twice["timings"]["cache_n"] == 8, "also a part of a block is reused, except the last token"
        server.signal()
        assert server.wait() == 0
    with served(**options) as server:
        new = [5, 6, 7]
        longer = [*prompt, *first["tokens"], *new]
        report = server.post("/completion", asked | {"prompt": longer})["cairn"]
        assert report["disk"] + report["computed"] == len(longer)
        assert report["computed"] <= len(new) + BLOCK, report
    with served(**options) as server:
        again = server.post("/completion", asked)
        assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] == len(prompt) - 1
