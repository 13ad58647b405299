"""Tools of members. A member is asked before it speaks whether it calls one, and with what; the team's owner runs it
and gives back what it returns, and the round, which waited, goes on.

Both questions are asked aside and held to by grammar, so any model can call, and no context has them. What a tool
returned stands in the message to which the member speaks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cairn.agents.journals import JournalEntry
from cairn.teams.definition import MAX_CALLS, SPEAKS, Member
from cairn.teams.entries import ToolAnswered, ToolCalled
from cairn.text.grammar.grammar import Structure, Wanted

CALL = f"Do you call a tool before you speak? Answer {SPEAKS} if you need none."
WITH = "You call {tool}. Answer with its arguments as JSON, and with nothing else."
ARGUMENT_TOKENS = 1_024
"""Tokens of the arguments of a call at most; one that is not whole by then is not made."""


class ToolsWaitError(Exception):
    """A round waits for what tools return. It goes on with the next rounds that are asked for."""


class ToolCalls:
    """The calls of a member in one step."""

    def __init__(self, member: Member, entries: Sequence[JournalEntry], step: int) -> None:
        """`entries`: of the round."""
        self._member = member
        ours = [
            entry.value
            for entry in entries
            if isinstance(entry.value, ToolCalled | ToolAnswered)
            and (entry.value.step, entry.value.member) == (step, member.name)
        ]
        self._calls = [one for one in ours if isinstance(one, ToolCalled)]
        self._results = {one.number: one for one in ours if isinstance(one, ToolAnswered)}

    def add(self, call: ToolCalled) -> None:
        """Another call, or that there is none."""
        self._calls.append(call)

    @property
    def number(self) -> int:
        """Of the next call."""
        return len(self._calls)

    @property
    def known(self) -> list[tuple[ToolCalled, ToolAnswered | None]]:
        """The calls so far with their results."""
        return [(call, self._results.get(call.number)) for call in self._calls]

    @property
    def answered(self) -> list[tuple[ToolCalled, ToolAnswered]]:
        """The calls whose results are there."""
        return [(call, result) for call, result in self.known if result is not None]

    @property
    def waits(self) -> bool:
        """Whether a result is not there yet."""
        return any(call.tool and result is None for call, result in self.known)

    @property
    def enough(self) -> bool:
        """Whether the member speaks now."""
        spoken = bool(self._calls) and not self._calls[-1].tool
        return spoken or not self._member.tools or len(self._calls) >= MAX_CALLS

    @property
    def options(self) -> list[str]:
        """What the member may answer when it is asked for a call."""
        return [*(tool.name for tool in self._member.tools), SPEAKS]

    def wanted(self, name: str) -> Wanted:
        """What the arguments of a tool have to be."""
        schema = next(tool.parameters for tool in self._member.tools if tool.name == name)
        return Wanted(structure=Structure(kind="json", text=schema, field=f"the parameters of {name}"))


def whole_json(text: str) -> str:
    """Arguments that are an object; empty for what was cut before it was one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else ""


def open_calls(entries: Sequence[JournalEntry]) -> list[ToolCalled]:
    """The calls whose results are not there."""
    answered = {
        (one.round, one.step, one.member, one.number)
        for entry in entries
        if isinstance(one := entry.value, ToolAnswered)
    }
    return [
        one
        for entry in entries
        if isinstance(one := entry.value, ToolCalled)
        and one.tool
        and (one.round, one.step, one.member, one.number) not in answered
    ]
