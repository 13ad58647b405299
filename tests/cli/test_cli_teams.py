"""`cairn team` and `cairn workflow` against a real server on the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.cli.team_view import _live as team_view_of_a_terminal
from cairn.cli.team_view import line_of
from tests.api.process import Served, served
from tests.cli.test_cli_agents import rows, run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as process:
        yield process


SCENARIO = """
name: Two speak
team:
  id: two
  members:
    - {name: ada, role: "Be first.", max_tokens: 6}
    - {name: bob, max_tokens: 6}
messages:
  - {content: psst, to: [bob]}
rounds: 2
expect:
  - {rounds: 2, speakers: [ada, bob]}
"""
FLOW = """
inputs: {task: null}
nodes:
  - {id: plan, role: planner, prompt: "Plan {{ inputs.task }}", sampling: {max_tokens: 6}}
  - {id: code, role: coder, prompt: "Code {{ plan }}", sampling: {max_tokens: 6}}
"""


def test_a_scenario_is_played_kept_and_played_again(server: Served, tmp_path: Path) -> None:
    file, saved = tmp_path / "two.yaml", tmp_path / "two.json"
    file.write_text(SCENARIO)
    code, out, err = run(server, "team", "run", str(file), "--save", str(saved))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "user whispers to bob: psst" and lines[1] == "== round 1" and lines[2].startswith("ada: ")
    assert "met\trounds: 2 (2)" in lines and "met\tspeakers of round 1: ada, bob (ada, bob)" in lines
    results = [line for line in lines if line.startswith(("ada: ", "bob: "))]
    assert len(results) == 4
    for source in ("two", str(saved)):
        code, out, err = run(server, "team", "replay", source)
        again = [line for line in out.splitlines() if line.startswith(("ada: ", "bob: "))]
        assert (code, again) == (0, results), err
    assert rows(server, "team", "list") == [["two", "2", "round_robin", "2", "idle"]]
    shown = dict(rows(server, "team", "show", "two"))
    assert shown["member ada"] == "Be first." and shown["rounds"] == "2"
    assert rows(server, "team", "say", "two", "Well?", "--to", "ada") == []
    assert rows(server, "team", "rounds", "two")[0] == ["== round 3"]
    assert rows(server, "team", "rollback", "two", "1") == []
    assert dict(rows(server, "team", "show", "two"))["rounds"] == "1"
    assert rows(server, "team", "rm", "two") == []
    code, _, err = run(server, "team", "show", "two")
    assert code == 1 and "there is no team two" in err


def test_a_failed_expectation_is_reported(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(SCENARIO.replace("rounds: 2, speakers: [ada, bob]", "rounds: 3"))
    code, out, err = run(server, "team", "run", str(file), "--rm")
    assert code == 1 and "NOT MET\trounds: 3 (2)" in out and "1 of 1 expectations are not met: rounds: 3" in err
    assert rows(server, "team", "list") == []


VOTE = "vote: {question: Done, options: [yes it is, not yet]}\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("options: [yes it is, not yet]", "options: [one]", "vote: options holds 1 options; it must be 2 to 32"),
        ("options: [yes it is, not yet]", "options: [a, a]", "vote: options holds 'a' twice"),
        ("options: [yes it is, not yet]", "options: [yes, no]", "Expected `str`, got `bool` in vote.options[0]"),
        ("options: [yes it is, not yet]", "options: ['a > b', c]", "vote: options: an option has 1 to 200 characters"),
        ("not yet]", "not yet], rule: ranked, voters: [eve]", "vote: the team has no member eve"),
        ("not yet]", "not yet], rule: coordinator", "vote: coordinator must name the member who decides"),
        ("not yet]", "not yet], rule: loudest", "Invalid enum value 'loudest' in vote.rule"),
        ("not yet]", "not yet], opinions: []", "unknown field `opinions` in vote"),
        ("to: [bob]", "to: [eve], before_round: 2", "messages[0]: the team has no member eve"),
        ("rounds: 2\n", "rounds: 1001\n", "rounds: must be 1 to 1000, the limit; it is 1001"),
    ],
)
def test_a_scenario_that_cannot_be_played_leaves_no_team_behind(
    server: Served, tmp_path: Path, before: str, after: str, said: str
) -> None:
    file = tmp_path / "bad.yaml"
    text = SCENARIO + VOTE
    assert before in text
    file.write_text(text.replace(before, after, 1))
    code, _, err = run(server, "team", "run", str(file))
    assert code == 2 and said in err and str(file) in err, err
    assert rows(server, "team", "list") == []
    assert rows(server, "agents", "list") == []


def test_a_team_that_never_spoke_is_erased_and_one_that_did_stays(server: Served, tmp_path: Path) -> None:
    """A scenario that this command accepts may still be refused by the server."""
    file = tmp_path / "late.yaml"
    file.write_text(SCENARIO.replace("content: psst", f"content: {'x' * 30_000}"))  # longer than the context
    code, _, err = run(server, "team", "run", str(file))
    assert code == 1 and "context" in err and rows(server, "team", "list") == [], err
    file.write_text(file.read_text().replace("to: [bob]", "to: [bob], before_round: 2"))
    assert run(server, "team", "run", str(file))[0] == 1
    assert [row[0] for row in rows(server, "team", "list")] == ["two"]  # it has a round to look at
    code, _, err = run(server, "team", "run", str(file))
    assert code == 1 and "already" in err  # its id is taken, and the existing team must not be erased
    assert [row[0] for row in rows(server, "team", "list")] == ["two"]
    assert rows(server, "team", "rm", "two") == []
    assert run(server, "team", "run", str(file), "--rm")[0] == 1
    assert rows(server, "team", "list") == []


def test_a_workflow_is_drawn_and_run(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text(FLOW)
    code, out, _ = run(server, "workflow", "show", str(file))
    assert code == 0 and out.startswith("flowchart LR\n") and "n_plan --> n_code" in out
    code, out, err = run(server, "workflow", "run", str(file), "--input", "task=x", "--seed", "4")
    assert code == 0, err
    assert set(json.loads(out)) == {"code"} and "plan begins (planner)" in err and "code is done" in err
    assert json.loads(run(server, "workflow", "run", str(file), "-i", "task=x", "--seed", "4")[1]) == json.loads(out)
    first, second = rows(server, "workflow", "list")
    assert first[2] == second[2] == "finished"
    code, out, _ = run(server, "workflow", "show", first[0], "--format", "svg")
    assert code == 0 and out.startswith("<svg")
    assert rows(server, "workflow", "rm", first[0]) == []
    code, _, err = run(server, "workflow", "run", str(file))
    assert code == 1 and "inputs.task is missing" in err
    file.write_text(FLOW.replace("Plan {{ inputs.task }}", "{{ code }}"))
    code, _, err = run(server, "workflow", "run", str(file))
    assert code == 1 and "workflow has a cycle: code -> plan -> code" in err
    code, _, err = run(server, "workflow", "resume", second[0])
    assert code == 1 and "is finished" in err


def test_the_examples_are_drawn(tmp_path: Path) -> None:
    assert "n_test" in run_alone("workflow", "show", str(EXAMPLES / "workflow.yaml"))
    for name, begins in (("g.png", b"\x89PNG"), ("g.svg", b"<svg"), ("g.mmd", b"flowchart")):
        assert run_alone("workflow", "show", str(EXAMPLES / "workflow.yaml"), "-o", str(tmp_path / name)) == ""
        assert (tmp_path / name).read_bytes().startswith(begins)


def run_alone(*arguments: str) -> str:
    """Run a command without a server."""
    code, out, err = run(type("Nowhere", (), {"url": "http://127.0.0.1:9"})(), *arguments)
    assert code == 0, err
    return out


def test_a_models_text_cannot_steer_the_terminal() -> None:
    line = line_of({"type": "turn", "member": "ada", "content": "\x1b[2Jgone\nnext"})
    assert line == "ada: \N{REPLACEMENT CHARACTER}[2Jgone next"


def test_the_live_view_shows_speakers_and_statements(capsys: pytest.CaptureFixture[str]) -> None:
    with team_view_of_a_terminal(0.0) as show:
        show({"type": "round.started", "round": 1})
        show({"type": "turn.started", "member": "ada"})
        show({"type": "turn.delta", "member": "ada", "content": "Hel"})
        show({"type": "turn.done", "member": "ada", "content": "Hello \x1b[2J [bold]"})
        show({"type": "points", "points": {"ada": 3.0}})
    out = capsys.readouterr().out
    assert "== round 1" in out and "points: ada 3" in out
    assert "Hello \N{REPLACEMENT CHARACTER}[2J [bold]" in out
