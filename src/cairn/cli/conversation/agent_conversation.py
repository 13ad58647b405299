"""`cairn chat --agent`: the same conversation in the terminal, kept by a server as an agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cairn.cli.agents import path
from cairn.cli.conversation.commands import Command, CommandTable
from cairn.cli.conversation.conversation import Conversation, Setting
from cairn.types.errors import CairnError, Conflict, NotFound

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client
    from cairn.cli.connection.http_stream import HttpStream

_WAITS = (0.05, 0.1, 0.2, 0.5)
"""Seconds until a turn that was cancelled has ended."""


class Told:
    """An agent as what answers: only the last message goes over the wire."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id
        self.answering: HttpStream | None = None

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> HttpStream:
        """The answer to the last message."""
        self.answering = self._client.turn(self.id, messages[-1], **sampling)
        return self.answering

    def generate(self, prompt: str, **sampling: Any) -> HttpStream:
        """The answer to a text."""
        return self.chat([{"role": "user", "content": prompt}], **sampling)


class AgentConversation(Conversation):
    """A conversation whose messages the server has."""

    _makes_room = False

    def __init__(
        self,
        client: Client,
        id: str,
        sampling: dict[str, Any],
        system: str | None = None,
        setting: Setting | None = None,
    ) -> None:
        """Find the agent, or make it if there is none of that id."""
        self._client, self._path = client, path(id)
        self._told = Told(client, id)
        super().__init__(self._told, sampling, setting=setting)
        try:
            agent = client.get(self._path)
        except NotFound:
            agent = client.post("/v1/agents", {"id": id, "system": system})
            self._say(f"agent {id} is new")
        else:
            if system is not None:
                raise CairnError(f"agent {id} is there already; --system is for a new one")
            self._say(f"agent {id} goes on behind turn {agent['head']}, {agent['tokens']} tokens")
        if agent["state"] == "interrupted":
            self._say("(its last answer was interrupted: /resume goes on with it, /undo takes the question back)")

    def _make_commands(self) -> CommandTable:
        return CommandTable(
            (
                Command(("/help", "/?"), "", "this list", self._help),
                Command(("/set",), "NAME VALUE", "sampling and more; alone: what can be set", self._set),
                Command(("/show",), "", "the model, and what is set", self._show_facts),
                Command(("/resume",), "", "go on with an answer that was interrupted", self._resume),
                Command(("/undo",), "", "go back before the last question", self._undo),
                Command(("/save",), "FILE", "write what was said here as JSON", self._save),
                Command(("/exit", "/bye", "/quit"), "", "leave; Ctrl-D does too. The agent stays", self._leave),
            )
        )

    def ask(self, question: str) -> None:
        """Answer one question; one that was stopped or failed half-way is taken back on the server too."""
        before = len(self.messages)
        self._told.answering = None
        try:
            head = self._head()
        except CairnError as error:
            self._lost(error)
            return
        super().ask(question)
        stream = self._told.answering
        if stream is not None and stream.answer.finish_reason is not None and len(self.messages) > before:
            return
        del self.messages[before:]
        try:
            if stream is not None:
                request = stream.request
            else:
                last = self._last()
                if last is None or last["number"] == head or [one["content"] for one in last["messages"]] != [question]:
                    return  # the question has not come as far as the agent; another client's may have
                request = last["request"]
            self._cancel(request)
            self._undo("")
        except (CairnError, KeyboardInterrupt) as error:
            self._say(f"{error}\n(your question is still to be taken back: /undo once the server answers)".lstrip())

    def _lost(self, error: CairnError) -> None:
        if self._told.answering is None:
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
        self._say(f"(took back: {asked[-1]['content'] if asked else 'what cannot be read'})")

    def _resume(self, _: str) -> None:
        last = self._last()
        try:
            stream = self._client.resume(self._told.id)
        except KeyboardInterrupt:
            self._cancel(str((last or {}).get("request", "")))
            self._say("(stopped: /resume goes on with it, /undo takes the question back)")
            return
        try:
            self._show(stream)
        finally:
            stream.close()
        answer = stream.answer
        if answer.finish_reason is None:
            self._cancel(stream.request)
            self._say("(stopped: /resume goes on with it, /undo takes the question back)")
            return
        self.messages += [*(last["messages"] if last else ()), answer.message]

    def _last(self) -> dict[str, Any] | None:
        """The turn that the next one would follow; None at the beginning."""
        head = self._head()
        turns: list[dict[str, Any]] = self._client.get(f"{self._path}/turns?limit=1&after={max(head - 1, 0)}")["data"]
        return next((turn for turn in turns if turn["number"] == head), None)

    def _head(self) -> int:
        return int(self._client.get(self._path)["head"])

    def _cancel(self, request: str) -> None:
        with suppress(CairnError):
            self._client.post(f"/v1/requests/{request}/cancel", {})
