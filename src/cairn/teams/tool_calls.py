"""Members' tools: before a member speaks it is asked whether it calls a tool, and with which arguments.

The team's owner runs the tool and posts its result, and the waiting round goes on. Both questions are asked aside under
a grammar, so that any model can call and neither stays in the context. The result stands in the member's next message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cairn.agents.work_journals import JournalEntry
from cairn.teams.definition import MAX_CALLS, SPEAKS, Member
from cairn.teams.entries import ToolAnswered, ToolCalled
from cairn.text.grammar.grammar import Structure, Wanted

CALL = f"Do you call a tool before you speak? Answer {SPEAKS} if you need none."
WITH = "You call {tool}. Answer with its arguments as JSON, and with nothing else."
ARGUMENT_TOKENS = 1_024
"""Most tokens of a call's arguments; a call that is incomplete by then is not made."""


class ToolsWaitError(Exception):
    """A round waits for tool results; the next `rounds` request resumes it."""


class ToolCalls:
    """The calls of a member in one step."""

    def __init__(self, member: Member, entries: Sequence[JournalEntry], step: int) -> None:
        """Collect the member's calls and results of `step` from a round's entries."""
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
        """Add the next call, or the decision to speak."""
        self._calls.append(call)

    @property
    def number(self) -> int:
        """Number of the next call."""
        return len(self._calls)

    @property
    def known(self) -> list[tuple[ToolCalled, ToolAnswered | None]]:
        """Calls so far with their results, None for one that waits."""
        return [(call, self._results.get(call.number)) for call in self._calls]

    @property
    def answered(self) -> list[tuple[ToolCalled, ToolAnswered]]:
        """Calls that have results, with them."""
        return [(call, result) for call, result in self.known if result is not None]

    @property
    def waits(self) -> bool:
        """Whether a result is missing."""
        return any(call.tool and result is None for call, result in self.known)

    @property
    def enough(self) -> bool:
        """Whether the member speaks now."""
        spoken = bool(self._calls) and not self._calls[-1].tool
        return spoken or not self._member.tools or len(self._calls) >= MAX_CALLS

    @property
    def options(self) -> list[str]:
        """Allowed answers to the question which tool to call."""
        return [*(tool.name for tool in self._member.tools), SPEAKS]

    def wanted(self, name: str) -> Wanted:
        """Return the grammar of a tool's arguments."""
        schema = next(tool.parameters for tool in self._member.tools if tool.name == name)
        return Wanted(structure=Structure(kind="json", text=schema, field=f"the parameters of {name}"))


def whole_json(text: str) -> str:
    """Return the arguments as JSON if they are an object, else an empty string."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else ""


def open_calls(entries: Sequence[JournalEntry]) -> list[ToolCalled]:
    """Return the calls that wait for results."""
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
