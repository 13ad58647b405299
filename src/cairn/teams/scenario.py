"""Scenarios: YAML files with a team, messages, a number of rounds, and expectations.

A scenario is played against a `Stage` round by round, with messages posted in between. Payoffs make it a game: the
statements of a round are looked up in a table, and the points are posted to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cairn.config.option import closest
from cairn.teams.definition import MAX_ROUNDS, USER, Rule, Team, check_text
from cairn.teams.entries import Poll, check_poll
from cairn.types.errors import CairnError, ConfigError, InvalidRequest, parted

MAX_FILE = 1 << 22
"""Bytes of a document file that a scenario names."""


class _ScenarioForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ScenarioMessage(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message or whisper posted before a round."""

    content: str
    to: tuple[str, ...] = ()
    sender: str = msgspec.field(default="user", name="from")
    before_round: int = 1


class ScenarioVote(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A vote; fields that are not set come from the team."""

    question: str
    options: tuple[str, ...]
    rule: Rule | None = None
    coordinator: str = ""
    voters: tuple[str, ...] = ()

    def poll(self, team: Team) -> Poll:
        """Return the vote with the team's rule and coordinator filled in."""
        rule = self.rule or team.rule
        coordinator = self.coordinator or (team.coordinator if rule == "coordinator" else "")
        return Poll(
            question=self.question, options=self.options, rule=rule, coordinator=coordinator, voters=self.voters
        )


class Payoff(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points for one combination of statements in a round."""

    answers: dict[str, str]
    points: dict[str, float]


class Expectation(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expectations of a played scenario; each field that is set is one."""

    rounds: int | None = None
    """Number of rounds played."""
    speakers: tuple[str, ...] | None = None
    """Speakers of `round`, in order."""
    round: int = 1
    decision_in: tuple[str, ...] | None = None
    """Allowed last decisions."""
    choices_in: tuple[str, ...] | None = None
    """Allowed statements."""
    shared_tokens: int | None = None
    """Least common prefix of all members that spoke, in tokens."""
    computed_share: float | None = None
    """Largest part of all prompt tokens that was computed, 0 to 1."""


class Scenario(_ScenarioForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario file."""

    name: str
    about: str = ""
    team: dict[str, Any]
    """Body of POST /v1/teams; a document may name a `file` next to the scenario instead of a `text`."""
    messages: tuple[ScenarioMessage, ...] = ()
    rounds: int = 1
    vote: ScenarioVote | None = None
    """A vote at the end of each round."""
    stop_at: str = ""
    """Decision that ends the scenario early."""
    payoffs: tuple[Payoff, ...] = ()
    results: dict[str, str] = {}
    """Results of members' tools by tool name; others return "nothing"."""
    expect: tuple[Expectation, ...] = ()


class Stage(Protocol):
    """A server that a scenario is played on."""

    def make(self, team: Mapping[str, Any]) -> str:
        """Create a team; return its id."""
        ...

    def post(self, id: str, body: Mapping[str, Any]) -> None:
        """Post a message."""
        ...

    def round(self, id: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a round; yield its events."""
        ...

    def answer(self, id: str, body: Mapping[str, Any]) -> None:
        """Post tool results."""
        ...

    def show(self, id: str) -> dict[str, Any]:
        """Return the team's state."""
        ...

    def delete(self, id: str) -> None:
        """Erase the team."""
        ...


class ExpectationResult(msgspec.Struct, frozen=True):
    """An expectation and whether it was met."""

    what: str
    met: bool
    found: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scenario."""

    id: str
    """Id of its team."""
    rounds: int
    decision: str | None
    points: dict[str, float]
    met: list[ExpectationResult]


def scenario_of(given: Any, file: Path) -> Scenario:
    """Read a scenario from parsed YAML, with its documents' files. Raise ConfigError if it is not valid."""
    try:
        scenario = msgspec.convert(given, type=Scenario)
    except msgspec.ValidationError as error:
        said, where, field = parted(error)
        near = closest(field or "", Scenario.__struct_fields__) if "unknown field" in said else ""
        near = f" in {where}" if where else near
        raise ConfigError(f"{file}: this is not a scenario: {said[:300]}{near}", field=field) from None
    _check(scenario, file)
    documents = scenario.team.get("documents")
    if not isinstance(documents, list):
        return scenario
    read = [_with_text(file, one) if isinstance(one, dict) else one for one in documents]
    return msgspec.structs.replace(scenario, team={**scenario.team, "documents": read})


def _check(scenario: Scenario, file: Path) -> None:
    """Raise ConfigError for mistakes that a server would find only after creating the team."""
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
    """Return the team's names and rules; None if they are malformed, which the server reports."""
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

    If it fails before anybody has spoken, its team is erased again.
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
            with contextlib.suppress(CairnError):  # report the first error, not this one
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
    """Yield the events of a round once each, however often it stops for tool results and is replayed."""
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
    """Add the points of a round and post them to all."""
    won = next((one.points for one in scenario.payoffs if one.answers == statements), {})
    for name, number in won.items():
        points[name] = points.get(name, 0) + number
    told = "; ".join(f"{name} said {answer} and gets {won.get(name, 0):g}" for name, answer in statements.items())
    totals = ", ".join(f"{name} {number:g}" for name, number in points.items()) or "none yet"
    stage.post(id, {"content": f"Points of this round: {told}. Points so far: {totals}."})
    show({"type": "points", "won": dict(won), "points": dict(points)})


def _met(
    expected: Expectation, team: Mapping[str, Any], said: Sequence[Sequence[tuple[str, str]]]
) -> Iterator[ExpectationResult]:
    """Yield for each field of an expectation whether it was met."""
    if expected.rounds is not None:
        yield ExpectationResult(f"rounds: {expected.rounds}", len(said) == expected.rounds, str(len(said)))
    if expected.speakers is not None:
        at = expected.round
        spoke = [member for member, _ in said[at - 1]] if 1 <= at <= len(said) else []
        what = f"speakers of round {at}: {', '.join(expected.speakers)}"
        yield ExpectationResult(what, spoke == list(expected.speakers), ", ".join(spoke) or "nobody")
    if expected.decision_in is not None:
        decision = team["decision"]
        yield ExpectationResult(
            f"decision in {', '.join(expected.decision_in)}", decision in expected.decision_in, str(decision)
        )
    if expected.choices_in is not None:
        others = sorted({content for one in said for _, content in one if content not in expected.choices_in})
        yield ExpectationResult(
            f"choices in {', '.join(expected.choices_in)}", not others, ", ".join(others)[:200] or "all of them"
        )
    report = team["report"]
    if expected.shared_tokens is not None:
        shared = report["shared_tokens"] or 0
        yield ExpectationResult(
            f"shared tokens: {expected.shared_tokens} or more", shared >= expected.shared_tokens, str(shared)
        )
    if expected.computed_share is not None:
        share = report["computed_tokens"] / max(1, report["prompt_tokens"])
        what = f"computed share: {expected.computed_share:g} or less"
        yield ExpectationResult(what, share <= expected.computed_share, f"{share:.3f}")
