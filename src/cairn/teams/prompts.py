"""Members' prompts and the transcript: the shared beginning, a role, and what was said since a member last spoke.

All prompts begin with the same messages; a member's name and role come after them, in its first message. So the shared
beginning is computed once. `visible` is the only way from the journal into a prompt: it keeps whispers private.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cairn.agents.work_journals import JournalEntry
from cairn.teams.definition import Member, Team
from cairn.teams.entries import (
    Ballot,
    Chose,
    Posted,
    RoundBegan,
    RoundDone,
    Stated,
    StepOpened,
    ToolAnswered,
    ToolCalled,
    Voted,
)


def beginning(team: Team) -> list[dict[str, Any]]:
    """Return the messages that every member's context begins with."""
    names = ", ".join(team.names)
    parts = [team.system] if team.system else []
    parts += [f"# {document.name}\n\n{document.text}" for document in team.documents]
    parts.append(f"You are one of a team: {names}. Each message tells you what was said since you last spoke.")
    return [{"role": "system", "content": "\n\n".join(parts)}]


def introduction(member: Member) -> str:
    """Return the text that tells a member its name, role and tools; sent once."""
    role = f" {member.role.strip()}" if member.role.strip() else ""
    tools = [f"{tool.name}: {tool.description}\n{tool.parameters}".strip() for tool in member.tools]
    told = "\n\nYou have these tools:\n" + "\n".join(tools) if tools else ""
    return f"You are {member.name}.{role}{told}"


def called(calls: Sequence[tuple[ToolCalled, ToolAnswered]]) -> list[str]:
    """Return the lines that tell a member the results of its calls; other members never see them."""
    return [f"You called {call.tool} with {call.arguments}. It returned: {result.content}" for call, result in calls]


def visible(entry: JournalEntry, member: str) -> str | None:
    """Return an entry as `member` sees it; None if it does not."""
    match entry.value:
        case Posted(sender=sender, content=content, to=to):
            if sender == member:
                return f"You whispered to {_to(to)}: {content}" if to else f"You said: {content}"
            if to and member not in to:
                return None
            return f"{sender} whispers to {_to(to)}: {content}" if to else f"{sender}: {content}"
        case Stated(member=speaker, content=content):
            return None if speaker == member else f"{speaker}: {content}"
        case Voted() as vote:
            return f"Vote: {vote.question} {_outcome(vote)}"
    return None


def _to(names: Sequence[str]) -> str:
    return " and ".join(names)


def _outcome(vote: Voted) -> str:
    counts = ", ".join(f"{option} {number:g}" for option, number in vote.counts[-1].items()) if vote.counts else ""
    return f"Decision: {vote.decision or 'none'} ({counts}; {vote.why})."


def in_order(entries: Iterable[JournalEntry], names: Sequence[str]) -> list[JournalEntry]:
    """Sort entries for reading: members that spoke in parallel are in member order, not by who finished first."""
    opened: dict[tuple[int, int], int] = {}
    found: list[tuple[int, int, JournalEntry]] = []
    for entry in entries:
        match entry.value:
            case StepOpened() as step:
                opened[step.round, step.step] = entry.number
            case Stated() | Chose() | Ballot() as one:
                at = opened.get((one.round, one.step), entry.number)
                found.append((at, 1 + names.index(one.member) if one.member in names else 0, entry))
                continue
        found.append((entry.number, 0, entry))
    return [entry for _, _, entry in sorted(found, key=lambda one: one[:2])]


def since(entries: Sequence[JournalEntry], names: Sequence[str], member: str, told: int) -> list[str]:
    """Return what `member` has not seen yet, up to entry number `told`."""
    known = _known(entries, member, told)
    first = bisect_right(entries, known, key=_number)
    new = in_order(entries[first : bisect_right(entries, told, key=_number)], names)
    return [text for entry in new if (text := visible(entry, member)) is not None]


def _known(entries: Sequence[JournalEntry], member: str, told: int) -> int:
    """Return the number of the last entry that a member saw when it last spoke; 0 if it never spoke."""
    spoken: tuple[int, int] | None = None
    for entry in reversed(entries[: bisect_right(entries, told, key=_number)]):
        match entry.value:
            case Stated() as said if spoken is None and said.member == member:
                spoken = said.round, said.step
            case StepOpened() as step if spoken == (step.round, step.step):
                return step.told
    return 0


def _number(entry: JournalEntry) -> int:
    return entry.number


def has_spoken(entries: Sequence[JournalEntry], member: str, told: int) -> bool:
    """Return whether a member has spoken up to entry `told`, so that its context has its introduction."""
    said = reversed(entries[: bisect_right(entries, told, key=_number)])
    return any(isinstance(one.value, Stated) and one.value.member == member for one in said)


def message(
    team: Team, member: str, entries: Sequence[JournalEntry], told: int, instruction: str, calls: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the new messages of a member's turn or question; `calls` are the lines of `called`."""
    parts = [] if has_spoken(entries, member, told) else [introduction(team.member(member))]
    parts += since(entries, team.names, member, told)
    parts += [*calls, instruction]
    return [{"role": "user", "content": "\n\n".join(parts)}]


SHOWN = (Posted, RoundBegan, ToolCalled, ToolAnswered, Stated, Chose, Voted, RoundDone)


def listed(team: Team, entries: Iterable[JournalEntry], member: str = "") -> list[dict[str, Any]]:
    """Return the transcript as JSON-ready dicts; with `member`, without what that member does not see."""
    return [
        {"number": entry.number, **msgspec.to_builtins(entry.value)}
        for entry in in_order(entries, team.names)
        if _shown(entry.value, member)
    ]


def _hidden(value: Any, member: str) -> bool:
    if isinstance(value, ToolCalled | ToolAnswered):
        return member != value.member
    return isinstance(value, Posted) and bool(value.to) and member not in (*value.to, value.sender)


def _shown(value: Any, member: str) -> bool:
    """Return whether the transcript shows an entry (to `member`, if named)."""
    silent = isinstance(value, ToolCalled) and not value.tool
    return isinstance(value, SHOWN) and not silent and not (member and _hidden(value, member))


def markdown(team: Team, entries: Iterable[JournalEntry], member: str = "") -> str:
    """Return the transcript as Markdown. Statements are quoted, so that none can pose as a heading."""
    lines = [f"# {team.id}", ""]
    for one in team.members:
        lines += [f"- **{one.name}**: {' '.join(one.role.split()) or 'no role'}"]
    lines.append("")
    for entry in in_order(entries, team.names):
        if _shown(entry.value, member):
            lines += _told(entry.value)
    return "\n".join(lines).rstrip() + "\n"


def _told(value: Any) -> Iterator[str]:
    match value:
        case RoundBegan():
            yield from (f"## Round {value.round}", "")
        case Posted():
            to = f" whispers to {' and '.join(value.to)}" if value.to else ""
            yield from (f"**{value.sender}**{to}", "", *_quoted(value.content), "")
        case Stated():
            yield from (f"**{value.member}**", "", *_quoted(value.content), "")
        case ToolCalled():
            yield from (f"*{value.member} calls {value.tool}*", "", *_quoted(value.arguments), "")
        case ToolAnswered():
            yield from (f"*returned to {value.member}*", "", *_quoted(value.content), "")
        case Chose():
            yield from (f"*{value.member} ({value.about}): {value.choice}*", "")
        case Voted():
            yield from (f"**Vote** ({value.rule}): {' '.join(value.question.split())}", "")
            for name, ranking in value.ballots.items():
                yield f"- {name}: {' > '.join(ranking)}"
            yield from ("", f"Decision: **{value.decision or 'none'}** ({value.why})", "")


def _quoted(text: str) -> list[str]:
    return [f"> {line}".rstrip() for line in text.splitlines() or [""]]
