"""The worked examples, each played to its end with scripted answers, event by event, and on the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.connection.client import Client
from cairn.cli.team import ServerStage
from cairn.cli.team_view import line_of
from cairn.cli.yaml_files import load_yaml
from cairn.teams.scenario import Outcome, play, scenario_of
from cairn.teams.teams import Teams
from cairn.types.errors import ConfigError
from tests.agents.house import talking_model
from tests.api.homes import home
from tests.teams.scripted_voice import Script, ScriptedVoice
from tests.teams.test_topologies import shape
from tests.workflows.scripted_answerer import run

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIOS = sorted(path.stem for path in (EXAMPLES / "teams").glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


async def played(folder: Path, name: str, script: Script | None) -> tuple[Outcome, list[dict[str, Any]], ScriptedVoice]:
    """Return the outcome of a scenario over a socket, as `cairn team run` plays it; `script` says what members say."""
    path = EXAMPLES / "teams" / f"{name}.yaml"
    scenario, events, voice = scenario_of(load_yaml(path), path), [], ScriptedVoice(script)
    async with home(folder) as (at, http):
        url = str(http.base_url)
        if script is not None:
            await http.get("/v1/teams")  # the routes have their teams now
            routes = at.web.app.router.find("/v1/teams")["GET"].endpoint.__self__
            routes._opened = (at.agents, Teams(at.agents, voice))

        def work() -> Outcome:
            with Client(url) as client:
                return play(scenario, ServerStage(client), events.append)

        return await asyncio.to_thread(work), events, voice


def says(choice: str) -> Script:
    return lambda member, told, choices: choice if choices else f"word of {member}"


async def test_the_code_review(folder: Path) -> None:
    answers = iter(["change", "merge", "change", "merge", "merge", "change"])

    def script(member: str, told: str, choices: Sequence[str]) -> str:
        return next(answers) if choices else f"{member} speaks"

    outcome, events, voice = await played(folder, "code_review", script)
    spoken = [f"{name}: {name} speaks" for name in ("planner", "coder", "reviewer")]

    def vote(*ballots: str) -> list[str]:
        return [f"{name} votes {one}" for name, one in zip(("planner", "coder", "reviewer"), ballots, strict=True)]

    first = [
        "round.started",
        *spoken,
        "vote.started",
        *vote("change", "merge", "change"),
        "decided change",
        "round.done",
    ]
    second = [
        "round.started",
        *spoken,
        "vote.started",
        *vote("merge", "merge", "change"),
        "decided merge",
        "round.done",
    ]
    assert shape(events) == ["message", *first, "message", *second]
    assert outcome.rounds == 2 and outcome.decision == "merge" and outcome.met[0].met
    whispered = [member for member, told, _ in voice.asked if "Python 3.11 alone" in told]
    assert set(whispered) == {"coder"}


async def test_the_debate(folder: Path) -> None:
    outcome, events, _ = await played(folder, "debate", says("ferry"))
    spoken = [f"{name}: word of {name}" for name in ("bridge", "ferry", "judge")]
    assert shape(events) == ["round.started", *spoken, "judge verdict ferry", "round.done"] * 2
    assert outcome.decision == "ferry" and [one.met for one in outcome.met] == [True, True]


async def test_the_prisoners_dilemma(folder: Path) -> None:
    said = {"alice": iter(["cooperate", "cooperate", *["defect"] * 3]), "bob": iter(["cooperate", *["defect"] * 4])}

    def script(member: str, told: str, choices: Sequence[str]) -> str:
        assert list(choices) == ["cooperate", "defect"]
        return next(said[member])

    outcome, events, voice = await played(folder, "prisoners", script)
    assert outcome.points == {"alice": 3 + 0 + 3, "bob": 3 + 5 + 3}
    assert [line_of(event) for event in events if event["type"] == "points"] == [
        "points: alice 3, bob 3",
        "points: alice 3, bob 8",
        "points: alice 4, bob 9",
        "points: alice 5, bob 10",
        "points: alice 6, bob 11",
    ]
    result = next(told for member, told, _ in voice.asked[2:] if member == "alice")
    assert "user: Points of this round: alice said cooperate and gets 3; bob said cooperate and gets 3." in result
    assert [one.met for one in outcome.met] == [True, True, False]  # no tokens, so none are shared


@pytest.mark.parametrize("name", SCENARIOS)
async def test_every_scenario_is_played_on_the_fake_engine(folder: Path, name: str) -> None:
    path = EXAMPLES / "teams" / f"{name}.yaml"
    assert scenario_of(load_yaml(path), path).expect
    outcome, events, _ = await played(folder, name, None)
    assert all(one.met for one in outcome.met), outcome.met
    assert events[-1]["type"] in ("round.done", "points")


def test_the_scenario_in_the_docs_is_valid(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "teams.md").read_text()
    file = tmp_path / "docs.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    scenario = scenario_of(load_yaml(file), file)
    assert scenario.vote is not None and scenario.stop_at in scenario.vote.options and len(scenario.expect) == 2


def answers(prompt: str) -> Any:
    match prompt.split()[0]:
        case "Break":
            return {"steps": ["lower", "join"]}
        case "Write":
            return {"code": f"def {prompt.rsplit(' ', 1)[1]}(): pass"}
        case "Fix":
            return {"code": "fixed"}
    if "input with which" in prompt:
        return {"passed": "fixed" in prompt, "why": "no reason"}
    return {"passed": "style" not in prompt, "why": "it is so"}


async def test_the_workflow() -> None:
    bench = await run(load_yaml(EXAMPLES / "workflow.yaml"), answers, task="slugs")
    ends = sorted(event["key"] for event in bench.events if event["type"] in ("node.done", "node.skipped"))
    assert ends == [
        "code",
        "code.0",
        "code.1",
        "lint",
        "plan",
        "repair",
        "repair#1/fix",
        "repair#1/test",
        "repair#2/fix",
        "repair#2/test",
        "review",
    ]
    ended = bench.state.ended
    assert ended is not None and ended.result == {"passed": True, "why": "it is so"}
    assert [(conflict["field"], conflict["won"], conflict["lost"]) for conflict in ended.conflicts] == [
        ("passed", "review", "lint")
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "cannot be read as YAML"),
        ("a: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("name: x\nteam: {}\nrouds: 1", "unknown field `rouds`; did you mean rounds?"),
        ("name: x\nteam: {documents: [{file: nowhere.md}]}", "cannot be read"),
    ],
)
def test_an_invalid_scenario_names_its_fault(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said.replace("`", "`")):
        scenario_of(load_yaml(file), file)
