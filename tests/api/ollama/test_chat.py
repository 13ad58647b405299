"""Ollama's API: wire shapes, prompts, downloads, and ollama-python over a real port."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.api.chat.parse import parse
from cairn.api.chat.schemas import ChatBody
from cairn.api.ollama import models as ollama_models
from cairn.api.ollama.schemas import OllamaChatBody, Options, chat_of
from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.models.families.end_tokens import Middle
from cairn.models.hub.snapshots import Progress
from cairn.types.errors import CairnError, GenerationFailed, ModelError
from cairn.types.outputs import Delta, FinishReason, TokenLogprob, ToolCallDelta
from cairn.types.request import SamplingExtras
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.service.tiny import TEMPLATE, make_model, serving

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = ToolCallDelta(index=0, id="call_1", name="weather", arguments='{"place": "Oslo"}')
CHAT, GENERATE = "/api/chat", "/api/generate"


async def post(at: Site, path: str, value: Any, method: str = "POST", **headers: str) -> httpx.Response:
    """Send a POST as Ollama's own client does: JSON without a content type."""
    async with at.http() as http:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return await http.request(method, path, content=json.dumps(value), headers=named)


def lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot"])},
    optional={
        name: JSON | st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text()})}))
        for name in ("content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images")
    },
)
FIELDS = st.dictionaries(
    st.sampled_from(["options", "think", "format", "tools", "template", "stream", "logprobs", "keep_alive"]), JSON
)
OPTIONS = st.dictionaries(st.sampled_from([*Options.model_fields, "mirostat", "num_gpu"]), JSON)
# ------------------------------------------------------------------------------------------------------- the answers


STEPS = [
    Delta(reasoning="hm", tokens=(1, 2)),
    Delta(text="Hel", tokens=(3,)),
    Delta(text="lo", tokens=(4,)),
    Delta(tool_calls=(CALL,), tokens=(5,)),
]


def service(*steps: Any, reason: FinishReason = FinishReason.STOP) -> ScriptedService:
    return ScriptedService(lambda request: [*(steps or STEPS), done(reason, prompt=2, completion=5)])


async def test_the_last_line_of_a_chat_reports_its_cost() -> None:
    async with site(service(reason=FinishReason.TOOL_CALLS)) as at:
        streamed = lines(await post(at, CHAT, {"model": "any", "messages": HI, "tools": [TOOL], "think": True}))
        whole = (await post(at, CHAT, {"messages": HI, "tools": [TOOL], "stream": False})).json()
    messages = [line["message"] for line in streamed]
    assert messages[:3] == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    call = {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"place": "Oslo"}}}
    assert messages[3]["tool_calls"] == [call] and messages[4] == {"role": "assistant", "content": ""}
    assert [line["done"] for line in streamed] == [False] * 4 + [True]
    assert {line["model"] for line in streamed} == {"scripted"} and streamed[0]["created_at"].endswith("Z")
    last = streamed[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 2, 5)
    assert isinstance(last["total_duration"], int) and last["total_duration"] > 0
    assert whole["message"] == {
        "role": "assistant",
        "content": "Hello",
        "thinking": "hm",
        "tool_calls": [call],
    }
    assert whole["done"] and whole["eval_count"] == 5


async def test_a_generated_context_continues_in_the_next_request() -> None:
    scripted = service(Delta(text="Hello", tokens=(72, 73)), reason=FinishReason.LENGTH)
    async with site(scripted) as at:
        answer = (await post(at, GENERATE, {"prompt": "hi", "system": "be kind", "stream": False})).json()
        assert (answer["response"], answer["done_reason"]) == ("Hello", "length")
        assert scripted.prompts[-1][0] == [{"role": "system", "content": "be kind"}, HI[0]]
        assert answer["context"] == [*b"be kindhi", 72, 73]
        more = lines(await post(at, GENERATE, {"prompt": "more", "context": answer["context"]}))
        assert more[0]["response"] == "Hello" and scripted.streams[-1].request.prompt == (
            *answer["context"],
            *b"more",
        )
        wrong = await post(at, GENERATE, {"prompt": "more", "context": [300]})
        assert wrong.status_code == 400 and "context holds 300" in wrong.json()["error"]


async def test_raw_prompts_and_infills() -> None:
    scripted = service(Delta(text="Hello", tokens=(72,)))
    scripted.tokenizer.middle = Middle(258, 259, 260)
    async with site(scripted) as at:
        await post(at, GENERATE, {"prompt": "a<257>", "raw": True})
        assert scripted.streams[-1].request.prompt == (97, 257) and not scripted.prompts
        await post(at, GENERATE, {"prompt": "a", "suffix": "b"})
        assert scripted.streams[-1].request.prompt == (258, 97, 259, 98, 260)
        scripted.template = ""  # a base model: the prompt is used as it is
        assert (await post(at, GENERATE, {"prompt": "a"})).status_code == 200
        assert scripted.streams[-1].request.prompt == (97,)
        refused = await post(at, GENERATE, {"prompt": "a", "system": "be kind"})
        assert refused.status_code == 400 and "system needs a chat template" in refused.json()["error"]


async def test_options_reach_the_sampler_and_errors_use_the_clients_names() -> None:
    scripted = service()
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 5, "stop": ["x"]}
    more = {"repeat_penalty": 1.5, "num_ctx": 1 << 20, "num_gpu": 99, "mirostat": 0, "unheard_of": 1}
    async with site(scripted) as at:
        response = await post(at, CHAT, {"messages": HI, "options": options | more, "keep_alive": "5m"})
        assert response.status_code == 200
        result = response.headers.get_list("x-cairn-warning")
        assert any("options.unheard_of" in one for one in result) and any(
            "options.num_ctx is 1048576" in one for one in result
        )
        request = scripted.streams[-1].request
        params = request.sampling
        assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 3, 0.5)
        assert (params.min_p, params.seed, params.repetition_penalty, request.stop) == (0.1, 5, 1.5, ("x",))
        steady = {"mirostat": 1, "mirostat_tau": 4, "mirostat_eta": 0.2, "typical_p": 0.7}
        await post(at, CHAT, {"messages": HI, "options": steady})
        extras = scripted.streams[-1].request.sampling.extras
        assert extras == SamplingExtras(mirostat=1, mirostat_tau=4.0, mirostat_eta=0.2, typical_p=0.7)
        await post(at, CHAT, {"messages": HI, "options": {"num_predict": -2}})
        assert scripted.streams[-1].request.sampling.max_tokens > 100
        for wrong, name in (
            ({"temperature": 11}, "options.temperature"),
            ({"repeat_penalty": -1}, "options.repeat_penalty"),
            ({"mirostat": 3}, "options.mirostat"),
            ({"typical_p": 2}, "options.typical_p"),
            ({"temperature": "hot"}, "options.temperature"),
        ):
            refused = await post(at, CHAT, {"messages": HI, "options": wrong})
            assert refused.status_code == 400 and name in refused.json()["error"], refused.text


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"format": "xml"}, "format must be"),
        ({"think": 3}, "think must be"),
        ({"template": "{{ .Prompt }}"}, "template can only be"),
        ({"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a text"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "given beginning"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}, *HI]}, "messages[0].tool_calls must be"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
async def test_errors_have_ollamas_shape(more: dict[str, Any], error: str) -> None:
    async with site(service()) as at:
        refused = await post(at, CHAT, {"messages": HI} | more)
    assert refused.status_code == 400 and list(refused.json()) == ["error"]
    assert error in refused.json()["error"]


@settings(max_examples=60 if settings.default.derandomize else 150)
@given(st.lists(MESSAGE, min_size=1) | JSON, FIELDS, OPTIONS)
def test_any_body_becomes_a_chat_or_an_error(messages: Any, fields: Any, options: Any) -> None:
    try:
        body = parse(OllamaChatBody, {"messages": messages, "options": options} | fields, Config())
        if body.messages:
            parse(ChatBody, chat_of(body, lambda name: True, thinks=True), Config())
    except CairnError as error:
        assert 400 <= error.status < 500


async def test_thinking_is_switched_and_not_shown_while_off() -> None:
    scripted = service()
    async with site(scripted) as at:
        for think in (True, False, "high"):
            streamed = lines(await post(at, CHAT, {"messages": HI, "think": think}))
            assert scripted.prompts[-1][3] == {"enable_thinking": think is not False}
            assert any("thinking" in line["message"] for line in streamed) == (think is not False)
        scripted.thinks = False
        refused = await post(at, CHAT, {"messages": HI, "think": True})
        assert refused.status_code == 400 and "does not support thinking" in refused.json()["error"]


async def test_results_of_tools_find_their_calls() -> None:
    scripted = service()
    call = {"function": {"name": "weather", "arguments": {"b": 1, "a": 2}}}
    other = {"id": "own", "function": {"name": "time", "arguments": {}}}
    history = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    async with site(scripted) as at:
        assert (await post(at, CHAT, {"messages": history})).status_code == 200
    _, assistant, first, second = scripted.prompts[-1][0]
    one, two = assistant["tool_calls"]
    assert one["function"]["arguments"] == '{"b": 1, "a": 2}' and assistant["reasoning_content"] == "hm"
    assert (first["tool_call_id"], second["tool_call_id"]) == (two["id"], one["id"]) and two["id"] == "own"


async def test_log_probabilities() -> None:
    scripted = service(
        Delta(text="h", tokens=(104,), logprobs=(TokenLogprob(token=104, logprob=-0.5, top=((105, -1.0),)),))
    )
    async with site(scripted) as at:
        for path, more in (
            (CHAT, {"messages": HI}),
            (GENERATE, {"prompt": "hi"}),
            (GENERATE, {"prompt": "hi", "raw": True}),
        ):
            first, *_ = lines(await post(at, path, more | {"logprobs": True, "top_logprobs": 1}))
            (entry,) = first["logprobs"]
            assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["token"]) == ("h", -0.5, "i")
            assert scripted.streams[-1].request.sampling.top_logprobs == 1


async def test_a_failure_after_the_beginning_is_a_line() -> None:
    scripted = ScriptedService(lambda request: [Delta(text="Hel", tokens=(1,)), GenerationFailed("no number")])
    async with site(scripted) as at:
        first, last = lines(await post(at, CHAT, {"messages": HI}))
        assert first["message"]["content"] == "Hel" and last == {"error": "no number"}
        refused = await post(at, CHAT, {"messages": HI}, X_Cairn_Resumable="1")
        assert refused.status_code == 400 and "server-sent events" in refused.json()["error"]


async def test_a_silent_stream_is_kept_awake_by_lines() -> None:
    scripted = ScriptedService(lambda request: [0.3, Delta(text="hi", tokens=(1,)), done()])
    async with site(scripted, Config(heartbeat=0.1)) as at:
        streamed = lines(await post(at, CHAT, {"messages": HI}))
    assert streamed[0]["message"] == {"role": "assistant", "content": ""} and not streamed[0]["done"]


async def test_without_a_prompt_the_model_is_loaded_already() -> None:
    async with site(service()) as at:
        chat = (await post(at, CHAT, {"model": "x"})).json()
        text = (await post(at, GENERATE, {"model": "x", "keep_alive": 0})).json()
    assert (chat["message"], chat["done"], chat["done_reason"]) == ({"role": "assistant", "content": ""}, True, "load")
    assert (text["response"], text["done"], text["done_reason"]) == ("", True, "load")


async def test_a_foreign_page_may_not_send_a_body_without_a_preflight() -> None:
    async with site(service()) as at:
        refused = await post(at, CHAT, {"messages": HI}, Origin="http://evil.example")
        assert refused.status_code == 403 and "evil.example" in refused.json()["error"]


async def test_a_strict_server_knows_the_tag_that_clients_add() -> None:
    scripted = service()
    scripted.strict = True
    async with site(scripted) as at:
        assert (await post(at, CHAT, {"model": "scripted:latest", "messages": HI})).status_code == 200
        refused = await post(at, CHAT, {"model": "other", "messages": HI})
        assert refused.status_code == 404 and "scripted" in refused.json()["error"]


# -------------------------------------------------------------------------------------------------------- the models


async def test_the_front_door() -> None:
    async with site(service(), Config(api_key=(Secret("k"),), page=False)) as at, at.http() as http:
        assert (await http.get("/")).text == "Ollama is running"
        assert (await http.head("/")).status_code == 200
        page = await http.get("/", headers={"accept": "text/html,*/*"})
        assert page.status_code == 404 and "Cairn listens here" in page.json()["error"]["message"]
        assert f"{at.url}/v1" in page.json()["error"]["message"]


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def pull(model: str, *, progress: Any, sleep: Any) -> Path:
        asked.append(model)
        progress(Progress("a.gguf", 5, 10))
        sleep(0.6)
        if model == "org/broken":
            raise ModelError("the hub has no model org/broken")
        progress(Progress("a.gguf", 10, 10))
        return Path("x")

    monkeypatch.setattr(ollama_models.hub, "pull", pull)
    return asked


async def test_a_pull_reports_progress(pulls: list[str]) -> None:
    async with site(service()) as at:
        streamed = lines(await post(at, "/api/pull", {"name": "org/model"}))
        assert [line["status"] for line in streamed] == [
            "pulling manifest",
            "pulling a.gguf",
            "verifying sha256 digest",
            "success",
        ]
        assert (streamed[1]["total"], streamed[1]["completed"]) == (10, 5)
        assert (await post(at, "/api/pull", {"model": "org/model", "stream": False})).json() == {"status": "success"}
        assert pulls == ["org/model"] * 2
        assert lines(await post(at, "/api/pull", {"model": "scripted"}))[-1] == {"status": "success"}
        assert pulls == ["org/model"] * 2, "a served model is present"


async def test_a_pull_that_fails(pulls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    async with site(service()) as at:
        assert lines(await post(at, "/api/pull", {"model": "org/broken"}))[-1] == {
            "error": "the hub has no model org/broken"
        }
        whole = await post(at, "/api/pull", {"model": "org/broken", "stream": False})
        assert whole.status_code == 500 and "no model" in whole.json()["error"]
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        nothing = await post(at, "/api/pull", {"model": "../x"})
        assert nothing.status_code == 400 and "hub id" in nothing.json()["error"] and "../x" not in pulls


async def test_downloads_need_the_admin_key(pulls: list[str]) -> None:
    closed = Config(api_key=(Secret("k"),), admin_key=Secret("a"))
    async with site(service(), closed) as at, site(service(), Config(host="0.0.0.0", unsafe_no_auth=True)) as bare:
        for path, method in (("/api/pull", "POST"), ("/api/delete", "DELETE")):
            body = {"model": "org/model"}
            assert (await post(at, path, body, method, Authorization="Bearer k")).status_code == 401
            assert (await post(bare, path, body, method)).status_code == 403
        assert (await post(at, "/api/pull", body, Authorization="Bearer a")).status_code == 200


async def test_models_are_removed_but_not_the_one_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--gone" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    async with site(service(), Config(model="demo")) as at:
        served = await post(at, "/api/delete", {"model": "scripted"}, "DELETE")
        assert served.status_code == 409 and "being served" in served.json()["error"]
        assert (await post(at, "/api/delete", {"model": "org/gone"}, "DELETE")).status_code == 200
        assert not snapshot.exists()
        unknown = await post(at, "/api/delete", {"model": "org/gone"}, "DELETE")
        assert unknown.status_code == 404 and "not downloaded" in unknown.json()["error"]


async def test_copies_must_be_existing_names() -> None:
    async with site(service()) as at:
        for source, destination, status in (
            ("scripted", "scripted", 200),
            ("scripted", "mine", 400),
            ("other", "mine", 404),
        ):
            response = await post(at, "/api/copy", {"source": source, "destination": destination})
            assert response.status_code == status, response.text


# --------------------------------------------------------------------------------------------------- the real client


async def test_the_ollama_client(tmp_path: Path) -> None:
    ollama = pytest.importorskip("ollama")
    pieces = ["<think>", "I see", ".", "</think>", "\n\n", "The sky", " is", " blue."]
    template = TEMPLATE + "{# enable_thinking <think> #}"
    kinds = dict.fromkeys([*CONTROLS], 3) | {"<think>": 4, "</think>": 4}
    model = write_scripted(tmp_path / "said.gguf", pieces, template=template, kinds=kinds)
    more = {"served_name": "mine", "engine": "cpu"}
    async with (
        serving(model, **more) as served,
        site(served, Config(model=str(model))) as at,
        ollama.AsyncClient(host=at.url, trust_env=False) as client,
    ):
        chat = await client.chat(model="mine", messages=HI, options={"temperature": 0, "num_predict": 20})
        assert (chat.message.content, chat.message.thinking) == ("The sky is blue.", "I see.")
        assert chat.done_reason == "stop" and chat.eval_count == len(pieces) + 1 and chat.eval_duration > 0
        parts = [part async for part in await client.chat(model="mine", messages=HI, stream=True)]
        assert "".join(part.message.content for part in parts) == "The sky is blue." and parts[-1].done
        history = [*HI, chat.message, {"role": "user", "content": "go on"}]
        again = await client.chat(model="mine", messages=history)
        assert again.message.content == "The sky is blue."
        text = await client.generate(model="mine", prompt="hi")
        assert text.response == "The sky is blue." and text.context
        (one,) = (await client.list()).models
        assert one.model == "mine" and one.size > 0 and one.modified_at.year > 2000 and one.details.format == "gguf"
        shown = await client.show("mine:latest")
        assert shown.capabilities == ["completion", "thinking"] and shown.template == template
        assert shown.modelinfo[f"{one.details.family}.context_length"] == served.info.context
        (loaded,) = (await client.ps()).models
        assert loaded.context_length == served.info.context and loaded.expires_at.year == 9999
        assert (await client.pull("mine")).status == "success"
        assert (await client.show("other")).template == template, "as a chat with this name is answered"
        served.strict = True
        with pytest.raises(ollama.ResponseError, match="not found"):
            await client.show("other")
        served.strict = False
        with pytest.raises(ollama.ResponseError, match="must be from"):
            await client.chat(model="mine", messages=HI, options={"temperature": 11})


async def test_a_chat_that_goes_on_finds_its_kv(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as served, site(served) as at:
        first = (await post(at, CHAT, {"messages": HI, "options": {"num_predict": 40}, "stream": False})).json()
        history = [*HI, first["message"], {"role": "user", "content": "more"}]
        second = (await post(at, CHAT, {"messages": history, "options": {"num_predict": 4}, "stream": False})).json()
        assert second["cairn"]["pool"] > first["prompt_eval_count"] - 16


def test_results_are_matched_to_calls_in_linear_time() -> None:
    def ids(*messages: dict[str, Any]) -> list[str]:
        chat = chat_of(
            OllamaChatBody(messages=[*messages, {"role": "user", "content": "q"}]), lambda name: False, thinks=False
        )
        return [message["tool_call_id"] for message in chat["messages"] if message["role"] == "tool"]

    def calls(*names: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in names]}

    def result(**fields: str) -> dict[str, Any]:
        return {"role": "tool", "content": "r", **fields}

    assert ids(calls("f", "g", "f"), result(tool_name="g"), result(), result(name="f"), result()) == [
        *("call_1_1", "call_0_0", "call_2_2", "call_0"),
    ]
    assert ids(calls("f", "g"), result(tool_call_id="call_0_0"), result(tool_name="f")) == ["call_0_0", "call_1_1"]
    assert ids(calls("f"), result(tool_call_id="other"), result()) == ["other", "call_0_0"]
    began = time.process_time()
    many = [result(tool_name="nobody"), result(tool_call_id="none")] * 2_000
    assert len(ids(calls(*(f"f{at}" for at in range(15_000))), *many)) == 4_000
    assert time.process_time() - began < 2.0  # before: twice that, and quadratic
