"""Real client libraries, each with a chat, a tool and a structured answer.

A test whose library is not installed (`make clients`) is skipped. The model calls `weather` where it is offered tools,
then says SAID; without tools it answers in JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from tests.clients.stage import FACTS, SAID, Prompter, run_script

ASKED = "How warm is it in Oslo?"
pytestmark = pytest.mark.usefixtures("quiet")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}


class Weather(BaseModel):
    """What the weather is."""

    city: Literal["Oslo", "Bergen"]
    degrees: Literal[7, 8]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"7 degrees in {city}"


def needs(*names: str) -> list[Any]:
    """Return the modules of a client; skip the test if one is not installed."""
    return [pytest.importorskip(name, reason=f"{name} is not installed: make clients") for name in names]


def test_openai(at: Prompter) -> None:
    (openai,) = needs("openai")
    client = openai.OpenAI(base_url=at.url + "/v1", api_key="none", max_retries=0)
    asked = [{"role": "user", "content": ASKED}]
    first = client.chat.completions.create(model="any", messages=asked, tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    history = [*asked, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    with client.chat.completions.stream(model="any", messages=history, tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.content == SAID
    parsed = client.chat.completions.parse(model="any", messages=asked, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(**FACTS)
    response = client.responses.create(model="any", input=ASKED, instructions="Be brief.")
    assert json.loads(response.output_text) == FACTS
    again = client.responses.create(model="any", input="And now?", previous_response_id=response.id)
    assert again.usage.input_tokens_details.cached_tokens >= 0 and again.previous_response_id == response.id
    assert client.responses.retrieve(response.id).output_text == response.output_text
    parsed = client.responses.parse(model="any", input=ASKED, text_format=Weather)
    assert parsed.output_parsed == Weather(**FACTS)
    vectors = client.embeddings.create(model="any", input=["one", "two"])
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == len(vectors.data[1].embedding) > 0


def test_openai_agents(at: Prompter) -> None:
    openai, _ = needs("openai", "agents.run")  # our own tests have a folder named agents, without such a module
    agents = importlib.import_module("agents")
    agents.set_tracing_disabled(True)

    async def said(kind: Any) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=at.url + "/v1", api_key="none", max_retries=0) as client:
            model = kind(model="any", openai_client=client)
            tool = agents.function_tool(weather)
            caller = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[tool])
            plain = agents.Agent(name="b", model=model, output_type=Weather)
            return [(await agents.Runner.run(agent, ASKED)).final_output for agent in (caller, plain)]

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        assert asyncio.run(said(kind)) == [SAID, Weather(**FACTS)]


def test_anthropic(at: Prompter) -> None:
    (anthropic,) = needs("anthropic")
    client = anthropic.Anthropic(base_url=at.url, api_key="none", max_retries=0)
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    asked = [{"role": "user", "content": ASKED}]
    first = client.messages.create(model="any", max_tokens=500, messages=asked, tools=tools)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (use.name, use.input, first.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
    history = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(model="any", max_tokens=500, messages=history, tools=tools) as stream:
        assert stream.get_final_text() == SAID
    counted = client.messages.count_tokens(model="any", messages=asked, tools=tools)
    assert counted.input_tokens == sum(
        (first.usage.input_tokens, first.usage.cache_read_input_tokens, first.usage.cache_creation_input_tokens)
    )


def test_langchain(at: Prompter) -> None:
    chat, tools, messages = needs("langchain_openai", "langchain_core.tools", "langchain_core.messages")
    model = chat.ChatOpenAI(base_url=at.url + "/v1", api_key="none", model="any", max_retries=0)
    bound = model.bind_tools([tools.tool(weather)])
    first = bound.invoke(ASKED)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    results = [messages.HumanMessage(ASKED), first, messages.ToolMessage("7", tool_call_id=call["id"])]
    pieces = list(bound.stream(results))
    assert "".join(piece.content for piece in pieces) == SAID
    assert model.with_structured_output(Weather).invoke(ASKED) == Weather(**FACTS)
    vectors = chat.OpenAIEmbeddings(
        base_url=at.url + "/v1", api_key="none", model="any", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_query("one")) > 0


class OtherTokens:
    """A stand-in for the tokenizer of OpenAI's models, which tiktoken would download."""

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())


def test_langchains_token_ids_of_another_tokenizer_are_refused(at: Prompter, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, openai, tiktoken = needs("langchain_openai", "openai", "tiktoken")
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: OtherTokens())
    vectors = chat.OpenAIEmbeddings(base_url=at.url + "/v1", api_key="none", model="any", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        vectors.embed_documents(["one", "two"])
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        vectors.embed_query("one")


def test_llama_index(at: Prompter) -> None:
    likes, llms, tools = needs("llama_index.llms.openai_like", "llama_index.core.llms", "llama_index.core.tools")
    model = likes.OpenAILike(
        api_base=at.url + "/v1", api_key="none", model="any", is_chat_model=True, is_function_calling_model=True
    )
    result = model.chat_with_tools([tools.FunctionTool.from_defaults(weather)], user_msg=ASKED)
    (call,) = model.get_tool_calls_from_response(result)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})
    said = [piece.delta or "" for piece in model.stream_chat([llms.ChatMessage(role="user", content=ASKED)])]
    assert json.loads("".join(said)) == FACTS


def test_pydantic_ai(at: Prompter) -> None:
    ai, models, providers = needs("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=at.url + "/v1", api_key="none")
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        agent = ai.Agent(kind("any", provider=provider), tools=[weather])
        assert agent.run_sync(ASKED).output == SAID
        plain = ai.Agent(kind("any", provider=provider), output_type=ai.NativeOutput(Weather))
        assert plain.run_sync(ASKED).output == Weather(**FACTS)


def test_instructor(at: Prompter) -> None:
    instructor, openai = needs("instructor", "openai")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=at.url + "/v1", api_key="none"), mode=mode)
        asked = [{"role": "user", "content": ASKED}]
        result = client.chat.completions.create(model="any", messages=asked, response_model=Weather, max_retries=0)
        assert isinstance(result, Weather)


def test_litellm(at: Prompter) -> None:
    (litellm,) = needs("litellm")
    asked = [{"role": "user", "content": ASKED}]
    for name, base in (("openai/any", at.url + "/v1"), ("anthropic/any", at.url), ("ollama_chat/any", at.url)):
        result = litellm.completion(model=name, api_base=base, api_key="none", messages=asked, tools=[TOOL])
        (call,) = result.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"}), name
        pieces = litellm.completion(model=name, api_base=base, api_key="none", messages=asked, stream=True)
        assert json.loads("".join(piece.choices[0].delta.content or "" for piece in pieces)) == FACTS, name


def test_ollama(at: Prompter) -> None:
    (ollama,) = needs("ollama")
    client = ollama.Client(host=at.url)
    asked = [{"role": "user", "content": ASKED}]
    first = client.chat(model="any", messages=asked, tools=[weather])
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    history = [*asked, first.message, {"role": "tool", "content": "7", "tool_name": "weather"}]
    pieces = list(client.chat(model="any", messages=history, tools=[weather], stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == SAID
    result = client.chat(model="any", messages=asked, format=Weather.model_json_schema())
    assert Weather.model_validate_json(result.message.content) == Weather(**FACTS)
    assert len(client.embed(model="any", input=["one", "two"]).embeddings) == 2
    assert client.list().models and client.ps().models


SCRIPT = """
import { generateText, streamText, tool, stepCountIs, jsonSchema, Output } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
const cairn = createOpenAICompatible({ name: 'cairn', baseURL: process.argv[2], apiKey: 'none',
  supportsStructuredOutputs: true });
const weather = tool({ description: 'The weather.', inputSchema: jsonSchema(JSON.parse(process.argv[3])),
  execute: async ({ city }) => `7 degrees in ${city}` });
const prompt = 'How warm is it in Oslo?';
const told = await generateText({ model: cairn('any'), tools: { weather }, stopWhen: stepCountIs(3), prompt });
const stream = streamText({ model: cairn('any'), prompt });
let text = '';
for await (const piece of stream.textStream) text += piece;
console.log(JSON.stringify({ said: told.text, steps: told.steps.length, streamed: JSON.parse(text) }));
"""


@pytest.mark.usefixtures("node")
def test_vercels_ai_sdk(at: Prompter) -> None:
    parsed = json.loads(run_script(SCRIPT, at.url + "/v1", json.dumps(SCHEMA)))
    assert parsed == {"said": SAID, "steps": 2, "streamed": FACTS}


def test_the_server_says_what_it_is(at: Prompter) -> None:
    """The stage works without any client library."""
    body = {"messages": [{"role": "user", "content": ASKED}]}
    with httpx.Client(base_url=at.url, trust_env=False, verify=False) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == FACTS
        called = http.post("/v1/chat/completions", json=body | {"tools": [TOOL]}).json()
        assert called["choices"][0]["finish_reason"] == "tool_calls"
