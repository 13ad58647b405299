"""References to items of stored responses and conversations, as Vercel's AI SDK sends them in every second step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.api.openai.item_references import MAX_SOURCES
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from tests.api.openai.test_responses import TOOL, keeping, kept, post
from tests.api.scripted import ScriptedService
from tests.api.sockets import Site, site
from tests.scripted_model import CONTROLS, write_scripted
from tests.service.tiny import make_model
from tests.text import text_models

CALL = '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
PIECES = ["<think>", "I see", ".", "</think>", "\n\n", "Let me look.", "<tool_call>", CALL, "</tool_call>"]
KINDS = dict.fromkeys([*CONTROLS], 3) | dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>"), 4)
ASK = {"type": "message", "role": "user", "content": "How warm is it in Oslo?"}


def calling(folder: Path) -> Path:
    """Return a model that thinks, says something and calls a tool."""
    return write_scripted(folder / "m.gguf", PIECES, template=text_models.QWEN_TEMPLATE, kinds=KINDS)


def reference(id: str, *, typed: bool = True) -> dict[str, Any]:
    return {"type": "item_reference", "id": id} if typed else {"id": id}


async def prompt_of(at: Site, input: Any) -> int:
    """Return the number of prompt tokens of an input."""
    counted = await post(at, {"input": input, "tools": [TOOL]}, "/v1/responses/input_tokens")
    assert counted.status_code == 200, counted.text
    return int(counted.json()["input_tokens"])


@pytest.mark.parametrize("typed", [True, False])
async def test_the_second_step_refers_to_the_first(tmp_path: Path, typed: bool) -> None:
    """Every kind of item, also after a restart: the prompt is that of the items themselves, and is cached."""
    model = calling(tmp_path)
    more = {"engine": "cpu"}
    async with keeping(tmp_path / "agents", model, **more) as at:
        first = (await post(at, kept(input=[ASK], tools=[TOOL], max_output_tokens=50))).json()
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "7 degrees"}
    named = [ASK, *(reference(item["id"], typed=typed) for item in first["output"]), result]
    async with keeping(tmp_path / "agents", model, **more) as at:
        assert await prompt_of(at, named) == await prompt_of(at, [ASK, *first["output"], result])
        first = (await post(at, kept(input=[ASK], tools=[TOOL], max_output_tokens=50))).json()
        second = await post(at, kept(input=named, tools=[TOOL]))
        assert second.status_code == 200, second.text
        details = second.json()["usage"]["input_tokens_details"]
        assert details["cached_tokens"] >= first["usage"]["total_tokens"] - 17
        aside = await post(at, kept(input=named, tools=[TOOL], store=False, stream=True))
        assert aside.status_code == 200 and '"status":"incomplete"' in aside.text, "it is cut after 8 tokens"
        compacted = await post(at, {"input": named}, "/v1/responses/compact")
        assert compacted.status_code == 200, compacted.text


async def test_items_of_the_input_and_of_conversations_are_named_too(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        one = (await post(at, kept(input=[ASK]))).json()
        two = (await post(at, kept(input="more", previous_response_id=one["id"]))).json()
        listed = (await http.get(f"/v1/responses/{two['id']}/input_items?order=asc")).json()["data"]
        assert [item["role"] for item in listed] == ["user", "assistant", "user"]
        count = await prompt_of(at, listed)
        assert await prompt_of(at, [reference(item["id"]) for item in listed]) == count
        items = [{"role": "user", "content": "before"}, reference(one["output"][0]["id"])]
        made = (await post(at, {"items": items}, "/v1/conversations")).json()
        await post(at, kept(conversation=made["id"], input="now"))
        path = f"/v1/conversations/{made['id']}/items"
        listed = (await http.get(path + "?order=asc")).json()["data"]
        assert [item["role"] for item in listed] == ["user", "assistant", "user", "assistant"]
        assert listed[1]["content"][0]["text"] == one["output"][0]["content"][0]["text"]
        assert await prompt_of(at, [reference(one["id"]) for one in listed]) == await prompt_of(at, listed)
        added = await post(at, {"items": [reference(listed[0]["id"])]}, path)
        assert added.json()["data"][0]["content"][0]["text"] == "before"


def tenant(name: str) -> TenantKeys:
    return TenantKeys(name, (Secret(name),))


async def test_missing_items_are_one_404(tmp_path: Path) -> None:
    """Items of another tenant, deleted ones and made-up ones look alike, so that nobody can probe for them."""
    config = Config(tenants=(tenant("ada"), tenant("bob")))
    said = set()
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny"), config) as at, at.http() as http:

        async def ask(key: str, **body: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            return await http.post(
                "/v1/responses", json={"max_output_tokens": 4, "temperature": 0} | body, headers=headers
            )

        mine = (await ask("ada", input=[ASK])).json()["output"][0]["id"]
        aside = (await ask("bob", input=[ASK], store=False)).json()["output"][0]["id"]
        gone = (await ask("bob", input=[ASK])).json()
        await http.delete(f"/v1/responses/{gone['id']}", headers={"authorization": "Bearer bob"})
        made_up = ("msg_00000000000000ff_0", mine[:-1] + "7", "msg_x", "", "rs_" + "9" * 100 + "_0", "resp_1")
        for id in (mine, aside, gone["output"][0]["id"], *made_up):
            result = await ask("bob", input=[ASK, reference(id)])
            assert result.status_code == 404, result.text
            error = result.json()["error"]
            assert error["param"] == "input[1]" and error["message"].startswith("input[1]: there is no item")
            said.add(error["message"].replace(repr(id[:100]), "ID"))
        assert (await ask("ada", input=[reference(mine)])).status_code == 200
        many = await ask("bob", input=[reference(f"msg_{n:016x}_in_0") for n in range(MAX_SOURCES + 1)])
        assert many.status_code == 404, "the first missing item"
    assert len(said) == 1


async def test_a_server_without_storage_gives_the_same_404() -> None:
    async with site(ScriptedService()) as at:
        response = await post(at, {"input": [reference("msg_00000000000000ff_0")]})
        assert response.status_code == 404 and "there is no item" in response.json()["error"]["message"]
        wrong = await post(at, {"input": [{"type": "item_reference"}]})
        assert wrong.status_code == 400 and "input[0].id" in wrong.json()["error"]["message"]


async def test_references_are_bounded(tmp_path: Path) -> None:
    """A conversation may be long, so the number of items one request looks through has a limit."""
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at:
        made = []
        for _ in range(MAX_SOURCES + 1):
            one = (await post(at, {"items": [{"role": "user", "content": "x"}]}, "/v1/conversations")).json()["id"]
            made.append(reference(f"msg_{one.removeprefix('conv_')}_0"))
        assert (await post(at, {"input": made[:-1]}, "/v1/responses/input_tokens")).status_code == 200
        refused = await post(at, {"input": made}, "/v1/responses/input_tokens")
        assert refused.status_code == 400 and f"more than {MAX_SOURCES}" in refused.json()["error"]["message"]
