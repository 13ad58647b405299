"""What was said in a team, as values and as Markdown; all of it, or what one member was told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cairn.agents.journals import JournalEntry
from cairn.teams.definition import Team
from cairn.teams.entries import Chose, Posted, RoundBegan, RoundDone, Stated, ToolAnswered, ToolCalled, Voted
from cairn.teams.prompts import in_order

SHOWN = (Posted, RoundBegan, ToolCalled, ToolAnswered, Stated, Chose, Voted, RoundDone)


def listed(team: Team, entries: Iterable[JournalEntry], member: str = "") -> list[dict[str, Any]]:
    """The entries that tell of what was said; of a `member` no whispers to others."""
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
    """Whether an entry is told; of a `member` what it was told itself."""
    silent = isinstance(value, ToolCalled) and not value.tool
    return isinstance(value, SHOWN) and not silent and not (member and _hidden(value, member))


def markdown(team: Team, entries: Iterable[JournalEntry], member: str = "") -> str:
    """The transcript as Markdown. What was said is quoted, so none of it looks like a heading of ours."""
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
