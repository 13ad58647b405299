"""`cairn team`: play scenarios with teams on a running server, and manage those teams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client
    from cairn.teams.scenario import Outcome

_SERVER = ("api_key",)
_Id = Annotated[str, typer.Argument(metavar="ID", help="The team.")]


def register(app: typer.Typer) -> None:
    """Add `cairn team` and its commands."""
    team = typer.Typer(help="Play scenarios with teams of agents, and manage teams.", no_args_is_help=True)
    app.add_typer(team, name="team", rich_help_panel="Running servers")
    _register_scenarios(team)
    _register_looks(team)
    _register_changes(team)


def _register_scenarios(team: typer.Typer) -> None:
    @team.command()
    @configured(_SERVER, model=False)
    def run(
        resolved: Resolved,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A scenario: a YAML file.")],
        save: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Write the transcript to this file, for replay.")
        ] = None,
        remove: Annotated[bool, typer.Option("--rm", help="Delete the team at the end.")] = False,
        host: Host = None,
    ) -> None:
        """Play a scenario and watch it; the exit code is 1 if an expectation is not met."""
        from cairn.cli.team_view import team_view
        from cairn.cli.yaml_files import checking, load_yaml
        from cairn.teams.scenario import play, scenario_of

        with checking(file):
            scenario = scenario_of(load_yaml(file), file)
        with server(resolved, host) as client:
            stage = ServerStage(client)
            try:
                with team_view() as show:
                    outcome = play(scenario, stage, show)
                if save is not None:
                    _write(save, client.get(path(outcome.id, "transcript")))
            except BaseException:
                if remove and stage.made:
                    with contextlib.suppress(CairnError):  # the first error is the one to report
                        stage.delete(stage.made)
                raise
            if remove:
                stage.delete(outcome.id)
        _print_outcome(outcome, kept=not remove)

    @team.command()
    @configured(_SERVER, model=False)
    def replay(
        resolved: Resolved,
        what: Annotated[str, typer.Argument(metavar="ID|FILE", help="A team, or the file of a saved transcript.")],
        pause: Annotated[
            float, typer.Option(min=0, max=60, metavar="SECONDS", help="Wait this long after each statement.")
        ] = 0.0,
        host: Host = None,
    ) -> None:
        """Show a team's transcript again. Nothing is computed."""
        from cairn.cli.team_view import team_view

        if Path(what).is_file():
            transcript = _read(Path(what))
        else:
            with server(resolved, host) as client:
                transcript = client.get(path(what, "transcript"))
        with team_view(pause) as show:
            for entry in transcript["entries"]:
                show(entry)


def _register_looks(team: typer.Typer) -> None:
    @team.command(name="list")
    @configured(_SERVER, model=False)
    def list_(resolved: Resolved, host: Host = None) -> None:
        """List the teams, most recently created first."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            rows = [
                (one["id"], str(len(one["members"])), one["topology"]["kind"], str(one["rounds"]), one["state"])
                for one in client.items("/v1/teams")
            ]
        table(("team", "members", "topology", "rounds", "state"), rows)

    @team.command()
    @configured(_SERVER, model=False)
    def show(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """Show a team's members, its state, and the prompt tokens that its shared beginning saved."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            found = client.get(path(id))
        report = found["report"]
        rows = [("team", found["id"]), ("state", found["state"]), ("topology", found["topology"]["kind"])]
        rows += [("rounds", str(found["rounds"])), ("decision", found["decision"] or "-")]
        rows += [(f"member {one['name']}", one["role"]) for one in found["members"]]
        computed = f"{report['computed_tokens']} of {report['prompt_tokens']} prompt tokens"
        rows += [("computed", computed), ("shared beginning", f"{report['shared_tokens'] or 0} tokens")]
        table(("", ""), rows)


def _register_changes(team: typer.Typer) -> None:
    @team.command()
    @configured(_SERVER, model=False)
    def rounds(
        resolved: Resolved,
        id: _Id,
        many: Annotated[int, typer.Argument(metavar="N", min=1)] = 1,
        host: Host = None,
    ) -> None:
        """Run N rounds of a team; an interrupted round is continued."""
        from cairn.cli.team_view import team_view

        with server(resolved, host) as client, team_view() as show:
            for event in client.events(path(id, "rounds"), {"rounds": many, "stream": True}):
                show(event)

    @team.command()
    @configured(_SERVER, model=False)
    def say(
        resolved: Resolved,
        id: _Id,
        content: Annotated[str, typer.Argument(metavar="TEXT")],
        to: Annotated[list[str] | None, typer.Option(metavar="MEMBER", help="Whisper to this member alone.")] = None,
        host: Host = None,
    ) -> None:
        """Send a message to all members, or whisper to some."""
        with server(resolved, host) as client:
            client.post(path(id, "messages"), {"content": content, "to": to or []})

    @team.command()
    @configured(_SERVER, model=False)
    def result(
        resolved: Resolved,
        id: _Id,
        call: Annotated[str, typer.Argument(metavar="CALL", help="The call's id, as the round printed it.")],
        content: Annotated[str, typer.Argument(metavar="TEXT")],
        host: Host = None,
    ) -> None:
        """Give a member the result of its tool call; the next round continues with it."""
        with server(resolved, host) as client:
            client.post(path(id, "tool_results"), {"results": [{"call_id": call, "content": content}]})

    @team.command()
    @configured(_SERVER, model=False)
    def rollback(
        resolved: Resolved,
        id: _Id,
        round: Annotated[int, typer.Argument(metavar="ROUND", help="The round to go back to; 0 is the beginning.")],
        host: Host = None,
    ) -> None:
        """Go back to the end of a round; later rounds are erased."""
        with server(resolved, host) as client:
            client.post(path(id, "rollback"), {"round": round})

    @team.command()
    @configured(_SERVER, model=False)
    def rm(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """Delete a team with its members' agents. This cannot be undone."""
        with server(resolved, host) as client:
            client.delete(path(id))


class ServerStage:
    """A `Stage` for scenarios on a running server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.made = ""
        """The id of the team that was created and not yet deleted; "" for none."""

    def make(self, team: Mapping[str, Any]) -> str:
        """Create a team and return its id."""
        self.made = str(self._client.post("/v1/teams", team)["id"])
        return self.made

    def post(self, id: str, body: Mapping[str, Any]) -> None:
        """Post a message."""
        self._client.post(path(id, "messages"), body)

    def round(self, id: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run rounds and yield their events."""
        return self._client.events(path(id, "rounds"), body)

    def answer(self, id: str, body: Mapping[str, Any]) -> None:
        """Send results of tool calls."""
        self._client.post(path(id, "tool_results"), body)

    def show(self, id: str) -> dict[str, Any]:
        """Return the team's state."""
        return self._client.get(path(id))

    def delete(self, id: str) -> None:
        """Delete the team."""
        self._client.delete(path(id))
        self.made = ""


def path(id: str, more: str = "") -> str:
    """Return a team's route. ConfigError for an invalid id."""
    from cairn.teams.definition import TEAM_ID

    if not TEAM_ID.fullmatch(id):
        raise ConfigError(f"{id!r} is not a team's id: one has 1 to 31 letters, digits, dots, underscores and hyphens")
    return f"/v1/teams/{quote(id, safe='')}" + (f"/{more}" if more else "")


def _print_outcome(outcome: Outcome, *, kept: bool) -> None:
    """Print the outcome of a scenario. CairnError if an expectation is not met."""
    from cairn.cli.common.output import table

    rows = [("team", outcome.id if kept else "deleted"), ("rounds", str(outcome.rounds))]
    rows += [("decision", outcome.decision or "-")]
    rows += [("points", ", ".join(f"{name} {number:g}" for name, number in outcome.points.items()))] * bool(
        outcome.points
    )
    rows += [("met" if one.met else "NOT MET", f"{one.what} ({one.found})") for one in outcome.met]
    table(("", ""), rows)
    missed = [one.what for one in outcome.met if not one.met]
    if missed:
        raise CairnError(f"{len(missed)} of {len(outcome.met)} expectations are not met: {'; '.join(missed)}")


def _write(target: Path, transcript: Mapping[str, Any]) -> None:
    try:
        target.write_text(json.dumps(transcript, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise CairnError(f"{target} cannot be written: {error.strerror or error}") from error


def _read(source: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(source.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read as a transcript: {error}") from None
    if not isinstance(found, dict) or found.get("object") != "team.transcript":
        raise ConfigError(f"{source} is not the transcript of a team")
    return found
