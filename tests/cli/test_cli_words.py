"""Commands known from other programs, and which server or model `cairn chat` talks to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import typer

from cairn import __version__
from cairn.cli import answer_source, app
from cairn.models.hub import hub, removal
from cairn.models.hub.removal import plan, remove
from cairn.types.errors import ModelError
from tests.cli.test_cli import (  # noqa: F401  (elsewhere: used by its name)
    NOT_FOUND,
    Canned,
    elsewhere,
    listening,
    run,
    sentence,
    sse,
)

ANSWER = sse(
    {"choices": [{"index": 0, "delta": {"content": "Hello you"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    "[DONE]",
)
READY = '{"status": "ready", "reasons": [], "troubles": []}'


class Running(Canned):
    """A server on this machine that gives the answers of a path in order, and then the last one again and again."""

    answers: ClassVar[dict[str, list[tuple[int, str]]]]
    asked: ClassVar[list[tuple[str, dict[str, object]]]]
    port: ClassVar[str]

    def answer(self, body: object) -> None:
        self.asked.append((self.path, body or {}))
        answers = self.answers.get(self.path, [NOT_FOUND])
        self.reply(*(answers.pop(0) if len(answers) > 1 else answers[0]))


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Running]]:
    """Yield a server at the configured port."""

    class Handler(Running):
        answers: ClassVar = {
            "/health/ready": [(200, READY)],
            "/v1/models": [(200, '{"data": [{"id": "m", "max_model_len": 64}]}')],
            "/v1/chat/completions": [(200, ANSWER)],
            "/metrics": [(200, "cairn:num_requests_running 2\ncairn:num_requests_waiting 1\n")],
        }
        asked: ClassVar = []

    with listening(Handler):
        Handler.port = Handler.url.rpartition(":")[2]
        monkeypatch.setenv("CAIRN_PORT", Handler.port)
        yield Handler


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of models loaded in this process, instead of loading them."""
    results: list[str] = []

    class Local:
        def __init__(self, resolved) -> None:
            results.append(resolved.config.model)
            self.llm = self

        def close(self) -> None:
            pass

    monkeypatch.setattr("cairn.cli.common.sampling._Local", Local)
    return results


# ---------------------------------------------------------------------------------------------------- who answers


def test_chat_talks_to_the_server_that_runs_and_says_so(running, loaded):
    done = run("chat", typed="hi\n")
    assert (done.returncode, done.stdout, loaded) == (0, "Hello you\n", []), done.stderr
    url = f"http://127.0.0.1:{running.port}"
    assert f"The server at {url} answers, with m; --local loads a model here instead." in done.stderr
    assert running.asked[-1][1]["model"] == "m"


def test_chat_loads_a_model_where_no_server_runs(loaded, monkeypatch):
    monkeypatch.setattr(answer_source, "state_of", lambda *_: "")
    assert run("chat").returncode == 0
    assert loaded == ["demo"]


@pytest.mark.parametrize("more", [["--local"], ["--kv-gb", "1"], ["--threads", "1"]])
def test_chat_loads_a_model_with_local_options(running, loaded, more):
    done = run("chat", *more)
    assert (done.returncode, loaded, running.asked) == (0, ["demo"], [])
    assert "demo is ready" in done.stderr


def test_a_model_that_is_named_is_asked_of_a_server_that_has_it(running, loaded, elsewhere):  # noqa: F811
    assert run("chat", "m", typed="hi\n").stdout == "Hello you\n"
    (elsewhere / "m.gguf").write_bytes(b"GGUF")
    assert run("chat", str(elsewhere / "m.gguf"), typed="hi\n").stdout == "Hello you\n"  # the server's name for it
    assert (running.asked[-1][1]["model"], loaded) == ("m", [])
    done = run("chat", "demo")
    assert loaded == ["demo"]
    assert "has m, not demo; loading it here" in done.stderr
    assert run("chat", env={"CAIRN_MODEL": "demo"}).returncode == 0
    assert loaded == ["demo", "demo"]


def test_a_server_that_loads_its_model_is_waited_for(running, loaded):
    loading = '{"status": "not ready", "reasons": ["the model is still being loaded"], "troubles": []}'
    running.answers["/health/ready"] = [(503, loading), (503, loading), (200, READY)]
    assert run("chat", typed="hi\n").stdout == "Hello you\n"
    assert [path for path, _ in running.asked].count("/health/ready") == 3


def test_a_stranger_at_the_port_is_left_alone(running, loaded):
    for status, text in ((200, "<html>"), (200, "[]"), (404, "{}")):
        running.answers["/health/ready"] = [(status, text)]
        assert run("chat").returncode == 0
    assert loaded == ["demo"] * 3


def test_a_server_that_wants_a_key_is_reported(running, loaded):
    running.answers["/v1/models"] = [(401, '{"error": {"message": "a key is needed"}}')]
    done = run("chat")
    assert loaded == ["demo"]
    assert "a key is needed; give the key with CAIRN_API_KEY" in done.stderr and "Loading a model here" in done.stderr


def test_an_admin_order_names_the_admin_key(running):
    refused = '{"error": {"message": "this needs the admin key; send it as \'Authorization: Bearer KEY\'"}}'
    running.answers["/v1/admin/models/unload"] = [(401, refused)]
    assert sentence(run("unload", "m"), 1).endswith("this needs the admin key; give the key with CAIRN_ADMIN_KEY")


def test_an_invalid_keepalive_is_refused(running):
    """A server of one model ignores it, so the command checks it."""
    assert "--keepalive is '10x' but must be a number of seconds" in sentence(
        run("run", "m", "hi", "--keepalive", "10x")
    )
    assert running.asked == []
    assert run("run", "m", "hi", "--keepalive", "-1").returncode == 1, "/api/generate is not there"


def test_local_and_a_server_exclude_each_other(running):
    assert "--host names a server" in sentence(run("chat", "--local", "--host", "h:1"))
    assert "cannot be used with --local" in sentence(run("chat", "--local", "--agent", "ada"))


def test_a_second_server_at_the_port_learns_of_the_first(running, elsewhere):  # noqa: F811
    command = ("serve", "demo", "--engine", "fake", "--port", running.port)
    assert f"a Cairn server listens on port {running.port} already" in sentence(run(*command))
    running.answers["/health/ready"] = [(200, "<html>")]
    assert "is used by another program" in sentence(run(*command))


def test_the_servers_behind_a_router_are_shown(running):
    health = '{"status": "ready", "role": "router", "reasons": [], "troubles": ["http://b:1 is down: gone"]}'
    one = '{"url": "http://a:1", "draining": false, "state": "ready", "running": 2}'
    running.answers |= {"/health/ready": [(200, health)], "/router/replicas": [(200, f'{{"data": [{one}]}}')]}
    running.answers["/metrics"] = [(200, "cairn_router_requests_total 9\n")]
    rows = dict(line.split("\t") for line in run("status").stdout.splitlines())
    assert rows["trouble"] == "http://b:1 is down: gone"
    assert rows["server behind it"] == "http://a:1: ready, 2 running"
    assert run("ps").stdout.split("\t")[:6] == ["m", "loaded", "-", "64", "-", "-"], "the router does not know"


# ------------------------------------------------------------------------------------------------------------ run


def test_run_answers_a_prompt_or_talks(running):
    assert run("run", "m", "hi there").stdout == "Hello you\n"
    assert running.asked[-1][1]["repetition_stop"] is True, "nobody reads the same words for minutes"
    assert running.asked[-1][1]["messages"] == [{"role": "user", "content": "hi there"}]
    assert run("run", "m", typed="hi\n").stdout == "Hello you\n"


def test_run_pulls_what_is_not_here(running, loaded, monkeypatch):
    pulled = []
    monkeypatch.setattr(hub, "pull", lambda model, **_: pulled.append(model) or hub.demo_folder())
    assert run("run", "org/name").returncode == 0
    assert run("run", "demo").returncode == 0
    assert (pulled, loaded) == (["org/name"], ["org/name", "demo"])
    assert run("run", "m", typed="hi\n").returncode == 0  # the server has it
    assert pulled == ["org/name"]


def test_run_says_where_there_is_no_such_model(loaded, monkeypatch):
    monkeypatch.setattr(answer_source, "state_of", lambda *_: "")
    assert sentence(run("run", "nothing.gguf")) == "there is no file nothing.gguf"


# ------------------------------------------------------------------------------------------------ what is told of it


def test_a_cut_answer_is_reported_on_stderr_and_a_whole_one_is_not(running):
    host = f"127.0.0.1:{running.port}"
    assert run("generate", "-p", "x", "--host", host).stderr == ""
    cut = sse({"choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": "length"}]}, "[DONE]")
    running.answers["/v1/chat/completions"] = [(200, cut)]
    for more in ([], ["--stream"]):
        done = run("generate", "-p", "x", "--host", host, *more)
        assert (done.returncode, done.stdout) == (0, "Hel\n")
        assert done.stderr == "(the answer was cut at the token limit: finish_reason length)\n"


def test_ps_shows_the_servers_model_and_its_load(running):
    done = run("ps")
    assert done.stdout == f"m\tloaded\t-\t64\t2\t1\t-\thttp://127.0.0.1:{running.port}\n"
    running.answers["/metrics"] = [(401, '{"error": {"message": "no"}}')]
    assert run("ps").stdout.startswith("m\tloaded\t-\t64\t-\t-\t")
    assert "no server answers" in sentence(run("ps", "--host", "127.0.0.1:1"), 1)


def test_stop_unloads_a_model_and_says_how_a_server_is_ended(running):
    said = {"id": "m", "state": "not loaded", "model": "/models/m", "success": True}
    running.answers["/v1/admin/models/unload"] = [(200, json.dumps(said))]
    assert "state\tnot loaded" in run("stop", "m").stdout.splitlines()
    assert running.asked[-1] == ("/v1/admin/models/unload", {"model": "m"})
    assert "press Ctrl-C in its terminal" in sentence(run("stop"))
    assert "no server answers" in sentence(run("stop", "--host", "127.0.0.1:1"), 1)


def test_models_of_a_server_are_changed_by_name(running):
    said = {"id": "m", "state": "loaded", "model": "/models/m", "load_seconds": 1.25, "success": True}
    for order in ("load", "unload", "swap"):
        running.answers[f"/v1/admin/models/{order}"] = [(200, json.dumps(said))]
    assert run("load", "m").stdout.splitlines() == [
        "model\tm",
        "state\tloaded",
        "from\t/models/m",
        "loaded in\t1.2 s",
    ]
    assert "loaded in" not in run("unload", "m", "--grace", "5").stdout
    assert run("swap", "m", "org/other").returncode == 0


def test_options_of_a_server_are_read_again(running):
    unchanged = [{"option": "port", "why": "it takes a restart of the server"}]
    said = {"object": "reload", "changed": ["tenants"], "unchanged": unchanged}
    running.answers["/v1/admin/reload"] = [(200, json.dumps(said))]
    assert run("reload").stdout.splitlines() == [
        "changed\ttenants",
        "unchanged\tport: it takes a restart of the server",
    ]


@pytest.mark.parametrize("word", ["list", "ls", "models"])
def test_models_by_each_of_its_names(word):
    assert run(word).stdout.startswith("demo\t11.8 MB\t")


def test_show_tells_what_a_model_is():
    rows = dict(line.split("\t") for line in run("show", "demo").stdout.splitlines())
    assert rows["family"] == "Qwen3ForCausalLM" and rows["parameters"] == "5.84 million"
    assert rows["context"] == "2048 tokens" and rows["quantisation"] == "BF16 100%"
    assert rows["chat template"] == "with tools" and rows["ends"] == "<|im_end|> <|endoftext|>"
    assert rows["sampling"] == "greedy (the model's own)"
    assert "<|im_start|>" in run("show", "demo", "--template").stdout
    assert "cairn pull org/name" in sentence(run("show", "org/name"))


def test_version_by_each_of_its_names():
    assert run("version").stdout == run("--version").stdout == f"{__version__}\n"
    done = subprocess.run([sys.executable, "-m", "cairn", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["create"], "a folder or a .gguf"), (["delete", "m"], "cairn rm MODEL"), (["server"], "cairn serve")],
)
def test_commands_of_other_programs_get_the_name_used_here(words, hint):
    assert hint in sentence(run(*words))


def test_near_misses_of_commands_and_options_are_hinted_at():
    assert "Did you mean 'serve'?" in run("serv").stderr
    assert "--kv-gb" in run("serve", "--kvgb", "3").stderr
    assert "Did you mean 'rollback'?" in run("agents", "rolback").stderr


def test_cairn_alone_says_how_to_begin_on_half_a_screen():
    done = run()
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) <= 12
    words = set(re.findall(r"^  cairn (\w+)", done.stdout, re.MULTILINE))
    assert {"chat", "run", "serve", "list", "doctor"} <= words
    assert words <= set(typer.main.get_command(app).commands)


def test_a_flag_is_not_shown_as_if_it_took_a_value():
    for words in ((), ("chat",), ("agents", "evict")):
        shown = run(*words, "--help").stdout
        assert "<bool>" not in shown and "--help" in shown


def test_a_model_that_cannot_be_served_is_reported_once():
    done = run("serve", "/nowhere", "--port", "0")
    assert done.returncode == 2 and done.stderr.count("there is no folder /nowhere") == 1


def test_help_names_completion_and_the_usual_short_flag_works():
    shown = run("-h").stdout
    assert "--install-completion" in shown and "--show-completion" in shown
    assert "For completion of commands and options in your shell: cairn --install-completion" in " ".join(shown.split())
    assert "--kv-gb" in run("serve", "-h").stdout


# ------------------------------------------------------------------------------------------------------------- rm


def repository(folder: Path, **files: str) -> Path:
    """Make a repository in the download cache below `folder`, with files by name and content."""
    place = folder / ".cache/huggingface/hub/models--org--name"
    snapshot = place / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        blob = place / "blobs" / f"blob-{content}"
        blob.write_text(content)
        link = snapshot / (name if name.lower().endswith(".gguf") else f"{name}.gguf")
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return place


def test_rm_removes_one_quantisation_and_leaves_the_other(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "four", "m-Q8_0": "eight", "n-Q4_1": "four"})
    assert "give --yes" in sentence(run("rm", "org/name:Q8_0"))
    assert run("rm", "org/name:Q8_0", "--yes").returncode == 0
    assert sorted(path.name for path in (place / "blobs").iterdir()) == ["blob-four"]
    assert run("rm", "org/name:Q4_0", "-y").returncode == 0
    assert (place / "blobs" / "blob-four").exists()  # it has another name left
    assert run("rm", "hf.co/org/name:Q4_1", "-y").returncode == 0
    assert not place.exists()  # nothing is left of it


def left(place: Path) -> list[str]:
    """Return the names of the files that a repository still has, and of its blobs."""
    files = [path for part in ("snapshots/" + "a" * 40, "blobs") for path in (place / part).rglob("*")]
    return sorted(path.relative_to(place).as_posix().removeprefix(f"snapshots/{'a' * 40}/") for path in files)


def test_rm_sees_an_ending_in_capitals(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0.GGUF": "four", "m-Q8_0": "eight"})
    remove(plan("org/name:Q4_0"))
    assert left(place) == ["blobs/blob-eight", "m-Q8_0.gguf"]


@pytest.mark.parametrize("own", ["model", "m-Q4_0"])
def test_rm_removes_one_of_two_that_only_their_folders_tell_apart(elsewhere, own):  # noqa: F811
    place = repository(elsewhere, **{f"a/{own}": "one", f"b/{own}": "two"})
    results = [hub.locate(f"org/name:{folder}/{own}").read_text() for folder in "ab"]
    assert results == ["one", "two"]
    planned = plan(f"org/name:a/{own}")
    assert planned.name == f"org/name:a/{own}"
    remove(planned)
    assert left(place) == ["b", f"b/{own}.gguf", "blobs/blob-two"]


def test_rm_removes_a_file_from_every_commit_that_has_it(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "new", "m-Q8_0": "eight"})
    old = place / "snapshots" / ("b" * 40)
    old.mkdir()
    (place / "blobs" / "blob-old").write_text("old")
    (old / "m-Q4_0.gguf").symlink_to("../../blobs/blob-old")
    remove(plan("org/name:q4_0"))
    assert left(place) == ["blobs/blob-eight", "m-Q8_0.gguf"] and not old.exists()


def pulled(place: Path, name: str, content: str) -> None:
    """Add a file to a repository, as a pull does."""
    (place / "blobs" / f"blob-{content}").write_text(content)
    (place / "snapshots" / ("a" * 40) / f"{name}.gguf").symlink_to(f"../../blobs/blob-{content}")


def test_rm_leaves_what_was_pulled_after_the_question(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "four"})
    planned = plan("org/name:Q4_0")
    pulled(place, "m-Q8_0", "eight")
    remove(planned)
    assert left(place) == ["blobs/blob-eight", "m-Q8_0.gguf"]


def test_rm_removes_nothing_if_the_files_have_changed_after_the_question(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "four"})
    planned = plan("org/name:Q4_0")
    pulled(place, "n-Q5_0", "four")  # the same bytes under another name
    before = left(place)
    with pytest.raises(ModelError, match="files of org/name:m-Q4_0 have changed meanwhile; nothing was removed"):
        remove(planned)
    assert left(place) == before
    remove(plan("org/name:Q4_0"))
    assert left(place) == ["blobs/blob-four", "n-Q5_0.gguf"]


def test_rm_of_a_tag_leaves_an_interrupted_download_of_another(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "four"})
    (place / "blobs" / "other.incomplete").write_text("half")
    planned = plan("org/name:Q4_0")
    assert planned.bytes == len("four")
    remove(planned)
    assert left(place) == ["blobs/other.incomplete"]
    remove(plan("org/name"))
    assert not place.exists()


def test_a_tag_without_files_removes_nothing(elsewhere, monkeypatch):  # noqa: F811
    """Such as a tag whose files another program has removed meanwhile."""
    place = repository(elsewhere, **{"m-Q4_0": "four", "m-Q8_0": "eight"})
    monkeypatch.setattr(removal, "gguf_names", lambda snapshot: [])
    with pytest.raises(ModelError, match="org/name:m-Q4_0 is not downloaded"):
        remove(plan("org/name:Q4_0"))
    assert len(left(place)) == 4


def test_rm_removes_a_whole_repository(elsewhere):  # noqa: F811
    place = repository(elsewhere, **{"m-Q4_0": "four", "m-Q8_0": "eight"})
    assert plan("org/name").bytes == sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir())
    done = run("rm", "org/name", "--yes")
    assert done.returncode == 0 and done.stderr.startswith("Removed org/name")
    assert place.parent.is_dir() and not place.exists()


def test_rm_removes_a_model_with_a_short_name(elsewhere):  # noqa: F811
    place = elsewhere / ".cache/cairn/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "smollm2 is not downloaded" in sentence(run("rm", "smollm2", "-y"))
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(98_362_432)
    assert run("rm", "smollm2", "-y").returncode == 0
    assert not place.parent.exists()


def test_rm_removes_nothing_else(elsewhere):  # noqa: F811
    (elsewhere / "m.gguf").write_bytes(b"GGUF")
    place = repository(elsewhere, **{"m-Q4_0": "four"})
    for model, why in (
        ("demo", "comes with Cairn"),
        ("m.gguf", "is no download"),
        (str(elsewhere), "is no download"),
        ("../name", "is no download"),
        ("org/..", "is no download"),
        ("org/other", "not downloaded"),
        ("org/name:Q8_0", "only Q4_0"),
    ):
        assert why in sentence(run("rm", model, "--yes"))
    assert (elsewhere / "m.gguf").exists() and place.exists()
