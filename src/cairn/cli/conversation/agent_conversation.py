"""`cairn chat --agent`: a conversation in the terminal whose history a server keeps as an agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cairn.cli.common.agent_path import agent_path
from cairn.cli.conversation.commands import Command, CommandTable
from cairn.cli.conversation.conversation import Conversation, Setting
from cairn.cli.conversation.full_context import Messages, summary_of
from cairn.types.errors import CairnError, Conflict, NotFound

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client
    from cairn.cli.connection.http_stream import HttpStream

_SYSTEM = ("system", "developer")
_NAMES = 100
"""Names that are tried for an agent that goes on from a full one: ada-2, ada-3, ..."""
_LONGEST = 56
"""Characters of the old name in the new one; a name has at most 64."""
_WAITS = (0.05, 0.1, 0.2, 0.5)
"""Seconds to wait between attempts to roll back a cancelled turn that has not ended yet."""


class AgentSource:
    """An agent as a source of answers: only the last message is sent."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id
        self.answering: HttpStream | None = None

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> HttpStream:
        """Answer the last message."""
        self.answering = self._client.turn(self.id, messages[-1], **sampling)
        return self.answering

    def generate(self, prompt: str, **sampling: Any) -> HttpStream:
        """Answer a text."""
        return self.chat([{"role": "user", "content": prompt}], **sampling)


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a turn as a new agent can begin with it."""
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
    return {"role": message["role"], "content": message.get("content") or "", **kept}


class AgentConversation(Conversation):
    """A conversation whose messages the server keeps."""

    def __init__(
        self,
        client: Client,
        id: str,
        sampling: dict[str, Any],
        system: str | None = None,
        setting: Setting | None = None,
    ) -> None:
        """Find the agent, or create it. Raises CairnError if it exists and `system` is given."""
        self._client, self._path = client, agent_path(id)
        self._before = 0
        """The agent's head before the question that is being asked."""
        self._source = AgentSource(client, id)
        super().__init__(self._source, sampling, setting=setting)
        try:
            agent = client.get(self._path)
        except NotFound:
            agent = client.post("/v1/agents", {"id": id, "system": system})
            self._say(f"agent {id} is new")
        else:
            if system is not None:
                raise CairnError(f"agent {id} exists already; --system is for a new one")
            self._say(f"agent {id} continues after turn {agent['head']}, {agent['tokens']} tokens")
        if agent["state"] == "interrupted":
            self._say("(its last answer was interrupted: /resume continues it, /undo takes the question back)")

    def _make_commands(self) -> CommandTable:
        return CommandTable(
            (
                Command(("/help", "/?"), "", "this list", self._help),
                Command(("/set",), "NAME VALUE", "change sampling and more; alone: list the settings", self._set),
                Command(("/show",), "", "the model, and the settings", self._show_facts),
                Command(("/resume",), "", "continue an interrupted answer", self._resume),
                Command(("/undo",), "", "go back before the last question", self._undo),
                Command(("/clear", "/new"), "", "go on as a new agent with the same system prompt", self._clear),
                Command(("/drop",), "", "go on as a new agent without the older half", self._drop),
                Command(
                    ("/summarise", "/summarize"),
                    "",
                    "go on as a new agent with a summary of the older half",
                    self._summarise,
                ),
                Command(("/save",), "FILE", "write this conversation as JSON", self._save),
                Command(("/exit", "/bye", "/quit"), "", "leave; Ctrl-D does too. The agent stays", self._leave),
            )
        )

    def ask(self, question: str) -> None:
        """Answer one question; one that was stopped or failed is taken back on the server too."""
        before = len(self.messages)
        self._source.answering = None
        try:
            self._before = self._head()
        except CairnError as error:
            self._lost(error)
            return
        super().ask(question)
        stream = self._source.answering
        if stream is not None and stream.answer.finish_reason is not None and len(self.messages) > before:
            return
        del self.messages[before:]
        try:
            if stream is not None:
                request = stream.request
            else:
                last = self._last()
                if last is None or last["number"] == self._before:
                    return  # the question has not reached the agent
                if [message["content"] for message in last["messages"]] != [question]:
                    return  # another client's question has
                request = last["request"]
            self._cancel(request)
            self._undo("")
        except (CairnError, KeyboardInterrupt) as error:
            self._say(f"{error}\n(your question was not taken back yet: /undo once the server answers)".lstrip())

    def _lost(self, error: CairnError) -> None:
        if self._source.answering is None:
            super()._lost(error)
        else:  # the server has the question, and `ask` takes it back
            self._say(str(error))

    def _undo(self, _: str) -> None:
        last = self._last()
        if last is None:
            self._say("(there is nothing to take back)")
            return
        for wait in (*_WAITS, None):
            try:
                self._client.post(self._path + "/rollback", {"turn": last["parent"]})
                break
            except Conflict:
                if wait is None:
                    raise
                time.sleep(wait)
        asked = last["messages"]
        if last["state"] == "finished" and self.messages[-len(asked) - 1 : -1] == asked:
            del self.messages[-len(asked) - 1 :]
        self._say(f"(took back: {asked[-1]['content'] if asked else 'a question that cannot be read'})")

    def _resume(self, _: str) -> None:
        last = self._last()
        try:
            stream = self._client.resume(self._source.id)
        except KeyboardInterrupt:
            self._cancel(str((last or {}).get("request", "")))
            self._say("(stopped: /resume continues it, /undo takes the question back)")
            return
        try:
            self._show(stream)
        finally:
            stream.close()
        answer = stream.answer
        if answer.finish_reason is None:
            self._cancel(stream.request)
            self._say("(stopped: /resume continues it, /undo takes the question back)")
            return
        self.messages += [*(last["messages"] if last else ()), answer.message]

    # ---------------------------------------------------------------------------------------------- a full context

    def _history(self) -> Messages:
        """Return what the server has of this agent, without the system prompt."""
        turns = self._client.get(f"{self._path}/turns")["data"]
        said = [
            [*turn["messages"], turn["answer"]] for turn in turns if turn["current"] and turn["state"] == "finished"
        ]
        return [*self._beginning()[1], *(plain(one) for turn in said for one in turn if one)]

    def _beginning(self) -> tuple[Messages, Messages]:
        """Return the system messages that the agent began with, and the others."""
        first = [plain(one) for one in self._client.get(self._path)["messages"] or ()]
        return [one for one in first if one["role"] in _SYSTEM], [one for one in first if one["role"] not in _SYSTEM]

    def _summary(self, older: Messages) -> Messages:
        system = "\n\n".join(str(one["content"]) for one in self._beginning()[0])
        name = self._client.model()
        models = self._client.get("/v1/models")["data"]
        context = next((one.get("max_model_len") for one in models if one["id"] == name), None)
        return summary_of(self._client, older, system or None, context)

    def _clear(self, _: str) -> None:
        self._go_on_with([])

    def _go_on_with(self, messages: Messages) -> None:
        """Go on as a new agent that begins with these messages. The agent so far stays as it is."""
        agent = self._client.get(self._path)
        body = {
            "model": agent["model"],
            "messages": [*self._beginning()[0], *messages],
            "tools": agent["tools"] or None,
        }
        old = self._source.id
        stem, _, number = old.rpartition("-")
        stem, first = (stem, int(number) + 1) if stem and number.isdecimal() else (old, 2)
        for suffix in range(first, first + _NAMES):
            id = f"{stem[:_LONGEST]}-{suffix}"
            try:
                self._client.post("/v1/agents", {"id": id, **body})
                break
            except Conflict:
                if suffix == first + _NAMES - 1:
                    raise
        self._source.id, self._path, self._before = id, agent_path(id), 0
        self._say(f"(agent {old} stays as it is; this goes on as agent {id})")

    def _last(self) -> dict[str, Any] | None:
        """Return the turn at the agent's head; None at the beginning."""
        head = self._head()
        turns: list[dict[str, Any]] = self._client.get(f"{self._path}/turns?limit=1&after={max(head - 1, 0)}")["data"]
        return next((turn for turn in turns if turn["number"] == head), None)

    def _head(self) -> int:
        return int(self._client.get(self._path)["head"])

    def _cancel(self, request: str) -> None:
        with suppress(CairnError):
            self._client.post(f"/v1/requests/{request}/cancel", {})
