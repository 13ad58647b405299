"""Request bodies: shapes, limits at the limit and one beyond, and the tables of fields without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletionContentPartTextParam
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from cairn.api.anthropic.schemas import MessagesBody
from cairn.api.chat.fields import ACCEPTED, ROWS, FieldRow
from cairn.api.chat.generation import check_generation
from cairn.api.chat.message_schemas import TextPart
from cairn.api.chat.parse import parse
from cairn.api.chat.schemas import ChatBody, CompletionBody, TokenizeBody
from cairn.api.http.body import Body
from cairn.api.native import agent_schemas
from cairn.api.openai.embeddings import EmbeddingBody, RerankBody
from cairn.api.openai.responses_schemas import ResponseBody
from cairn.config.config import Config
from cairn.types.errors import InvalidRequest, Unsupported
from tests.api.scripted import SPEC, Heard, ScriptedService
from tests.api.sockets import site

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **more}


def checked(body: dict[str, Any], config: Config | None = None) -> ChatBody:
    result = parse(ChatBody, body, config or Config())
    check_generation(result, config or Config())
    result.wanted()
    return result


def refused(body: dict[str, Any], field: str, *words: str, config: Config | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        checked(body, config)
    assert caught.value.field == field
    for word in (field, *words):
        assert word in str(caught.value)
    return caught.value


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat_with(place: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return a chat with these fields inside the named kind of object."""
    objects: dict[str, dict[str, Any]] = {
        "request": chat(**more),
        "stream_options": chat(stream=True, stream_options=more),
        "message": chat(messages=[{"role": "assistant", "content": "x"} | more]),
        "part": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"} | more]}]),
        "tool": chat(tools=[TOOL | more]),
        "function": chat(tools=[{"type": "function", "function": {"name": "f"} | more}]),
        "call": chat(messages=[{"role": "assistant", "tool_calls": [CALL | more]}]),
        "called": chat(
            messages=[{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": ""} | more}]}]
        ),
    }
    return objects[place]


OWN = ("tokenize", "embedding", "messages", "responses", "ollama", "options", "model")
"""Objects that have a route of their own."""
PLACED = [(place, name, row) for place, rows in ROWS.items() if place not in OWN for name, row in rows.items()]


@pytest.mark.parametrize(("place", "name", "row"), PLACED, ids=[f"{place}-{name}" for place, name, _ in PLACED])
def test_fields_of_the_table(place: str, name: str, row: FieldRow) -> None:
    """Fields without effect are ignored, or accepted only with values that ask for nothing; null counts as absent."""
    plain = checked(chat_with(place, {}))
    for value in (None, *(("x", 1, True, {"a": 1}) if row.values is None else row.values)):
        assert checked(chat_with(place, {name: value})) == plain
    if row.values is not None:
        with pytest.raises(Unsupported, match=name) as caught:
            checked(chat_with(place, {name: {"not": "built"}}))
        assert row.why in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (TokenizeBody, {"prompt": "a"}),
        (EmbeddingBody, {"input": "a"}),
        (RerankBody, {"query": "a", "documents": ["b"]}),
        (MessagesBody, {"messages": [USER]}),
        (ResponseBody, {"input": "a"}),
    ],
)
def test_fields_of_other_routes(kind: type[Body], body: dict[str, Any]) -> None:
    for name, row in ROWS[kind.place].items():
        for value in (None, *(("x", 1) if row.values is None else row.values)):
            assert parse(kind, body | {name: value}, Config()) == parse(kind, body, Config())
        if row.values is not None:
            with pytest.raises(Unsupported, match=name):
                parse(kind, body | {name: {"not": "built"}}, Config())


def test_the_table_has_a_field_once() -> None:
    for place, dialects in ACCEPTED.items():
        names = [name for rows in dialects.values() for row in rows for name in row.names.split()]
        assert len(names) == len(set(names)), place
    taken = {kind.place: kind.model_fields.keys() for kind in bodies() if kind.place in ("message", "part", "tool")}
    assert all(not fields & ROWS[place].keys() for place, fields in taken.items()), "has an effect and has none"
    assert not ChatBody.model_fields.keys() & ROWS["request"].keys()


def test_a_boolean_is_no_number() -> None:
    checked(chat(best_of=1.0, tfs_z=1.0))
    refused(chat(best_of=True), "best_of")
    refused(chat(n_probs=False), "n_probs")


def test_every_field_of_openais_client_is_known() -> None:
    """The client sends some of them unasked, so one without effect must not end in a 400."""
    for kind, theirs in ((ChatBody, chat_params), (CompletionBody, completion_params)):
        known = kind.model_fields.keys() | ROWS["request"].keys()
        both = ChatBody.model_fields.keys() if kind is CompletionBody else set()
        assert theirs.CompletionCreateParamsBase.__annotations__.keys() - both <= known
    part = TextPart.model_fields.keys() | ROWS["part"].keys()
    assert ChatCompletionContentPartTextParam.__annotations__.keys() <= part


async def test_hints_about_caching_have_no_effect() -> None:
    part = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    body = chat(model="scripted", messages=[{"role": "user", "content": [part]}])
    body |= {"prompt_cache_options": {"ttl": "30m"}, "moderation": None}
    async with site(ScriptedService()) as at, at.http() as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        wrong = await http.post("/v1/chat/completions", json=body | {"moderation": {"model": "m"}})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "moderation"


async def test_clients_of_mlx_lm_find_their_routes_and_fields() -> None:
    """Covers every field that mlx_lm's server reads, with its defaults."""
    own: dict[str, Any] = {
        **{"repetition_penalty": 1.1, "repetition_context_size": 20, "xtc_probability": 0.0, "xtc_threshold": 0.0},
        **{"draft_model": "default_model", "num_draft_tokens": 3, "adapters": None, "role_mapping": None},
        **{"min_p": 0.0, "top_k": 0, "top_p": 1.0, "seed": 1, "max_tokens": 5, "logit_bias": None, "stop": None},
    }
    async with site(ScriptedService()) as at, at.http() as http:
        assert (await http.get("/v1/models")).status_code == 200
        for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", {"prompt": "hi"})):
            response = await http.post(path, json={"model": "default_model", **body, **own})
            assert response.status_code == 200, response.text
        for name, value in (("adapters", "my-lora"), ("repetition_context_size", 64), ("role_mapping", {"user": "U:"})):
            wrong = await http.post("/v1/chat/completions", json=chat() | {name: value})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name


SLIPS = [
    "temprature",
    "Temperature",
    "max_token",
    "guided_jsn",
    "logprob",
    "topP",
    "maxTokens",
    "tool_choise",
    "chat_templat",
]
FOREIGN = ["__class__", "", "reasoning_mode", "x" * 1000, "enable_search", "safe_prompt", "\u00fc"]


@pytest.mark.parametrize("field", SLIPS)
def test_a_slip_of_a_known_field_is_refused_by_name(field: str) -> None:
    refused(chat(**{field: 1}), field, "not a field")
    checked(chat(**{field: None}))
    checked(chat(**{field: 1}), Config(lenient=True))


@pytest.mark.parametrize("field", FOREIGN)
def test_a_field_of_another_maker_is_passed_over_unless_the_server_refuses_it(field: str) -> None:
    assert checked(chat(**{field: 1})) == checked(chat())
    refused(chat(**{field: 1}), field[:100], "not a field", config=Config(strict_fields=True))
    checked(chat(**{field: None}), Config(strict_fields=True))


@pytest.mark.parametrize("place", ["message", "part", "tool", "function", "call", "called", "stream_options"])
def test_unknown_fields_within_a_chat(place: str) -> None:
    assert checked(chat_with(place, {"of_another_maker": {"a": 1}})) == checked(chat_with(place, {}))
    with pytest.raises(InvalidRequest, match=f"of_another_maker is not a field of a {place}"):
        checked(chat_with(place, {"of_another_maker": 1}), Config(strict_fields=True))


def test_unknown_fields_are_reported_once_and_bounded() -> None:
    """Each unknown field is compared with all known ones, so a body must not hold thousands of different ones."""
    heard = Heard()
    many = [{"role": "user", "content": "x", "mood": "good", "uuid": str(n)} for n in range(1000)]
    parse(ChatBody, chat(messages=many), Config(), heard)  # type: ignore[arg-type]
    assert heard.warnings == [
        f"messages[0].{name} is not a field of a message and has no effect" for name in ("mood", "uuid")
    ]
    few = [{"role": "user", "content": "x", f"field{n}": 1} for n in range(64)]
    parse(ChatBody, chat(messages=few), Config())
    with pytest.raises(InvalidRequest, match="more than 64 different unknown fields"):
        parse(ChatBody, chat(messages=[*few, {"role": "user", "content": "x", "field64": 1}]), Config())


def test_a_misspelt_field_is_reported_with_the_likely_name() -> None:
    refused(chat(temprature=1), "temprature", "did you mean temperature?")
    refused(chat(messages=[USER | {"tool_call": []}]), "messages[0].tool_call", "a message; did you mean tool_calls?")


def test_a_few_unknown_inner_fields_are_reported_by_name() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {}}
    refused(chat(tools=[tool]), "tools[0].function", "missing")
    with pytest.raises(Unsupported, match=r"tools\[0\]\.type"):
        parse(ChatBody, chat(tools=[{"type": "web_search_preview", "search_context_size": "low", "x": 1}]), Config())
    refused(chat(messages=[USER | {str(n): 1 for n in range(100)}]), "messages[0]", "fields; the limit is")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages[0].refusal"),
    ],
)
def test_unsupported_fields_are_refused(more: dict[str, Any], field: str) -> None:
    assert isinstance(refused(chat(**more), field), Unsupported)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"metadata": {"~x": 1}}, "metadata.~x"),
        ({"metadata": {"~text": 1}}, "metadata.~text"),
        ({"logit_bias": {"~tokens": "x"}}, "logit_bias.~tokens"),
        ({"stop": ["a", 5]}, "stop[1]"),
        (
            {"messages": [USER | {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"model": 1}, "model"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": "2"}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"a": "b"}}, "logit_bias.a"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
        ({"tool_choice": "maybe", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": [], "tools": [TOOL]}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format.type"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"grammar": 5}, "grammar"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"__x": 1}}, "chat_template_kwargs.__x"),
        ({"chat_template_kwargs": {"x": {"y": 1}}}, "chat_template_kwargs.x"),
        ({"chat_template_kwargs": {f"k{i}": i for i in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_field_is_named(more: dict[str, Any], field: str) -> None:
    refused(chat(**more), field)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "x", "~y": 1}]}, "messages[0].~y"),
        ({"messages": [{"role": "user", "content": "x", "~text": 1}]}, "messages[0].~text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "~list": 1}]}]},
            "messages[0].content[0].~list",
        ),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
    ],
)
def test_an_unknown_field_within_is_named_where_it_is_refused(more: dict[str, Any], field: str) -> None:
    refused(chat(**more), field, config=Config(strict_fields=True))
    checked(chat(**more))


def test_a_tool_call_id_is_missing_from_a_tool_message_and_too_much_anywhere_else() -> None:
    refused(chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "is missing")
    other = {"role": "user", "content": "x", "tool_call_id": "y"}
    refused(chat(messages=[other]), "messages[0].tool_call_id", "belongs to a tool message")


def test_a_missing_field_is_named() -> None:
    refused({"model": "m"}, "messages")
    checked({"messages": [USER]})
    refused({"model": "m"}, "messages")


def test_messages_and_tools_at_the_limit_and_one_more() -> None:
    """Known failure 50: the configured limits are the ones that apply."""
    checked(chat(messages=[USER] * 4096))
    refused(chat(messages=[USER] * 4097), "messages", "4097", "4096")
    checked(chat(tools=[TOOL] * 1024))
    refused(chat(tools=[TOOL] * 1025), "tools", "1025", "1024")
    small = Config(max_messages=2, max_tools=1)
    checked(chat(messages=[USER] * 2, tools=[TOOL]), small)
    refused(chat(messages=[USER] * 3), "messages", "2", config=small)
    refused(chat(tools=[TOOL] * 2), "tools", "1", config=small)


@pytest.mark.parametrize(
    ("field", "item", "most"),
    [("messages", 1, 4096), ("tools", 1, 1024), ("logit_bias", "x", 1024), ("metadata", 1, 16)],
)
def test_what_is_too_long_is_refused_before_it_is_read(field: str, item: Any, most: int) -> None:
    """Validating 86,000 messages takes a third of a second, in which nobody else is served."""
    for more, said in ((0, f"{field}"), (1, str(most + 1))):
        items = [item] * (most + more)
        many = items if field in ("messages", "tools") else {str(n): one for n, one in enumerate(items)}
        with pytest.raises(InvalidRequest, match=said) as caught:
            parse(ChatBody, chat(**{field: many}), Config())
        assert (caught.value.field == field) is bool(more)


WRONG = [None] * 2000
"""Members that are wrong in every list, map and object of a body."""


def valid_value(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    """Return a short valid value of a JSON schema."""
    if "$ref" in schema:
        return valid_value(known[schema["$ref"].rpartition("/")[2]], known)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return valid_value(schema[several][0], known)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "array":
            return [valid_value(schema["items"], known)]
        case "object":
            return {name: valid_value(schema["properties"][name], known) for name in schema.get("required", ())}
        case kind:
            return {"string": "1", "integer": 1, "number": 1.5, "boolean": True}.get(kind)


def invalid_values(schema: dict[str, Any], known: dict[str, Any]) -> Iterator[Any]:
    """Yield values of a JSON schema that are valid except for one list, map or object with two thousand wrong
    members.
    """
    if "$ref" in schema:
        yield from invalid_values(known[schema["$ref"].rpartition("/")[2]], known)
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from invalid_values(one, known)
    if schema.get("type") == "array":
        yield [valid_value(schema["items"], known), *WRONG]
        yield from ([invalid_value] for invalid_value in invalid_values(schema["items"], known))
    if schema.get("type") == "object":
        base, fields = valid_value(schema, known), schema.get("properties", {})
        if schema.get("additionalProperties") is not True:
            yield base | {f"{n}": one for n, one in enumerate(WRONG)}
        for name, field in fields.items():
            yield from (base | {name: invalid_value} for invalid_value in invalid_values(field, known))


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for below in kind.__subclasses__():
        yield below
        yield from bodies(below)


@pytest.mark.parametrize("kind", dict.fromkeys(bodies()))
def test_a_wrong_body_costs_one_error_however_much_of_it_is_wrong(kind: type[Body]) -> None:
    """Every error used to be collected and formatted on the event loop: 260,000 of them took most of a second."""
    schema = kind.model_json_schema()
    for body in invalid_values(schema, schema.get("$defs", {})):
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, body, Config())
        assert "~" not in (caught.value.field or ""), "a union's tag"
        cause = caught.value.__context__
        assert not isinstance(cause, ValidationError) or cause.error_count() <= 2, str(body)[:200]


def test_the_wrong_bodies_are_wrong_in_every_list() -> None:
    schema = agent_schemas.CreateBody.model_json_schema()
    tried = [str(body)[:120] for body in invalid_values(schema, schema["$defs"])]
    for wrong in ("'messages': [{", "'content': [{", "'tool_calls': [{", "'tools': [{", "'metadata': {"):
        assert any(wrong in body for body in tried), wrong


def test_instructions_beside_system_count_with_it() -> None:
    """Otherwise an agent could be created and exported, but not imported."""
    body = parse(agent_schemas.CreateBody, {"system": "Be brief.", "messages": [USER] * 2}, Config(max_messages=2))
    assert len(agent_schemas.beginning(body, Config(max_messages=3))) == 3
    with pytest.raises(InvalidRequest, match="3 messages with system; the limit is 2"):
        agent_schemas.beginning(body, Config(max_messages=2))


def test_what_a_client_library_sends_back_is_accepted() -> None:
    none = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "name": None}
    message = {"role": "assistant", "content": "x"} | none
    assert parse(ChatBody, chat(messages=[USER, message]), Config()).messages[1].content == "x"


def test_what_real_clients_send_at_their_defaults_is_accepted() -> None:
    for tool_choice in ("auto", "none", {"type": "auto"}, {"type": "none"}, {"mode": "auto"}, None):
        checked(chat(tool_choice=tool_choice))
        checked(chat(tool_choice=tool_choice, tools=[TOOL], parallel_tool_calls=False))
    for tool_choice in ("required", "any", {"type": "required"}, {"type": "function", "function": {"name": "f"}}):
        checked(chat(tool_choice=tool_choice, tools=[TOOL]))
    for content in (None, "", []):
        for role in ("system", "user", "assistant"):
            checked(chat(messages=[{"role": role, "content": content}]))
    checked(chat(messages=[{"role": "assistant"}, {"role": "tool", "id": "c", "content": None}]))
    checked(chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True}))
    checked(chat(stream=False, stream_options=None, stop="", max_tokens=5, max_completion_tokens=5))
    checked(chat(tools=[{"type": "function", "function": {"name": "f", "strict": True, "description": None}}]))
    checked(chat(messages=[{"role": "assistant", "tool_calls": [CALL | {"id": None, "index": None}]}], unheard_of=None))


SENT: dict[str, dict[str, Any]] = {
    "request": {
        **{"verbosity": "low", "metadata": {"a": "b"}, "keep_alive": "5m", "session_id": "s", "enable_thinking": True},
        **{"add_generation_prompt": True, "skip_special_tokens": True, "reasoning_effort": "high"},
        **{"parallel_tool_calls": False, "stop": ["a", "b", "c", "d", "e"], "web_search_options": None},
    },
    **{
        place: {
            **{"cache_control": {"type": "ephemeral"}, "reasoning_details": [{}], "thinking_blocks": [{}]},
            **{"metadata": {"a": [1]}, "extra": {"a": 1}, "id": "x", "status": "completed", "is_error": False},
        }
        for place in ("message", "part", "tool", "call")
    },
}
"""Fields that clients send at their defaults, by the object that holds them."""


@pytest.mark.parametrize(("place", "field"), [(place, field) for place, fields in SENT.items() for field in fields])
def test_a_field_that_real_clients_send_is_accepted(place: str, field: str) -> None:
    """The fields are listed here too, so that none can leave the table unnoticed."""
    checked(chat_with(place, {field: SENT[place][field]}))


def test_the_id_of_a_tool_message_names_its_call() -> None:
    (named, other) = (
        checked(chat(messages=[{"role": "tool", "content": "x", "id": "c", **more}])).messages[0]
        for more in ({}, {"tool_call_id": "d"})
    )
    assert (named.tool_call_id, other.tool_call_id) == ("c", "d")


def test_arguments_as_an_object_are_their_json() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Z\u00fcrich"}}}
    (message,) = checked(chat(messages=[{"role": "assistant", "tool_calls": [call]}])).messages
    assert message.tool_calls is not None and message.tool_calls[0].function.arguments == '{"city": "Z\u00fcrich"}'


def test_names_of_other_servers() -> None:
    body = checked(chat(n_predict=5, repeat_penalty=1.1))
    assert (body.max_tokens, body.repetition_penalty) == (5, 1.1)
    assert checked(chat(n_predict=5, max_tokens=5)).max_tokens == 5
    with pytest.raises(InvalidRequest, match="max_tokens and n_predict mean the same"):
        checked(chat(n_predict=5, max_tokens=6))


def test_a_number_without_a_fraction_is_whole() -> None:
    """Some clients send every number as a float."""
    body = checked(chat(max_tokens=4.0, seed=1.0, n=1.0, top_k=5.0, logprobs=True, top_logprobs=2.0))
    assert [body.max_tokens, body.seed, body.n, body.top_k, body.top_logprobs] == [4, 1, 1, 5, 2]
    assert isinstance(body.max_tokens, int)
    refused(chat(max_tokens=4.5), "max_tokens", "a whole number; it is a number with a fraction")


SENTENCES = [
    ({"messages": []}, "messages is empty; it must hold at least one"),
    ({"messages": "hi"}, "messages must be a list; it is a text"),
    ({"messages": ["hi"]}, "messages[0] must be an object; it is a text"),
    (
        {"messages": [{"role": "robot"}]},
        "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    ({"temperature": "0.5"}, "temperature must be a number; it is a text"),
    ({"temperature": True}, "temperature must be a number; it is true or false"),
    ({"stream": "yes"}, "stream must be true or false; it is a text"),
    ({"n": "2"}, "n must be a whole number; it is a text"),
    ({"metadata": {"x": 1}}, "metadata.x must be a text; it is a whole number"),
    ({"logit_bias": 5}, "logit_bias must be an object of token ids and numbers, or a list of pairs"),
    ({"stop": 5}, "stop must be a text or a list of texts"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content must be a text or a list of text parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thought", "text": "x"}]}]},
        "messages[0].content[0].type can only be 'text': other parts are not read here",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type can only be 'function' or 'custom': tools that run on a server are not built",
    ),
    (
        {"tools": [{"type": "custom", "custom": {}}]},
        "tools[0].custom.name must be a text",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name must be 1 to 128 letters, digits, '_', '-' and '.'; it is a text",
    ),
    (
        {"response_format": {"type": "yaml"}},
        "response_format.type must be text, json_object, json_schema, grammar or regex",
    ),
    ({"web_search_options": {}}, "web_search_options can only be absent: this server does not search the web"),
    ({"reasoning_effort": 3}, "reasoning_effort must be a text; it is a whole number"),
]


@pytest.mark.parametrize(("more", "sentence"), SENTENCES, ids=[str(n) for n in range(len(SENTENCES))])
def test_an_error_is_a_readable_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(chat(**more))
    assert str(caught.value) == sentence


def test_broken_arguments_in_history_are_accepted() -> None:
    """Known failure 24: a call that was cut off must not turn every later turn into a 400."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    checked(chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}]))


def test_arguments_in_history_hold_no_more_values_than_a_body() -> None:
    """Arguments are parsed and walked through like the body. The values are split over two calls."""
    calls = [{"function": {"name": "f", "arguments": '{"a":[' + "[]," * 40 + "[]]}"}}] * 2
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    check_generation(checked(chat(messages=[message])), Config(max_json_values=200))
    with pytest.raises(InvalidRequest, match="more than 100 JSON values"):
        check_generation(checked(chat(messages=[message])), Config(max_json_values=100))
    prose = {"name": "f", "arguments": json.dumps({"text": "a, b, [c], {d}, " * 100})}
    check_generation(
        checked(chat(messages=[message | {"tool_calls": [{"function": prose}]}])), Config(max_json_values=100)
    )


def test_values_in_each_call_are_counted_by_themselves() -> None:
    """When the arguments were joined, a call that was cut inside a string inverted what counted as string in the next
    one.
    """

    def check(*arguments: str) -> None:
        calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
        message = {"role": "assistant", "content": "a", "tool_calls": calls}
        check_generation(checked(chat(messages=[message])), Config(max_json_values=1000))

    check('{"text": "cut here', json.dumps({"text": "a, " * 1100}))
    with pytest.raises(InvalidRequest, match="more than 1000 JSON values"):
        check('"', '{"a":[' + "[]," * 1100 + "0]}")
    whole = '{"a":[' + "[]," * 498 + "0]}"  # 2 + 498 brackets, 498 commas
    check(whole, '{"text": "[[')
    with pytest.raises(InvalidRequest, match="more than 1000 JSON values"):
        check(whole, '{"text": "[[', "[[")


def test_completion_prompts() -> None:
    for prompt in ("", "a", ["a"], [1], [[1], [2]]):
        parse(CompletionBody, {"model": "m", "prompt": prompt}, Config())
    for prompt in ([], {}, None, 1, ["a", 1], [1, "a"], [[1], "a"], [1.5], [True], [["a"]]):
        with pytest.raises(InvalidRequest, match="prompt"):
            parse(CompletionBody, {"model": "m", "prompt": prompt}, Config())
    for suffix in ("", None, "b"):
        assert parse(CompletionBody, {"model": "m", "prompt": "a", "suffix": suffix}, Config()).suffix == suffix
    with pytest.raises(InvalidRequest, match="suffix"):
        parse(CompletionBody, {"model": "m", "prompt": "a", "suffix": ["b"]}, Config())


def test_messages_of_errors_do_not_quote_values() -> None:
    for body in (chat(temperature="secret-prompt"), chat(messages=[{"role": "secret-prompt", "content": "x"}])):
        with pytest.raises(InvalidRequest) as caught:
            checked(body)
        assert "secret" not in str(caught.value)


# Limits that the service checks, seen through HTTP: (body, status at the limit), (body, status one beyond).

AT_LIMITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"temperature": 0}, {"temperature": -0.01}, "temperature"),
    ({"temperature": 10}, {"temperature": 10.01}, "temperature"),
    ({"top_p": 1}, {"top_p": 1.01}, "top_p"),
    ({"top_p": 0}, {"top_p": -0.01}, "top_p"),
    ({"min_p": 1}, {"min_p": 1.1}, "min_p"),
    ({"top_k": -1}, {"top_k": -2}, "top_k"),
    ({"repetition_penalty": 10}, {"repetition_penalty": 10.1}, "repetition_penalty"),
    ({"repetition_penalty": 0.01}, {"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2}, {"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"seed": -(1 << 63)}, {"seed": -(1 << 63) - 1}, "seed"),
    ({"seed": (1 << 64) - 1}, {"seed": 1 << 64}, "seed"),
    ({"n": 8}, {"n": 9}, "n"),
    ({"n": 1}, {"n": 0}, "n"),
    ({"stop": ["a"] * 64}, {"stop": ["a"] * 65}, "stop"),
    ({"stop": "\u00e9" * 128}, {"stop": "\u00e9" * 128 + "x"}, "stop"),
    ({"stop": ["a"]}, {"stop": [""]}, "stop"),
    ({"stop_token_ids": [SPEC.vocab - 1]}, {"stop_token_ids": [SPEC.vocab]}, "stop_token_ids"),
    ({"stop_token_ids": [0] * 64}, {"stop_token_ids": [0] * 65}, "stop_token_ids"),
    ({"logit_bias": {str(SPEC.vocab - 1): 1}}, {"logit_bias": {str(SPEC.vocab): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 100}}, {"logit_bias": {"1": 100.1}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1}, {"top_logprobs": 1}, "top_logprobs"),
    ({"n_predict": -1}, {"n_predict": -2}, "max_tokens"),
    ({}, {"max_tokens": -1}, "max_tokens"),
    ({}, {"max_completion_tokens": -1}, "max_completion_tokens"),
    ({}, {"max_tokens": -2}, "max_tokens"),
    ({"stream": True, "stream_options": {"include_usage": True}}, {"stream_options": {}}, "stream_options"),
    ({"stop": ""}, {"stop": ["a", ""]}, "stop"),
    ({"tool_choice": {"type": "auto"}}, {"tool_choice": {}}, "tool_choice"),
    ({"tool_choice": {"mode": "none"}}, {"tool_choice": {"name": "f"}}, "tool_choice"),
    ({"max_tokens": 32000}, {"max_tokens": 32000.5}, "max_tokens"),
    ({"max_tokens": 1}, {"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 1}, {"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"seed": -1}, {"seed": 0.5}, "seed"),
    ({"max_tokens": 5, "min_tokens": 5}, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
]


@pytest.mark.parametrize(("good", "bad", "field"), AT_LIMITS)
async def test_at_the_limit_and_one_beyond(good: dict[str, Any], bad: dict[str, Any], field: str) -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        body = {"model": "scripted", "messages": [USER]}
        response = await http.post("/v1/chat/completions", json=body | good)
        assert response.status_code == 200, response.text
        wrong = await http.post("/v1/chat/completions", json=body | bad)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == field and field in wrong.json()["error"]["message"]


async def test_lists_and_figures_at_their_limits() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        body = {"model": "scripted", "messages": [USER]}
        bias = {str(token): 1 for token in range(300)}
        assert (await http.post("/v1/chat/completions", json=body | {"logit_bias": bias})).status_code == 200
        wrong = await http.post("/v1/chat/completions", json=body | {"logit_bias": {"1": 1, "01": 2}})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "logit_bias.01"
        text = {"model": "scripted", "prompt": ["a"] * 128}
        wrong = await http.post("/v1/completions", json=text | {"logprobs": 50})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "logprobs"
        assert wrong.json()["error"]["message"].startswith("logprobs must be from 0 to 20")
        assert (await http.post("/v1/completions", json=text)).status_code == 200
        wrong = await http.post("/v1/completions", json=text | {"prompt": ["a"] * 129})
        assert wrong.status_code == 400 and "128" in wrong.json()["error"]["message"]
        many = text | {"prompt": ["a"] * 80, "n": 4}
        assert (await http.post("/v1/completions", json=many)).status_code == 200
        wrong = await http.post("/v1/completions", json=many | {"prompt": ["a"] * 81})
        assert wrong.status_code == 400 and "320" in wrong.json()["error"]["message"]
        for prompt in ([SPEC.vocab], [-1], [1 << 70], ""):
            wrong = await http.post("/v1/completions", json=text | {"prompt": prompt})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"
        long = (await http.post("/v1/completions", json=text | {"prompt": "x" * 130, "max_tokens": 29})).json()["error"]
        assert (long["code"], long["n_prompt_tokens"], long["n_ctx"]) == ("context_length_exceeded", 130, 128)
        for figure in ("130", "128"):
            assert figure in long["message"]
        long = (await http.post("/v1/chat/completions", json=chat(messages=[USER | {"content": "x" * 20_000}]))).json()[
            "error"
        ]
        assert (long["code"], long["param"], long["n_ctx"]) == ("context_length_exceeded", "messages", 128)
        assert long["n_prompt_tokens"] >= 256
        for number in (10**400, -(10**400), 1e308, -1e308):
            for field in ("temperature", "seed", "n", "max_tokens", "presence_penalty", "top_k", "min_tokens"):
                wrong = await http.post("/v1/chat/completions", json=body | {field: number})
                assert wrong.status_code == 400, (field, number)
