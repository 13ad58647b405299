"""A scenario: a team, what it is told, how many rounds it has, and what is expected of it; a YAML file.

It is played against a `Stage`, one round after the other, so it can put in messages between them. Payoffs make a game
of statements that are one of a few: what all said in a round is looked up in a table, and the points are told to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cairn.teams.definition import MAX_ROUNDS, USER, Rule, Team, check_text
from cairn.teams.entries import Poll, check_poll
from cairn.types.errors import CairnError, ConfigError, InvalidRequest

MAX_FILE = 1 << 22
"""Bytes of a text that a scenario names."""


class _ScenarioForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ScenarioMessage(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message, or a whisper, before a round."""

    content: str
    to: tuple[str, ...] = ()
    sender: str = msgspec.field(default="user", name="from")
    before_round: int = 1


class ScenarioVote(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What members vote on; what it does not say the team says."""

    question: str
    options: tuple[str, ...]
    rule: Rule | None = None
    coordinator: str = ""
    voters: tuple[str, ...] = ()

    def poll(self, team: Team) -> Poll:
        """Return the vote as a server holds it."""
        rule = self.rule or team.rule
        coordinator = self.coordinator or (team.coordinator if rule == "coordinator" else "")
        return Poll(
            question=self.question, options=self.options, rule=rule, coordinator=coordinator, voters=self.voters
        )


class Payoff(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What members get who say this in one round."""

    answers: dict[str, str]
    points: dict[str, float]


class Expectation(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is expected; each field that is given is one expectation."""

    rounds: int | None = None
    """So many rounds were done."""
    speakers: tuple[str, ...] | None = None
    """Who spoke in `round`, in this order."""
    round: int = 1
    decision_in: tuple[str, ...] | None = None
    """The last decision is one of these."""
    choices_in: tuple[str, ...] | None = None
    """Every statement is one of these."""
    shared_tokens: int | None = None
    """The contexts of all members who spoke begin with at least so many same tokens."""
    computed_share: float | None = None
    """At most this part of all prompt tokens was computed."""


class Scenario(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario."""

    name: str
    about: str = ""
    team: dict[str, Any]
    """What POST /v1/teams takes; a document may name a `file` beside the scenario in the place of its `text`."""
    messages: tuple[ScenarioMessage, ...] = ()
    rounds: int = 1
    vote: ScenarioVote | None = None
    """A vote at the end of each round."""
    stop_at: str = ""
    """The stop rule: no more rounds once one has decided this."""
    payoffs: tuple[Payoff, ...] = ()
    results: dict[str, str] = {}
    """What members' tools return, by their names; one that is not named returns nothing."""
    expect: tuple[Expectation, ...] = ()


class Stage(Protocol):
    """Where a scenario is played: a server."""

    def make(self, team: Mapping[str, Any]) -> str:
        """A new team; its id."""
        ...

    def post(self, id: str, body: Mapping[str, Any]) -> None:
        """A message."""
        ...

    def round(self, id: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A round, event by event."""
        ...

    def answer(self, id: str, body: Mapping[str, Any]) -> None:
        """What tools returned."""
        ...

    def show(self, id: str) -> dict[str, Any]:
        """The team as it is now."""
        ...

    def delete(self, id: str) -> None:
        """Erase the team."""
        ...


class Met(msgspec.Struct, frozen=True):
    """An expectation, and what became of it."""

    what: str
    met: bool
    found: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a scenario."""

    id: str
    """The team's."""
    rounds: int
    decision: str | None
    points: dict[str, float]
    met: list[Met]


def scenario_of(given: Any, file: Path) -> Scenario:
    """The scenario that a file holds, with the texts of its documents. ConfigError for what is none."""
    try:
        scenario = msgspec.convert(given, type=Scenario)
    except msgspec.ValidationError as error:
        _, _, where = str(error).rpartition(" - at ")
        raise ConfigError(f"{file}: is no scenario: {error}", field=where.strip("`")[:200] or None) from None
    _check(scenario, file)
    documents = scenario.team.get("documents")
    if not isinstance(documents, list):
        return scenario
    read = [_with_text(file, one) if isinstance(one, dict) else one for one in documents]
    return msgspec.structs.replace(scenario, team={**scenario.team, "documents": read})


def _check(scenario: Scenario, file: Path) -> None:
    """Raise ConfigError for what a server would refuse only once the team is there."""
    team = _team(scenario.team)
    what = "rounds"
    try:
        if not 1 <= scenario.rounds <= MAX_ROUNDS:
            raise InvalidRequest(f"must be 1 to {MAX_ROUNDS}, the limit; it is {scenario.rounds}")
        if team is None:
            return
        if scenario.vote is not None:
            what = "vote"
            check_poll(team, scenario.vote.poll(team))
        for at, message in enumerate(scenario.messages):
            what = f"messages[{at}]"
            check_text(message.content, "content")
            for name in (*message.to, *((message.sender,) if message.sender != USER else ())):
                team.member(name)
        for at, payoff in enumerate(scenario.payoffs):
            what = f"payoffs[{at}]"
            for name in (*payoff.answers, *payoff.points):
                team.member(name)
    except InvalidRequest as error:
        raise ConfigError(f"{file}: {what}: {error}", field=what) from None


def _team(given: Mapping[str, Any]) -> Team | None:
    """Return as much of a team as the rest of its scenario is about; None where the server is to say what is wrong."""
    try:
        names = [member["name"] for member in given["members"]]
        team = {"members": [{"name": name, "role": ""} for name in names], "id": "scenario"}
        team |= {name: given[name] for name in ("rule", "coordinator") if given.get(name) is not None}
        return msgspec.convert(team, type=Team)
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def _with_text(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    name = document.get("file")
    if not isinstance(name, str):
        return dict(document)
    file = path.parent / name
    try:
        text = file.read_bytes()[: MAX_FILE + 1].decode()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}, a document of {path}, cannot be read: {error}") from None
    if len(text) > MAX_FILE:
        raise ConfigError(f"{file} has more than {MAX_FILE} characters, the limit")
    return {"name": document.get("name", name), "text": text}


def play(scenario: Scenario, stage: Stage, show: Callable[[dict[str, Any]], object]) -> Outcome:
    """Play a scenario to its end. `show` gets every event, and `points` after each round of a game.

    Where it fails before anybody has spoken, the team that was made for it is erased again.
    """
    id, spoken = stage.make(scenario.team), False

    def tell(event: dict[str, Any]) -> None:
        nonlocal spoken
        spoken = spoken or event["type"] == "turn.done"
        show(event)

    try:
        return _play(scenario, stage, id, tell)
    except BaseException:
        if not spoken:
            with contextlib.suppress(CairnError):  # what went wrong is told, not that this did too
                stage.delete(id)
        raise


def _play(scenario: Scenario, stage: Stage, id: str, show: Callable[[dict[str, Any]], object]) -> Outcome:
    points: dict[str, float] = {}
    said: list[list[tuple[str, str]]] = []
    decision = None
    for number in range(1, scenario.rounds + 1):
        for one in scenario.messages:
            if one.before_round == number:
                stage.post(id, {"content": one.content, "to": list(one.to), "sender": one.sender})
                show({"type": "message", "sender": one.sender, "content": one.content, "to": list(one.to)})
        vote = {} if scenario.vote is None else {"vote": msgspec.to_builtins(scenario.vote)}
        statements = []
        for event in _whole_round(scenario, stage, id, {"rounds": 1, "stream": True, **vote}):
            show(event)
            if event["type"] == "turn.done":
                statements.append((event["step"], event["member"], event["content"]))
            elif event["type"] == "round.done":
                decision = decision if event["decision"] is None else event["decision"]
        order = list(dict.fromkeys(member["name"] for member in scenario.team.get("members", ())))
        statements.sort(key=lambda one: (one[0], order.index(one[1]) if one[1] in order else 0))
        said.append([(member, content) for _, member, content in statements])
        if scenario.payoffs:
            _score(scenario, stage, show, id, points, dict(said[-1]))
        if scenario.stop_at and decision == scenario.stop_at:
            break
    team = stage.show(id)
    met = [one for expected in scenario.expect for one in _met(expected, team, said)]
    return Outcome(id=id, rounds=len(said), decision=team["decision"], points=points, met=met)


def _whole_round(scenario: Scenario, stage: Stage, id: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a round, each once, however often it waits for what tools return."""
    told: set[tuple[Any, ...]] = set()
    waits = True
    while waits:
        waits = False
        for event in stage.round(id, body):
            if event["type"] == "round.waiting":
                waits = True
                results = [
                    {"call_id": one["call_id"], "content": scenario.results.get(one["tool"], "nothing")}
                    for one in event["calls"]
                ]
                stage.answer(id, {"results": results})
            key = event["type"], event.get("step"), event.get("member"), event.get("call_id")
            if event["type"] in ("turn.delta", "round.waiting") or key not in told:
                told.add(key)
                yield event


def _score(
    scenario: Scenario,
    stage: Stage,
    show: Callable[[dict[str, Any]], object],
    id: str,
    points: dict[str, float],
    statements: Mapping[str, str],
) -> None:
    """The points of a round, told to all before the next."""
    won = next((one.points for one in scenario.payoffs if one.answers == statements), {})
    for name, number in won.items():
        points[name] = points.get(name, 0) + number
    told = "; ".join(f"{name} said {answer} and gets {won.get(name, 0):g}" for name, answer in statements.items())
    totals = ", ".join(f"{name} {number:g}" for name, number in points.items()) or "none yet"
    stage.post(id, {"content": f"Points of this round: {told}. Points so far: {totals}."})
    show({"type": "points", "won": dict(won), "points": dict(points)})


def _met(expected: Expectation, team: Mapping[str, Any], said: Sequence[Sequence[tuple[str, str]]]) -> Iterator[Met]:
    """What of an expectation is met."""
    if expected.rounds is not None:
        yield Met(f"rounds: {expected.rounds}", len(said) == expected.rounds, str(len(said)))
    if expected.speakers is not None:
        at = expected.round
        spoke = [member for member, _ in said[at - 1]] if 1 <= at <= len(said) else []
        what = f"speakers of round {at}: {', '.join(expected.speakers)}"
        yield Met(what, spoke == list(expected.speakers), ", ".join(spoke) or "nobody")
    if expected.decision_in is not None:
        decision = team["decision"]
        yield Met(f"decision in {', '.join(expected.decision_in)}", decision in expected.decision_in, str(decision))
    if expected.choices_in is not None:
        others = sorted({content for one in said for _, content in one if content not in expected.choices_in})
        yield Met(f"choices in {', '.join(expected.choices_in)}", not others, ", ".join(others)[:200] or "all of them")
    report = team["report"]
    if expected.shared_tokens is not None:
        shared = report["shared_tokens"] or 0
        yield Met(f"shared tokens: {expected.shared_tokens} or more", shared >= expected.shared_tokens, str(shared))
    if expected.computed_share is not None:
        share = report["computed_tokens"] / max(1, report["prompt_tokens"])
        what = f"computed share: {expected.computed_share:g} or less"
        yield Met(what, share <= expected.computed_share, f"{share:.3f}")
