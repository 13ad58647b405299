"""The routes of OpenAI's Responses API, under /v1/responses.

    POST /v1/responses                      POST /v1/responses/input_tokens      POST /v1/responses/compact
    GET  /v1/responses/{id}?stream=&starting_after=      DELETE /v1/responses/{id}
    POST /v1/responses/{id}/cancel          GET  /v1/responses/{id}/input_items?limit=&order=&after=

Where the server keeps agents a response is one (`stored_responses.py`), unless `store` is false.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from cairn.agents.running_turn import RunningTurn
from cairn.api.chat.cache_diagnosis import RecentPrompts
from cairn.api.chat.exchange import ChoiceStream, Exchange, rename_fields
from cairn.api.chat.generation import chat_exchange, chat_prompt
from cairn.api.chat.openai_chunks import pack
from cairn.api.chat.paging import page_of_items, parameters
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.http.sse import EVENT_STREAM
from cairn.api.native.agent_schemas import NoBody, check_metadata
from cairn.api.native.turns import turn_exchange
from cairn.api.openai.conversations import Conversations, conversation_of
from cairn.api.openai.file_search import RESULTS, FileSearch, Searched, wants_search
from cairn.api.openai.response_answer import ResponseAnswer, completed, head_of
from cairn.api.openai.responses_items import items_of
from cairn.api.openai.responses_schemas import ENCRYPTED, LOGPROBS, NAMES, ResponseBody, Tools, chat_of, instructed
from cairn.api.openai.stored_responses import PREFIX, StoredResponses
from cairn.frontend.service import Service
from cairn.types.errors import CairnError, ContextTooLong, InvalidRequest, UnknownResponse
from cairn.types.outputs import Delta, Done

TASK = (
    "Write a summary of this conversation from which it can go on without the rest: what the user wants, what was "
    "decided and found out, names of files and values that matter, what tools gave, and what is still to be done. "
    "Write the summary and nothing else."
)
OPENING = "Summary of the conversation so far:\n"
SUMMARY_TOKENS = 4096
"""The longest summary."""


def compacting(chat: dict[str, Any]) -> dict[str, Any]:
    """Return the chat that asks for a summary of another.

    It keeps the tools, so that its prefix is found in the cache.
    """
    messages = [*chat["messages"], {"role": "user", "content": TASK}]
    most = chat.get("max_completion_tokens", SUMMARY_TOKENS)
    wanted = {"messages": messages, "max_completion_tokens": most, "reasoning_effort": "none"}
    left_out = ("tool_choice", "response_format", "logprobs", "top_logprobs")
    return {name: value for name, value in chat.items() if name not in left_out} | wanted


class CompactedAnswer:
    """The adapter of a summary, which is only ever sent whole."""

    def __init__(self, id: str, messages: Sequence[dict[str, Any]], choices: Sequence[ChoiceStream]) -> None:
        """Format the summary of `messages`."""
        (self._choice,) = choices
        self._id = id
        kept = [one for one in messages if one["role"] in ("system", "developer")]
        self._kept = items_of(kept, {}, id.removeprefix("resp_"))

    def begin(self) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def end(self) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def error(self, error: CairnError) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def heartbeat(self) -> bytes:
        """Return nothing: a summary is not streamed."""
        return b""

    def whole(self) -> dict[str, Any]:
        """Return the compacted items and their usage."""
        done = self._choice.done
        assert done is not None
        text = OPENING + self._choice.said.text
        item = {"id": "cmp_" + self._id.removeprefix("resp_"), "type": "compaction", "encrypted_content": pack(text)}
        head = {"id": self._id, "object": "response.compaction", "created_at": int(time.time())}
        usage = completed({}, [], done.usage, self._choice.reasoning_tokens, cut=False)["usage"]
        return head | {"output": [*self._kept, item], "usage": usage}


PATH = "/v1/responses"
CANCEL_SECONDS = 5.0
"""Seconds that a cancelled response may take to end before it is shown as it is."""


class Responses:
    """The routes of responses."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._exchanges = state.exchanges
        self._logs = state.logs
        self._attribution = state.attribution
        self._stored = StoredResponses(state.config, state.attribution)
        self._recent = RecentPrompts()
        self._search = FileSearch(state.config, state.library)
        self._conversations = Conversations(state, self._stored)

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/responses", self.create, ResponseBody, model="chat", keeps=True),
            Route("POST", "/v1/responses/input_tokens", self.input_tokens, ResponseBody, model="chat"),
            Route("POST", "/v1/responses/compact", self.compact, ResponseBody, model="chat"),
            Route("GET", "/v1/responses/{id:resp_}", self.show, query=("stream", "starting_after", "include")),
            Route("DELETE", "/v1/responses/{id:resp_}", self.delete),
            Route("POST", "/v1/responses/{id:resp_}/cancel", self.cancel, NoBody),
            Route(
                "GET",
                "/v1/responses/{id:resp_}/input_items",
                self.input_items,
                query=("limit", "order", "after", "before"),
            ),
            *self._conversations.routes(),
        ]

    async def _read(self, call: HTTPCall, service: Service) -> ResponseBody:
        """Return the body of a call, with references replaced by the items that they name."""
        body = await read(ResponseBody, call, self._config)
        if body.conversation is not None and body.previous_response_id is not None:
            raise InvalidRequest("give either conversation or previous_response_id", field="conversation")
        body.input = await self._conversations.references.resolved(call, service, body.input)
        return body

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create a response. It is stored, so that the next one can continue it, unless `store` is false."""
        body = await self._read(call, service)
        check_metadata(body.metadata)
        tools = Tools(body.tools, call)
        kept = body.store is not False and self._stored.open and not body.prewarms
        if not kept and body.store is not False and not body.prewarms:
            call.warn("the response is not stored: this server keeps no agents")
        for name in ("background", "conversation"):
            if getattr(body, name) and not kept:
                raise InvalidRequest(f"{name} needs a response that is stored", field=name)
        head = head_of(body, PREFIX + call.id, service.name, stored=kept)
        answer = ResponseAnswer(
            head,
            tools.called,
            service.tokenizer,
            encrypted=body.includes(ENCRYPTED),
            logprobs=body.includes(LOGPROBS),
            progress=bool(body.return_progress and body.stream),
        )
        try:
            with rename_fields(NAMES):
                exchange = await self._exchange(call, service, body, tools, answer, head, kept=kept)
                if exchange.unattended and not body.stream:
                    self._exchanges.begin(call, exchange)
                    await call.json(head)
                    return
                await self._exchanges.run(call, exchange, stream=bool(body.stream))
        except ContextTooLong as error:
            if not body.stream or call.started:
                raise
            # Clients that compact long conversations look for this error in the stream alone.
            call.ended = error.code
            await call.begin(EVENT_STREAM)
            await call.write(answer.begin() + answer.error(error), more=False)

    async def _exchange(
        self,
        call: HTTPCall,
        service: Service,
        body: ResponseBody,
        tools: Tools,
        answer: ResponseAnswer,
        head: dict[str, Any],
        *,
        kept: bool,
    ) -> Exchange:
        if not kept:
            history = await self._history(call, body, tools)
            await self._searched(call, body, tools, answer, history)
            chat = parse(ChatBody, history, self._config)
            exchange = await chat_exchange(
                call, service, self._config, self._attribution, chat, answer.of, NAMES, allow_empty=body.prewarms
            )
        else:
            running = await self._begin(call, service, body, tools, answer, head)
            choices = [ChoiceStream(running.request)]
            keep = self._stored.keeper(call, service, running)
            exchange = turn_exchange(running, choices, answer.of(choices, lambda _: running.cache), keep)
            exchange.names, exchange.unattended = NAMES, bool(body.background)
        exchange.numbered = True
        prompt, parts = exchange.choices[0].request.prompt, {"model_changed": service.name} | body.parts
        self._recent.note(call.tenant, str(head["id"]), parts, prompt)
        if body.compares is not None:
            answer.compare(self._recent.compare(call.tenant, body.compares, parts, prompt))
        return exchange

    async def _begin(
        self,
        call: HTTPCall,
        service: Service,
        body: ResponseBody,
        tools: Tools,
        answer: ResponseAnswer,
        head: dict[str, Any],
    ) -> RunningTurn:
        """Begin the turn of a response that is kept."""
        chat = chat_of(body, tools, call)
        searched = await self._searched(call, body, tools, answer, chat)
        include = ENCRYPTED if body.includes(ENCRYPTED) else ""
        said = head | {"instructed": bool(body.instructions)}
        named = conversation_of(body.conversation)
        if named is None:
            asked = parse(ChatBody, chat, self._config)
            previous = body.previous_response_id
            return await self._stored.begin(call, service, asked, said, tools.called, include, previous, searched)
        with self._conversations.locked(call.tenant, named):
            state = await self._conversations.state(call.tenant, named)
            at = len(instructed(body.instructions))
            chat["messages"][at:at] = state.more
            asked = parse(ChatBody, chat, self._config)
            running = await self._stored.begin(
                call, service, asked, said, tools.called, include, state.head or None, searched
            )
            try:
                await self._conversations.move(call.tenant, named, state, str(head["id"]))
            except BaseException:
                running.cancel()
                await running.close()
                raise
            return running

    async def _searched(
        self, call: HTTPCall, body: ResponseBody, tools: Tools, answer: ResponseAnswer, chat: dict[str, Any]
    ) -> Searched | None:
        """Run the file search that a response begins with, if one was asked for, and put its passages into the chat."""
        if not tools.searches or body.prewarms or not wants_search(body.tool_choice):
            return None
        searched = await self._search.run(call, tools.searches, chat, results=body.includes(RESULTS))
        if searched is not None:
            answer.show(searched)
        return searched

    async def _chat(self, call: HTTPCall, body: ResponseBody, tools: Tools) -> ChatBody:
        """Return the whole chat that a body asks for, with the responses that it continues."""
        return parse(ChatBody, await self._history(call, body, tools), self._config)

    async def _history(self, call: HTTPCall, body: ResponseBody, tools: Tools) -> dict[str, Any]:
        chat, before = chat_of(body, tools, call), list[dict[str, Any]]()
        if body.previous_response_id is not None:
            if not self._stored.open:
                raise UnknownResponse(
                    "previous_response_id: this server keeps no responses", field="previous_response_id"
                )
            before = await self._stored.history(call.tenant, body.previous_response_id)
        elif (named := conversation_of(body.conversation)) is not None:
            state = await self._conversations.state(call.tenant, named)
            before = await self._stored.history(call.tenant, state.head) if state.head else []
            before = [*before, *state.more]
        at = len(instructed(body.instructions))
        chat["messages"][at:at] = before
        return chat

    async def input_tokens(self, call: HTTPCall, service: Service) -> None:
        """Count the tokens of a response's input."""
        body = await self._read(call, service)
        tools = Tools(body.tools, call)
        if tools.searches:
            call.warn("tools: files are not searched to count tokens, so passages of a search are not counted")
        with rename_fields(NAMES):
            prompt = await chat_prompt(call, service, self._config, await self._chat(call, body, tools))
        await call.json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def compact(self, call: HTTPCall, service: Service) -> None:
        """Return a shorter conversation that says the same."""
        body = await self._read(call, service)
        with rename_fields(NAMES):
            chat = await self._history(call, body, Tools(body.tools, call))
            wanted = parse(ChatBody, compacting(chat), self._config)
            said = chat["messages"][len(instructed(body.instructions)) :]
            exchange = await chat_exchange(
                call,
                service,
                self._config,
                self._attribution,
                wanted,
                lambda choices: CompactedAnswer(PREFIX + call.id, said, choices),
                NAMES,
            )
            await self._exchanges.run(call, exchange, stream=False)

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a response. With `stream=true` its events after number `starting_after` are streamed."""
        asked = parameters(call, ("stream", "starting_after", "include", "include[]", "include_obfuscation"))
        after = asked.get("starting_after", "-1")
        if not (after.removeprefix("-").isascii() and after.removeprefix("-").isdigit() and len(after) <= 15):
            raise InvalidRequest("starting_after must be the number of an event", field="starting_after")
        id = call.path_part(PATH)
        self._stored.check(call.tenant, id)
        if asked.get("stream", "false") != "true":
            await call.json(await self._stored.show(call.tenant, id, service))
            return
        follower = self._logs.find(_number_of(id), call.salt, self._config.heartbeat)
        await follower.run(call, max(int(after), -1) + 1)

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a response. Answered when its bytes are gone from the disk."""
        id = call.path_part(PATH)
        await self._stored.delete(call.tenant, id)
        await call.json({"id": id, "object": "response", "deleted": True})

    async def cancel(self, call: HTTPCall, service: Service) -> None:
        """Cancel a response that runs. Returns it as far as it was generated."""
        id = call.path_part(PATH)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        self._stored.check(call.tenant, id)
        found = await self._stored.show(call.tenant, id, service)
        if found["status"] in ("completed", "incomplete", "failed"):
            raise InvalidRequest(f"response {id} is {found['status']}: only one that runs can be cancelled", field="id")
        if found["status"] == "in_progress":
            service.abort(_number_of(id))
            end = asyncio.get_running_loop().time() + CANCEL_SECONDS
            while found["status"] == "in_progress" and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.02)
                found = await self._stored.show(call.tenant, id, service)
        await call.json(found)

    async def input_items(self, call: HTTPCall, service: Service) -> None:
        """List the input items of a response. The last comes first unless `order` is asc."""
        items = await self._stored.input_items(call.tenant, call.path_part(PATH))
        await call.json(page_of_items(call, items))


def _number_of(id: str) -> int:
    """Return the number of the call that began a response; 0 for an id of another form."""
    try:
        return int(id.removeprefix(PREFIX), 16)
    except ValueError:
        return 0
