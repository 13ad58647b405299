"""Requests that fit the limits and are crafted to cost their server much.

Each once blocked it, filled its memory or was a 500, or is of the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

BODY = 15 << 20
"""Bytes of the largest inputs: with everything around them they fit the limit of a body."""
WORDS = "word " * 200


class HostileInput(NamedTuple):
    """A request, and the statuses that may answer it."""

    path: str
    body: Mapping[str, Any] | bytes
    statuses: tuple[int, ...] = (400,)
    method: str = "POST"


def node(id: str, prompt: str = "Go on.", **more: Any) -> dict[str, Any]:
    return {"id": id, "prompt": prompt, **more}


def flow(*nodes: Mapping[str, Any], **more: Any) -> HostileInput:
    """Return a check of a workflow."""
    return HostileInput("/v1/workflows/check", {"workflow": {"nodes": list(nodes), **more}})


def good(*nodes: Mapping[str, Any]) -> HostileInput:
    """Return a check of a workflow that can run."""
    return HostileInput("/v1/workflows/check", {"workflow": {"nodes": list(nodes)}}, (200,))


def contract(output: Any) -> HostileInput:
    return flow(node("a", output=output))


def chat(*messages: Mapping[str, Any], **more: Any) -> HostileInput:
    last = {"role": "user", "content": "x"}
    return HostileInput("/v1/chat/completions", {"messages": [*messages, last], "max_tokens": 1, **more}, (200, 400))


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def called(*names: str, arguments: str = "{}") -> dict[str, Any]:
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def response(input: Any, **more: Any) -> HostileInput:
    return HostileInput("/v1/responses", {"input": input, "max_output_tokens": 1, "store": False, **more}, (200, 400))


def custom(definition: str, **more: Any) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "lark", "definition": definition, **more}
    return {"type": "custom", "name": "f", "format": form}


def message(content: Any, role: str = "user", **more: Any) -> HostileInput:
    asked = [{"role": role, "content": content}, *([] if role == "user" else [{"role": "user", "content": "x"}])]
    return HostileInput("/v1/messages", {"messages": asked, "max_tokens": 1, **more}, (200, 400))


def team(**more: Any) -> HostileInput:
    return HostileInput("/v1/teams", {"members": [{"name": "a"}, {"name": "b"}], **more})


def nested_rules(count: int, depth: int) -> str:
    """Return rules nested in rules, each in brackets."""
    rules = [f"r{at}: {'(' * depth}r{at + 1}{')' * depth}" for at in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "x"'])


def workflows() -> dict[str, HostileInput]:
    """Yield workflows that block a check, or whose contracts are impossible."""
    listed = {"type": "object", "properties": {"x": {"enum": [f"v{at}" for at in range(20_000)]}}, "required": ["x"]}
    long = "long" * (BODY // 5)
    lists = {"enum": [["a"], ["b"]]}
    return {
        "half slots": flow(node("a", "{{" * 40_000)),
        "half slots, all that fit": flow(node("a", "{{" * (BODY // 2))),
        "closed slots": flow(node("a", "}}" * (BODY // 2))),
        "open slots": flow(node("a", "{{ a " * (BODY // 6))),
        "alternatives": flow(node("a", "{{ " + "a or " * (BODY // 6) + " }}")),
        "blanks in a slot": flow(node("a", "{{ " + " " * BODY + " }}")),
        "enum beside in": flow(
            node("a", when={"output": "b.x", "in": [f"w{at}" for at in range(1_000)]}), node("b", output=listed)
        ),
        "a long path": flow(node("a", "{{ " + long + " }}"), node("b")),
        "a long need": flow(node("a", needs=[long]), *(node(f"long{at}") for at in range(200))),
        "a long id": flow(node(long)),
        "a long field": flow(node("a", **{long: 1})),
        "a long keyword": contract({long: 1}),
        "a long name over many": contract(
            {
                "type": "object",
                "properties": {
                    "x" * 1_000_000: {
                        "type": "object",
                        "properties": {f"p{at}": {"type": "string"} for at in range(50_000)},
                    }
                },
            }
        ),
        "many names": contract(
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"] * 200_000}
        ),
        "conditions": flow(node("a", when={"all": [{"output": "b", "exists": True}] * 60_000}), node("b")),
        "digits": flow(node("a", "{{ b." + "1" * 5_000 + " }}"), node("b", output=lists)),
        "an item of itself": flow(node("a", each={"in": "item"})),
        "nested loops": flow(
            {"id": "a", "loop": {"limit": 1, "nodes": [{"id": "b", "loop": {"limit": 1, "nodes": []}}]}}
        ),
        "line break in an id": flow(node("a\n")),
        "types": contract({"type": ["string", "null"]}),
        "an object as a type": contract({"type": {}}),
        "a list as a name": contract({"type": "object", "properties": {"x": {"type": "string"}}, "required": [[]]}),
        "a text as a length": contract({"type": "string", "minLength": "x"}),
        "a list as a length": contract({"type": "array", "items": {"type": "string"}, "maxItems": [1]}),
        "a huge length": HostileInput(
            "/v1/workflows/check",
            b'{"workflow":{"nodes":[{"id":"a","prompt":"x","output":{"type":"string","minLength":'
            + b"9" * 4000
            + b"}}]}}",
        ),
        "an object as a bound": contract({"type": "integer", "minimum": {}}),
        "items that are none": contract({"type": "array", "items": []}),
        "an enum of nothing": contract({"enum": []}),
        "a list that is no contract": contract({"type": "object", "properties": [1]}),
        "lists beside is": flow(node("b", output=lists), node("a", when={"output": "b", "is": ["x"]})),
        "lists beside is, which fits": good(node("b", output=lists), node("a", when={"output": "b", "is": ["a"]})),
        "lists beside in": flow(node("b", output=lists), node("a", when={"output": "b", "in": [["x"], {}]})),
        "lists beside each": good(node("b", output=lists), node("a", "{{ item }}", each={"in": "b"})),
        "a text as a length, beside is": flow(
            node("b", output={"type": "string", "minLength": "x"}), node("a", when={"output": "b", "is": "abc"})
        ),
        "digits of an item in a run": HostileInput(
            "/v1/workflows/runs",
            {"workflow": {"inputs": {"t": []}, "nodes": [node("a", "{{ inputs.t." + "1" * 5_000 + " }}")]}},
        ),
        "an object beside each": flow(node("b", output={"enum": [{}]}), node("a", each={"in": "b"})),
        "sampling of another kind": HostileInput(
            "/v1/workflows/runs",
            {
                "workflow": {
                    "nodes": [node("a", sampling={"temperature": [], "stop": {}, "max_tokens": "x"}, retries=0)]
                }
            },
        ),
        "a run of nothing but text": HostileInput(
            "/v1/workflows/runs",
            {
                "workflow": {"inputs": {"t": ""}, "nodes": [node("a", "{{ inputs.t }}" * 1_200)]},
                "inputs": {"t": "x" * 1_000_000},
            },
        ),
        "a text in every slot": HostileInput(
            "/v1/workflows/runs",
            {
                "workflow": {
                    "inputs": {"t": ""},
                    "nodes": [node(f"n{at}", "{{ inputs.t }}" * 64) for at in range(200)],
                },
                "inputs": {"t": "x" * 1_000_000},
            },
            (200,),
        ),
        "a run of too many bytes": HostileInput(
            "/v1/workflows/runs",
            {
                "workflow": {"inputs": {"t": ""}, "nodes": [node("a", "{{ inputs.t }}")]},
                "inputs": {"t": "x" * (5 << 20)},
            },
        ),
    }


def conversations() -> dict[str, HostileInput]:
    """Yield histories that each dialect must assemble, search or walk through."""
    names = [f"tool_number_{at}" for at in range(15_000)]
    results = [{"role": "tool", "content": "x", "tool_name": "nobody"} for _ in range(4_000)]
    open_calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": f"f{at}"}} for at in range(13_000)],
    }
    return {
        "texts of one message": message([{"type": "text", "text": "x" * 500}] * 30_000),
        "thoughts of one message": message([{"type": "thinking", "thinking": "x" * 500}] * 25_000, "assistant"),
        "items after a call": response(
            [
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                *[{"type": "message", "role": "assistant", "content": "x" * 450}] * 30_000,
            ]
        ),
        "empty items": response([{"type": "message", "role": "assistant", "content": ""}] * 32_000),
        "items of reasoning": response(
            [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 900}]}] * 15_000
        ),
        "results of no call": HostileInput(
            "/api/chat",
            {"messages": [open_calls, *results, {"role": "user", "content": "x"}], "stream": False},
            (200, 400),
        ),
        "results by id": HostileInput(
            "/api/chat",
            {
                "messages": [
                    open_calls,
                    *({"role": "tool", "content": "x", "tool_call_id": f"n{at}"} for at in range(4_000)),
                    {"role": "user", "content": "x"},
                ],
                "stream": False,
            },
            (200, 400),
        ),
        "calls of many names": chat(called(*names)),
        "calls of one name": chat(called(*["f"] * 15_000)),
        "unknown fields": chat(*[{"role": "user", "content": "x", **{f"k{at}": 1 for at in range(20)}}] * 4_000),
        "unknown long fields": chat(*[{"role": "user", "content": "x", "contentx" * 100: 1}] * 4_000),
        "arguments of values": chat(called("f", arguments="[" + "{}," * (BODY // 4) + "1]")),
        "arguments of brackets": chat(called("f", arguments="[" * (BODY // 2))),
        "thoughts that do not end": chat({"role": "assistant", "content": "<think>" * (BODY // 8)}),
        "blanks before a thought": chat({"role": "assistant", "content": " " * (BODY // 2)}),
        "system texts": chat(*[{"role": "system", "content": "x" * 3_000}] * 4_000),
        "control tokens": chat({"role": "user", "content": "<|im_start|>" * (BODY // 16)}),
        "items of a conversation": HostileInput(
            "/v1/conversations",
            {
                "items": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]
                + [{"type": "message", "role": "assistant", "content": "x" * 450}] * 30_000
            },
        ),
        "objects": HostileInput("/v1/chat/completions", {"messages": [{}] * 60_000}),
    }


def options() -> dict[str, HostileInput]:
    """Yield costly options: tools, grammars, samplers."""
    lark = 'start: "x"\n' + "%ignore A\n" * (BODY // 12)
    return {
        "allowed tools": chat(
            tools=[tool(f"f{at}") for at in range(128)],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f127"}}] * 16_000,
                },
            },
        ),
        "allowed tools that are none": chat(
            tools=[tool()],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [[]] * 60_000}},
        ),
        "nested choices": response(
            "x", tools=[{"type": "function", "name": "f"}], tool_choice=_nested({"type": "allowed_tools"}, "tools", 25)
        ),
        "a long unknown field": chat(**{"message" * (BODY // 8): 1}),
        "unknown fields that are passed over": message("x", **{f"message{at}" * 8: 1 for at in range(40)}),
        "a grammar of ignored tokens": response("x", tools=[custom(lark)]),
        "a grammar of names": response("x", tools=[custom("start: " + "a " * (BODY // 3))]),
        "a grammar of quotes": response("x", tools=[custom('start: "' + "\\" * (BODY // 3))]),
        "a grammar of brackets": response("x", tools=[custom("start: " + "(" * 60_000)]),
        "a grammar of rules in brackets": response("x", tools=[custom(nested_rules(60, 60))]),
        "many grammars": response(
            "x", tools=[{"type": "namespace", "name": "n", "tools": [custom('start: "x"')] * 20_000}]
        ),
        "a schema of brackets": chat(json_schema=None, guided_json="[" * (BODY // 2)),
        "a schema of values": chat(guided_json="[" + "{}," * (BODY // 4) + "1]"),
        "a schema of words": chat(
            response_format={"type": "json_schema", "json_schema": {"schema": {"enum": [WORDS] * 10_000}}}
        ),
        "a long pattern": chat(guided_regex="(a|" * (BODY // 4)),
        "stops": chat(stop=["x" * 200] * 60_000),
        "a long stop": chat(stop="a" * (BODY // 2)),
        "bad words": chat(bad_words=["x" * 200] * 60_000),
        "biases": chat(logit_bias=[[f"word {at}", 1] for at in range(60_000)]),
        "a long bias": chat(logit_bias=[["word " * (BODY // 6), 1]]),
        "a long bad word": chat(bad_words=["word " * (BODY // 6)]),
        "samplers": chat(samplers=["top_k"] * 60_000),
        "template arguments": chat(chat_template_kwargs={f"a{at}": 1 for at in range(60_000)}),
        "efforts": chat(reasoning_effort="high" * (BODY // 8)),
        "response fields": HostileInput(
            "/completion", {"prompt": "x", "n_predict": 1, "response_fields": ["a/" * 50] * 60_000}
        ),
        "a deep response field": HostileInput(
            "/completion", {"prompt": "x", "n_predict": 1, "response_fields": ["/" * BODY]}, (200,)
        ),
        "pieces of a prompt": HostileInput("/completion", {"prompt": ["x", 1] * 60_000, "n_predict": 1}, (200, 400)),
        "files around a hole": HostileInput(
            "/infill", {"input_prefix": "x", "input_suffix": "y", "input_extra": [{"text": "x"}] * 30_000}
        ),
        "a keep-alive of digits": HostileInput(
            "/api/chat",
            {"messages": [{"role": "user", "content": "x"}], "keep_alive": "1" * (BODY // 2), "stream": False},
            (200, 400),
        ),
        "metadata": HostileInput("/v1/agents", {"metadata": {f"k{at}": "v" for at in range(60_000)}}),
        "an agent's id": HostileInput("/v1/agents", {"id": "a\n"}),
        "a collection's id": HostileInput("/v1/collections", {"id": "a\n"}),
        "tools of an agent": HostileInput("/v1/agents", {"tools": [tool("f\n")]}),
    }


def _nested(value: dict[str, Any], name: str, depth: int) -> dict[str, Any]:
    made = value
    for _ in range(depth):
        made = {**value, name: [made]}
    return made


def houses() -> dict[str, HostileInput]:
    """Yield teams, collections and agents."""
    return {
        "members": team(members=[{"name": f"m{at}"} for at in range(30_000)]),
        "members with tools": team(
            members=[
                {"name": f"m{at}", "tools": [tool(f"f{at}", properties={"x": {"type": "string"}})]}
                for at in range(2_000)
            ]
        ),
        "turns of an order": team(topology={"kind": "turn_by_turn", "order": ["a"] * 200_000}),
        "sides": team(topology={"kind": "debate", "sides": ["a"] * 200_000, "judge": "b"}),
        "choices": team(topology={"choices": [f"c{at}" for at in range(60_000)]}),
        "a member's name": team(members=[{"name": "a\n"}]),
        "a team's id": team(id="a\n"),
        "a member's sampling": team(members=[{"name": "a", "stop": ["x"] * 60_000}, {"name": "b"}]),
        "texts to embed": HostileInput("/v1/embeddings", {"input": ["x"] * 60_000}),
        "pairs to score": HostileInput("/v1/score", {"text_1": "x", "text_2": ["y"] * 60_000}),
        "tokens to read": HostileInput("/detokenize", {"tokens": [10**12] * 200_000}),
    }


def addresses() -> dict[str, HostileInput]:
    """Yield paths and parameters."""
    digits = "1" * 5_000

    def get(path: str, *statuses: int) -> HostileInput:
        return HostileInput(path, b"", statuses or (400, 404), "GET")

    return {
        "digits in a path": get(f"/v1/agents/{digits}/turns"),
        "digits of a response": get(f"/v1/responses/resp_{digits}"),
        "digits of a request": get(f"/v1/requests/{digits}"),
        "digits of its events": get(f"/v1/requests/{digits}/events"),
        "digits of a run": get(f"/v1/workflows/runs/{digits}/graph"),
        "digits of a team": get(f"/v1/teams/{digits}/transcript"),
        "digits of an item": get(f"/v1/conversations/conv_1/items/{digits}"),
        "digits of a page": get(f"/v1/workflows/runs?limit={digits}"),
        "digits of a place": get(f"/v1/responses/resp_1?stream=true&starting_after={digits}"),
        "other digits": get("/v1/requests/%C2%B2%C2%B3", 400, 404),
        "doubled versions": get("/v1" * 8_000 + "/models"),
        "slashes": get("/" * 30_000 + "v1/models"),
        "line break behind a route": get("/v1/models%0A"),
        "line break behind an id": get("/v1/agents/a%0A"),
        "parameters": get("/v1/agents?" + "&".join(f"a{at}=1" for at in range(2_000))),
    }


def forced(text: str, *tools: Mapping[str, Any]) -> HostileInput:
    """Return a request that forces the model to say exactly this text while a client's tools may be called."""
    return chat(tools=[*tools] or [tool()], guided_choice=[text], max_tokens=1_600)


def calls() -> dict[str, HostileInput]:
    """Yield tools with costly schemas or names, and answers that are costly to parse for calls."""
    call = '<tool_call>{"name": "f", "arguments": {}}'
    blanks, kilobyte = " " * 1_400, "x" * 1_000
    wide = {f"p{at}": {"type": "string", "description": "x" * 100} for at in range(90_000)}
    looking = {f"p{at}": {"pattern": "^(?=a)b(c|d)$"} for at in range(5_000)}
    shared = {"$defs": {"d": {"description": "x" * 120_000}}}
    pointing = {f"p{at}": {"$ref": "#/$defs/d"} for at in range(300)}
    named = {"x" * 100_000: {"properties": {f"p{at}": {} for at in range(8_000)}, "type": "object"}}
    must: Any = {"tool_choice": "required"}
    return {
        "blanks behind a call": forced(call + blanks),
        "blanks before a closing tag": forced(call + blanks + "</tool_call>"),
        "many calls": forced((call + "</tool_call>") * 20),
        "marks": forced("<tool_call>" * 120),
        "marks in reasoning": forced("<think>" + "<tool_call>" * 120),
        "backticks": forced("`" * 1_400),
        "quotes": forced("f(x='" + "\"'" * 600),
        "long names": chat(tools=[tool(f"f{at}" + "x" * 60) for at in range(128)]),
        "a schema of many properties": chat(tools=[tool(properties=wide)], **must),
        "a schema of many patterns": chat(tools=[tool(properties=looking)], **must),
        "many such schemas": chat(tools=[tool(f"f{at}", properties=looking) for at in range(40)], **must),
        "what is looked ahead for": chat(tools=[tool(properties={"a": {"pattern": "^" + "(?=a)" * 40_000}})], **must),
        "brackets of a pattern": chat(tools=[tool(properties={"a": {"pattern": "(" * 250_000}})], **must),
        "a long shared part": chat(tools=[tool(properties=pointing, **shared)], **must),
        "a long name of properties": chat(tools=[tool(properties=named)], **must),
        "parts of a schema": chat(tools=[tool(allOf=[{"properties": {"a": {}}}] * 9_000)], **must),
        "large numbers": chat(tools=[tool(properties={"a": {"enum": [2**70] * 9_000}})], **must),
        "the same required": chat(tools=[tool(required=["a"] * 50_000, properties={"a": {}})], **must),
        "an argument of many bytes": chat(called("f", arguments=json.dumps({"x": kilobyte * 10_000})), tools=[tool()]),
    }


def hostile_inputs() -> dict[str, HostileInput]:
    """Return all of them by name."""
    return workflows() | conversations() | options() | calls() | houses() | addresses()


def encoded(one: HostileInput) -> bytes:
    """Return the body as it is sent."""
    return one.body if isinstance(one.body, bytes) else json.dumps(one.body).encode()
