"""Stored responses: each is an agent with one turn more than the response that it continues.

    create                        an agent that begins with instructions and tools, and its first turn
    previous_response_id          a fork of that response's agent, which copies nothing, and the next turn
    other instructions, tools     an agent that begins with these and with all that was said so far

So a response survives a restart, continues with the exact ids of its context, and may be continued twice.
What the response's object says of its request stands in the agent's metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turns import TurnParams
from cairn.agents.types import AgentInfo, TurnInfo
from cairn.api.chat.attribution import AgentAttribution
from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.generation import check_generation, check_length, check_model, shown_tools, warn_of_tools
from cairn.api.chat.message_schemas import contents, plain_messages
from cairn.api.chat.openai_chunks import cache_object
from cairn.api.chat.schemas import ChatBody
from cairn.api.http.call import HTTPCall
from cairn.api.native.agent_schemas import MAX_OWN_METADATA
from cairn.api.openai.file_search import Searched
from cairn.api.openai.response_answer import ResponseAnswer, code_of, completed, failed_with
from cairn.api.openai.responses_items import Called, items_of
from cairn.api.openai.responses_schemas import instructed, tools_of
from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.text.chat.messages import plain, said_of
from cairn.types.errors import Conflict, InvalidRequest, NotFound, Overloaded, UnknownResponse
from cairn.types.outputs import Usage

PREFIX = "resp_"
TTL = 30 * 86_400.0
"""Seconds that a response is kept after its last use, as with OpenAI."""
KIND = "response"
"""`object` in the metadata of an agent that is a response."""
ADDED: Mapping[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    **dict.fromkeys(("max_tool_calls", "safety_identifier")),
    "service_tier": "default",
}
"""Fields that responses stored by earlier versions lack."""
_APART = ("tools", "instructions", "output")
"""Fields of a response object that are stored elsewhere: the agent begins with the first two."""


class _Head(msgspec.Struct):
    """The required fields in the `head` of a response's metadata."""

    id: str
    instructed: bool
    reasoning: dict[str, Any]


class StoredResponses:
    """The responses of a server that has a disk for them."""

    def __init__(self, config: Config, attribution: AgentAttribution) -> None:
        self._config = config
        self._attribution = attribution

    @property
    def open(self) -> bool:
        """Whether responses can be stored now."""
        return self._attribution.agents is not None

    async def begin(
        self,
        call: HTTPCall,
        service: Service,
        chat: ChatBody,
        head: Mapping[str, Any],
        called: Mapping[str, Called],
        include: str,
        previous: str | None,
        searched: Searched | None = None,
    ) -> RunningTurn:
        """Begin the turn of a response. `chat` has the instructions and the messages since the `previous` one."""
        agents, id = self._attribution.open(), str(head["id"])
        check_generation(chat, self._config)
        check_model(chat.model, service)
        service.check_generates()
        first = instructed(head["instructions"])
        tools = shown_tools(chat) or []
        warn_of_tools(call, service, tools)
        new = plain_messages(chat.messages)[len(first) :]
        if not new:
            raise InvalidRequest("input is empty; it must hold at least one item", field="input")
        await check_length(call, service, contents(chat.messages, tools), "messages")
        root = hashlib.sha256(json.dumps([first, tools]).encode("utf-8", "replace")).hexdigest()
        said = json.dumps({name: value for name, value in head.items() if name not in _APART}, ensure_ascii=False)
        if len(said) > MAX_OWN_METADATA:  # it is held in memory
            raise InvalidRequest(
                f"the request fields that a response repeats have more than {MAX_OWN_METADATA} characters, the limit; "
                "send less in text and tool_choice, or store: false"
            )
        metadata = {
            "object": KIND,
            "root": root,
            "head": said,
            "called": json.dumps(called),
            "include": include,
        }
        if searched is not None:
            metadata["searched"] = msgspec.json.encode(searched).decode()
        await self._open(agents, call.tenant, id, previous, root, metadata, first, tools)
        try:
            params = TurnParams(
                request=call.number,
                share=call.share,
                options=chat.chat_options(),
                template_args=chat.template_args(service.chat.mentions),
                wanted=chat.wanted(),
                service=service,
            )
            return await agents.turn(call.tenant, id, new, params)
        except BaseException:
            await agents.delete(call.tenant, id)
            raise

    def keeper(self, call: HTTPCall, service: Service, running: RunningTurn) -> Callable[[ChoiceStream], None]:
        """Return a function that keeps an answer's exact tokens beside its turn.

        Many clients send the whole conversation again instead of the response's id.
        """
        agents, agent, tenant = self._attribution.open(), running.agent, call.tenant

        def keep(choice: ChoiceStream) -> None:
            sampled = service.chat.sampled(choice.request.prompt, choice.tokens, choice.said.message())
            if sampled is not None:
                agents.chats.keep(tenant, sampled, agent, service.spec.identity)

        return keep

    async def _open(
        self,
        agents: Agents,
        tenant: str,
        id: str,
        previous: str | None,
        root: str,
        metadata: dict[str, str],
        first: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> None:
        """Make the agent of a response."""
        before = None if previous is None else self._previous(agents, tenant, previous)
        if before is not None and before.metadata["root"] == root:
            await self._made(agents, tenant, lambda: agents.fork(tenant, before.id, new_id=id, metadata=metadata))
            return
        messages = first if before is None else [*first, *await self._said(agents, tenant, before)]
        await self._made(
            agents,
            tenant,
            lambda: agents.create(tenant, id=id, messages=messages, tools=tools, metadata=metadata, ttl=TTL),
        )

    async def _made(self, agents: Agents, tenant: str, make: Callable[[], Awaitable[AgentInfo]]) -> None:
        """Create an agent; if there are too many, the oldest response is deleted for it."""
        try:
            await make()
        except Overloaded:
            if not await agents.make_room(tenant, PREFIX):
                raise
            await make()

    async def history(self, tenant: str, previous: str, *, running: bool = False) -> list[dict[str, Any]]:
        """Return the messages up to a response and its answer, without its instructions.

        A response that runs or was interrupted raises unless `running` allows it.
        """
        agents = self._attribution.open()
        info = self._find(agents, tenant, previous) if running else self._previous(agents, tenant, previous)
        return await self._said(agents, tenant, info)

    def state(self, tenant: str, id: str) -> str:
        """Return `idle`, `running`, `interrupted`, or `gone`."""
        try:
            return self._find(self._attribution.open(), tenant, id).state
        except NotFound:
            return "gone"

    def called(self, tenant: str, id: str) -> dict[str, Called]:
        """Return the tools of a response whose calls are not a function's."""
        return _called(self._find(self._attribution.open(), tenant, id))

    def _previous(self, agents: Agents, tenant: str, id: str) -> AgentInfo:
        """Return the response that another continues."""
        try:
            info = self._find(agents, tenant, id)
        except NotFound:
            raise UnknownResponse(
                f"previous_response_id: there is no response {id[:100]!r}; one sent with store: false is not kept",
                field="previous_response_id",
            ) from None
        if info.state != "idle":
            raise Conflict(f"response {id} is {info.state}: only a complete one can be continued")
        return info

    def _find(self, agents: Agents, tenant: str, id: str) -> AgentInfo:
        return find_kept(agents, tenant, id, PREFIX, KIND, _is_response)

    async def _said(
        self, agents: Agents, tenant: str, info: AgentInfo, *, answered: bool = True
    ) -> list[dict[str, Any]]:
        """Return all messages but the instructions, with the last answer if `answered`."""
        first, _ = await agents.beginning(tenant, info.id)
        count = len(instructed(await self._instructions(agents, tenant, info)))
        found = [dict(message) for message in first[count:]]
        turns = [turn for turn in await agents.turns(tenant, info.id) if turn.current]
        for turn in turns:
            found += turn.messages
            if turn.answer is not None and (answered or turn is not turns[-1]):
                found.append(plain(turn.answer))
        return found

    async def _instructions(self, agents: Agents, tenant: str, info: AgentInfo) -> str | None:
        first, _ = await agents.beginning(tenant, info.id)
        if json.loads(info.metadata["head"])["instructed"] and first:
            return str(first[0]["content"])
        return None

    # ---------------------------------------------------------------------------------------------------- to look at

    async def show(self, tenant: str, id: str, service: Service) -> dict[str, Any]:
        """Return a response as it is now."""
        agents = self._attribution.open()
        info = self._find(agents, tenant, id)
        turn, content = await self._turn(agents, tenant, info), await agents.last(tenant, id)
        head: dict[str, Any] = ADDED | json.loads(info.metadata["head"])
        del head["instructed"]
        head["id"] = id  # it may have been imported under another
        _, tools = await agents.beginning(tenant, id)
        answer = self._answer(info, head, service)
        searched = _searched(info)
        head |= {
            "tools": [
                *(searched.tools if searched is not None else ()),
                *tools_of([tool["function"] for tool in tools], _called(info)),
            ],
            "instructions": await self._instructions(agents, tenant, info),
            "output": [],
        }
        cut = turn.state != "finished" or turn.finish_reason == "length"
        output = answer.items(said_of(turn.answer), cut=cut)
        if turn.state == "running":
            return {**head, "status": "in_progress"}
        if (sampling := content.began.sampling) is not None:
            head |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        end = content.ended
        if turn.state != "finished" or end is None:
            if end is None:  # nobody was left to write it
                return failed_with(head, "server_error", "the server ended before the answer was whole", output)
            if end.failure is None:
                return {**head, "status": "cancelled", "output": output}
            code = code_of(end.failure.code, end.failure.status)
            return failed_with(head, code, end.failure.message, output)
        usage = Usage(
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            cached_tokens=turn.cached_tokens,
        )
        found = completed(head, output, usage, end.reasoning, cut=cut, at=end.ended)
        found["usage"]["cairn"] = cache_object(end.cache)
        return found

    async def output(self, tenant: str, id: str, service: Service) -> list[dict[str, Any]] | None:
        """Return the output items of a response; None if there is no such response."""
        agents = self._attribution.open()
        try:
            info = self._find(agents, tenant, id)
        except NotFound:
            return None
        turn = await self._turn(agents, tenant, info)
        cut = turn.state != "finished" or turn.finish_reason == "length"
        answer = self._answer(info, json.loads(info.metadata["head"]) | {"id": id}, service)
        return answer.items(said_of(turn.answer), cut=cut)

    @staticmethod
    def _answer(info: AgentInfo, head: dict[str, Any], service: Service) -> ResponseAnswer:
        """Return the formatter of a response's answer, as it was when the response was made."""
        return ResponseAnswer(
            head,
            _called(info),
            service.tokenizer,
            encrypted=bool(info.metadata["include"]),
            searched=_searched(info),
        )

    async def input_items(self, tenant: str, id: str) -> list[dict[str, Any]]:
        """Return all that a response was made from as items: the history before it, and its input."""
        agents = self._attribution.open()
        info = self._find(agents, tenant, id)
        said = await self._said(agents, tenant, info, answered=False)
        return items_of(said, _called(info), id.removeprefix(PREFIX) + "_in")

    async def _turn(self, agents: Agents, tenant: str, info: AgentInfo) -> TurnInfo:
        """Return the turn of a response, the last of its agent."""
        turns = await agents.turns(tenant, info.id, after=info.head - 1, limit=1)
        if not turns:
            raise NotFound(f"response {info.id} has not begun", field="response_id")
        return turns[0]

    def check(self, tenant: str, id: str) -> None:
        """Raise NotFound if the tenant has no such response."""
        self._find(self._attribution.open(), tenant, id)

    async def delete(self, tenant: str, id: str) -> None:
        """Erase a response. Those that continued it stay."""
        agents = self._attribution.open()
        self._find(agents, tenant, id)
        await agents.delete(tenant, id)


def find_kept(
    agents: Agents, tenant: str, id: str, prefix: str, kind: str, is_one: Callable[[Mapping[str, str]], bool]
) -> AgentInfo:
    """Return the agent behind a response or a conversation.

    Raises NotFound if there is none, or if an agent made at /v1/agents only looks like one: `is_one` reads its
    metadata, and may raise what reading anything raises.
    """
    try:
        formed = id.startswith(prefix) and len(id) <= 64 and id.isascii() and id.replace("_", "").isalnum()
        info = agents.get(tenant, id) if formed else None
        if info is not None and info.metadata.get("object") == kind and is_one(info.metadata):
            return info
    except (NotFound, KeyError, ValueError, RecursionError):
        pass
    raise NotFound(f"there is no {kind} {id[:100]!r}", field="response_id" if kind == KIND else kind)


def _is_response(metadata: Mapping[str, str]) -> bool:
    msgspec.convert(json.loads(metadata["head"]), _Head)
    msgspec.convert(json.loads(metadata["called"]), dict[str, Called])
    if "searched" in metadata:
        msgspec.json.decode(metadata["searched"], type=Searched)
    return {"root", "include"} <= metadata.keys()


def _searched(info: AgentInfo) -> Searched | None:
    given = info.metadata.get("searched")
    return None if given is None else msgspec.json.decode(given, type=Searched)


def _called(info: AgentInfo) -> dict[str, Called]:
    return {name: Called(*parts) for name, parts in json.loads(info.metadata["called"]).items()}
