"""The tables that tools are composed from: acts/roles.txt and acts/acts*.txt.

A role is a kind of argument with its schema names, descriptions and the little words that announce it ("from {}",
"called {}", "for {} people"). An act is what a tool does, with its roles and some request templates: ``(a/b)`` is a
choice, ``{slot}`` the bare value, ``{^slot}`` the value behind an article that is not part of it, ``<slot>`` the value
with one of its role's little words, ``@`` the tool's verb and ``~`` its noun (where the tools of an act do different
things). A head that begins with ``*`` is of a tool that is met again and again: such acts are drawn more often.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .values import held_out

FOLDER = Path(__file__).with_name("acts")


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of argument; ``ways`` announce it, and for a boolean each way says yes (or no, behind the mark)."""

    slot: str
    types: str
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    ways: tuple[str, ...] = ()
    denials: tuple[str, ...] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """What a tool does: words for its name, its roles (with whether they must be there), requests, results."""

    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    roles: tuple[tuple[Role, bool], ...]
    requests: tuple[str, ...]
    returns: tuple[tuple[str, str], ...] = (("status", "ok"),)
    popular: bool = False

    @property
    def words(self) -> set[str]:
        """Verbs, nouns and slots, to tell how near two acts are."""
        return {*self.verbs, *self.nouns, *(role.slot for role, _ in self.roles)}


@cache
def roles() -> dict[str, Role]:
    """The table of roles."""
    found = {}
    for line in (FOLDER / "roles.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        slot, types, kinds, names, descriptions, ways = line.split(" | ")
        listed = tuple(kinds.split(";")) if types == "e" else tuple(kinds.split(","))
        yes, _, no = ways.partition("!")
        denials = tuple(no.split(";")) if no else ()
        found[slot.lstrip("!")] = Role(
            slot.lstrip("!"), types, listed, tuple(names.split()), tuple(descriptions.split("/")),
            tuple(yes.split(";")), denials, slot.startswith("!"),
        )  # fmt: skip
    return found


@cache
def acts(evaluation: bool) -> tuple[Act, ...]:
    """The acts of one side: training, or held out (one in 16, by a checksum of its description)."""
    blocks = [b for path in sorted(FOLDER.glob("acts*.txt")) for b in f"\n{path.read_text('utf-8')}".split("\n# ")[1:]]
    return tuple(act for act in map(_parsed, blocks) if held_out(act.descriptions[-1], 16) == evaluation)


@cache
def popular_acts(evaluation: bool) -> tuple[Act, ...]:
    """Those of one side's acts that are met again and again."""
    return tuple(act for act in acts(evaluation) if act.popular)


def _parsed(block: str) -> Act:
    head, *lines = block.strip().splitlines()
    verbs, nouns, descriptions, params = head.removeprefix("* ").split(" | ", 3)
    requests = tuple(line[2:] for line in lines if line.startswith("> "))
    returns = tuple(tuple(pair.split(":")) for line in lines if line.startswith("< ") for pair in line[2:].split())
    parsed = tuple(_role(text.strip()) for text in params.split(" ; "))
    return Act(
        tuple(verbs.split()), tuple(nouns.split()), tuple(descriptions.split("/")), parsed, requests,
        returns,  # type: ignore[arg-type]
        head.startswith("* "),
    )  # fmt: skip


def _role(text: str) -> tuple[Role, bool]:
    slot, *rest = text.split(" ", 4)
    bare = slot.rstrip("?")
    if not rest:
        return roles()[bare], bare == slot
    types, kinds, names, descriptions = rest
    listed = tuple(kinds.split(";")) if types == "e" else tuple(kinds.split(","))
    return Role(bare, types, listed, tuple(names.split(",")), tuple(descriptions.split("/"))), bare == slot
