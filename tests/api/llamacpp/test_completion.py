"""llama-server's own routes: wire shapes and prompts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.llamacpp import completion
from cairn.config.config import Config
from cairn.models.families.end_tokens import Middle
from cairn.types.errors import GenerationFailed
from cairn.types.outputs import Delta, FinishReason, TokenLogprob
from cairn.types.request import SamplingExtras
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, events, site
from tests.service.tiny import make_model, serving

HI = [{"role": "user", "content": "hi"}]


async def post(at: Site, path: str, **body: Any) -> httpx.Response:
    async with at.http() as http:
        return await http.post(path, json=body)


def service(*steps: Any, reason: FinishReason = FinishReason.STOP) -> ScriptedService:
    script = steps or (Delta(text="Hel", tokens=(72,)), Delta(text="lo\n", tokens=(73, 74)))
    return ScriptedService(lambda request: [*script, done(reason, prompt=3, completion=3, cached=1)])


async def test_a_completion_in_one_piece() -> None:
    async with site(service(reason=FinishReason.LENGTH)) as at:
        answer = (await post(at, "/completion", prompt="one", n_predict=3, return_tokens=True, id_slot=2)).json()
    assert (answer["content"], answer["tokens"], answer["stop"], answer["stop_type"]) == (
        "Hello\n",
        [72, 73, 74],
        True,
        "limit",
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (3, 3, 1)
    assert (answer["prompt"], answer["model"], answer["has_new_line"], answer["truncated"]) == (
        "one",
        "scripted",
        True,
        False,
    )
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["n_ctx"]) == (3, 0.7, 128)
    timings = answer["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (1, 2, 3)


async def test_a_stream_ends_with_what_the_whole_is() -> None:
    scripted = service()
    async with site(scripted) as at:
        response = await post(
            at, "/completion", prompt="one", stream=True, timings_per_token=True, return_progress=True
        )
        begun, computed, *pieces, last = events(response.text)
    assert begun["prompt_progress"]["processed"] == begun["prompt_progress"]["cache"] == 0
    assert computed["prompt_progress"]["processed"] == 3 == computed["timings"]["prompt_n"]
    assert computed["prompt_progress"]["total"] == 3
    assert "".join(piece["content"] for piece in pieces) == "Hello\n" and not any(piece["stop"] for piece in pieces)
    assert [piece["tokens"] for piece in pieces] == [[72], [73, 74]]
    assert pieces[1]["timings"]["predicted_n"] == 3
    assert last["stop"] and last["content"] == "" and last["stop_type"] == "eos" and last["timings"]["predicted_n"] == 3


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "one"})]
)
async def test_openais_routes_have_timings_if_asked_for(path: str, asked: dict[str, Any]) -> None:
    figures = ("cache_n", "prompt_n", "predicted_n")
    async with site(service()) as at:
        assert "timings" not in (await post(at, path, **asked)).json()
        whole = (await post(at, path, **asked, timings_per_token=True, n=2)).json()
        result = whole.pop("timings")
        assert (result["cache_n"], result["predicted_n"]) == (1, 3) and len(whole["choices"]) == 2
        plain = events((await post(at, path, **asked, stream=True)).text)
        more = {"timings_per_token": True, "return_progress": True, "stream_options": {"include_usage": True}}
        timed = events((await post(at, path, **asked, stream=True, **more)).text)
    assert not any(one.keys() & {"timings", "prompt_progress"} for one in plain[:-1])
    progress = [one["prompt_progress"] for one in timed[:-1] if "prompt_progress" in one]
    total = progress[0]["total"]
    assert [(one["processed"], one["total"]) for one in progress] == [(0, total), (total, total)]
    assert all(one["time_ms"] >= 0 and one["cache"] == 0 for one in progress)
    results = [one["timings"] for one in timed[:-1] if "timings" in one and "prompt_progress" not in one]
    assert [tuple(one[name] for name in figures) for one in results] == [
        (0, total, 1),
        (0, total, 3),
        (1, total - 1, 3),
    ]
    kept = [one for one in timed[:-1] if "prompt_progress" not in one and one["choices"]]
    assert [one["choices"] for one in kept] == [one["choices"] for one in plain[:-1]], "nothing else is changed"
    assert timed[-1] == "[DONE]" and timed[-2]["usage"] and "timings" in timed[-3]


async def test_a_matched_stop_text_is_reported() -> None:
    scripted = service(Delta(text="a", tokens=(97, 98)))
    async with site(scripted) as at:
        answer = (await post(at, "/completion", prompt="one", stop=["b"])).json()
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", "b")


async def test_prompts_of_texts_and_tokens() -> None:
    scripted = service()
    async with site(scripted) as at:
        for prompt, tokens in (
            ("a", [(97,)]),
            ([97, 98], [(97, 98)]),
            (["a", 5, "b"], [(97, 5, 98)]),
            ([5, "b"], [(5, 98)]),
            (["a", "b"], [(97,), (98,)]),
            ([[97], "b", [5, "c"]], [(97,), (98,), (5, 99)]),
            ({"prompt_string": "a"}, [(97,)]),
        ):
            scripted.streams.clear()
            answer = (await post(at, "/completion", prompt=prompt)).json()
            assert [stream.request.prompt for stream in scripted.streams] == tokens, prompt
            assert isinstance(answer, list) == (len(tokens) > 1)
        for prompt in ([], [[]], 3, [True], {"multimodal_data": ["x"], "prompt_string": "a"}, [1.5], [[1], 2], None):
            refused = await post(at, "/completion", prompt=prompt)
            assert refused.status_code == 400 and "prompt" in refused.json()["error"]["message"], prompt


async def test_long_prompts_are_spelt_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = service()
    threads, spell = list[int](), scripted.tokenizer.spell

    def noted(ids: Sequence[int]) -> str:
        threads.append(threading.get_ident())
        return spell(ids)

    monkeypatch.setattr(scripted.tokenizer, "spell", noted)
    monkeypatch.setattr(completion, "INLINE", 6)
    async with site(scripted) as at:
        answers = (await post(at, "/completion", prompt=["hello", "you"], n_predict=3)).json()
        assert threads and threading.get_ident() not in threads
        assert [one["prompt"] for one in answers] == ["hello", "you"]
        threads.clear()
        await post(at, "/completion", prompt="hello", n_predict=3)
        assert threads == [threading.get_ident()]


async def test_probabilities_fields_and_biases() -> None:
    logprobs = (TokenLogprob(token=72, logprob=-0.5, top=((73, -1.0),)),)
    scripted = service(Delta(text="H", tokens=(72,), logprobs=logprobs))
    async with site(scripted) as at:
        answer = (await post(at, "/completion", prompt="a", n_probs=1)).json()
        (entry,) = answer["completion_probabilities"]
        assert (entry["id"], entry["token"], entry["top_logprobs"][0]["id"]) == (72, "H", 73)
        assert scripted.streams[-1].request.sampling.top_logprobs == 1
        fields = ["content", "generation_settings/n_predict", "nothing/here"]
        answer = (await post(at, "/completion", prompt="a", response_fields=fields, n_predict=4)).json()
        assert answer == {"content": "H", "generation_settings/n_predict": 4}
        await post(at, "/completion", prompt="a", logit_bias=[[5, 1.5], [6, False]])
        assert scripted.streams[-1].request.sampling.logit_bias == ((5, 1.5), (6, -100.0))
        await post(at, "/completion", prompt="a", mirostat=2, mirostat_tau=4, mirostat_eta=0.2)
        extras = scripted.streams[-1].request.sampling.extras
        assert extras == SamplingExtras(mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2)
        for wrong, name in (
            ({"logit_bias": [["a", 1]]}, "logit_bias"),
            ({"n_probs": 21}, "n_probs"),
            ({"repeat_penalty": -1}, "repeat_penalty"),
            ({"mirostat": 3}, "mirostat"),
            ({"n_predikt": 2}, "n_predict"),
        ):
            refused = await post(at, "/completion", prompt="a", **wrong)
            assert refused.status_code == 400 and name in refused.json()["error"]["message"], refused.text


async def test_infill() -> None:
    scripted = service()
    async with site(scripted) as at:
        body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c"}
        refused = await post(at, "/infill", **body)
        assert refused.status_code == 400 and "filling in the middle" in refused.json()["error"]["message"]
        scripted.tokenizer.middle = Middle(258, 259, 260)
        assert (await post(at, "/infill", **body)).json()["content"] == "Hello\n"
        assert scripted.streams[-1].request.prompt == (258, 97, 259, 98, 260, 99)
        await post(at, "/infill", input_prefix="<257>", input_suffix="", input_extra=[{"filename": "x", "text": "y"}])
        extra = b"\n\n--- snippet ---\n\ny"
        assert scripted.streams[-1].request.prompt == (*extra, 258, *b"<257>", 259, 260), "texts hold no control tokens"
        missing = await post(at, "/infill", input_prefix="a")
        assert missing.status_code == 400 and "input_suffix is missing" in missing.json()["error"]["message"]


async def test_a_failure_after_the_beginning_is_an_event() -> None:
    scripted = ScriptedService(lambda request: [Delta(text="Hel", tokens=(1,)), GenerationFailed("no number")])
    async with site(scripted) as at:
        *_, last = events((await post(at, "/completion", prompt="a", stream=True)).text)
    assert last["error"]["message"] == "no number"


async def test_slots_and_adapters() -> None:
    scripted = ScriptedService(lambda request: [60.0])
    async with site(scripted, Config(max_running=2)) as at, at.http() as http:
        slots = (await http.get("/slots")).json()
        assert [slot["is_processing"] for slot in slots] == [False, False] and slots[0]["n_ctx"] == 128
        scripted.generate(None)  # type: ignore[arg-type]
        assert [slot["is_processing"] for slot in (await http.get("/slots")).json()] == [True, False]
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 200
        scripted.generate(None)  # type: ignore[arg-type]
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 503
        assert (await http.get("/lora-adapters")).json() == []
        assert (await http.get("/v1/health")).json()["status"] == "ok"


@pytest.mark.parametrize("tools", [{}, {"tools": None}])
async def test_a_rendered_chat_is_a_prompt_of_the_same_tokens(tmp_path: Path, tools: dict[str, Any]) -> None:
    async with serving(make_model(tmp_path / "tiny")) as served, site(served) as at:
        chat = {"messages": HI, **tools}
        text = (await post(at, "/apply-template", **chat)).json()["prompt"]
        assert "hi" in text and "assistant" in text
        count = (await post(at, "/v1/chat/completions/input_tokens", **chat)).json()["input_tokens"]
        said = (await post(at, "/completion", prompt=text, n_predict=0)).json()
        assert (said["tokens_evaluated"], said["tokens_predicted"], said["content"]) == (count, 0, "")
        answer = (await post(at, "/v1/chat/completions", **chat, max_tokens=4, temperature=0)).json()
        again = (await post(at, "/completion", prompt=text, n_predict=4, temperature=0)).json()
        assert again["tokens_cached"] > 0 and again["tokens_evaluated"] == answer["usage"]["prompt_tokens"]
        assert again["tokens_predicted"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("prompt", [[-1], [1 << 40], ["a", -1], ["a", [1 << 31]]])
async def test_ids_of_no_token_are_refused(prompt: Any, tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as served, site(served) as at:
        answer = await post(at, "/completion", prompt=prompt)
        assert answer.status_code == 400 and "token id" in answer.text
