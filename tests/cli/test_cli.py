import contextlib
import fcntl
import gc
import http.server
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from cairn.cli import app, main
from cairn.cli.common.output import table
from cairn.cli.connection.client import Client
from cairn.cli.conversation.conversation import Conversation
from cairn.cli.conversation.line_reader import PipeReader
from cairn.cli.generate import write
from cairn.config.config import Config
from cairn.config.option import options
from cairn.entrypoints.answer import Answer
from cairn.system.posix import SystemFiles, SystemRng
from cairn.types.errors import CairnError, ConfigError, GenerationFailed, Unavailable
from cairn.types.outputs import Delta, FinishReason, Usage
from cairn.types.stats import CacheReport
from tests.service.several import make_models

MAIN = "from cairn.cli import main; main()"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run every test in an empty folder, with an empty home and no options in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "XDG_", "HF_")):
            monkeypatch.delenv(name)
    return tmp_path


def process(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-c", MAIN, *arguments]
    more.setdefault("stdin", subprocess.DEVNULL)  # the command would read a pipe that is never closed
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def run(*arguments: str, env: dict[str, str] | None = None, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which is much faster; `env` is added to the environment."""
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(typed.encode()))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        patch.setattr(sys, "stdin", stdin)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        main(arguments)
    return subprocess.CompletedProcess(arguments, int(left.value.code or 0), out.getvalue(), err.getvalue())


def sentence(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """Return the one line on stderr of a command that failed with `code` and printed nothing else."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("Cairn listens on "))
    assert done.stderr.startswith("cairn: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("cairn: ").rstrip("\n")


# ------------------------------------------------------------------------------------------------- options and help


def test_help_lists_the_commands_and_no_others():
    """Known failure 50: what the help names exists, and nothing is missing."""
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    models = {"pull", "models", "list", "ls", "show", "rm", "quantize", "merge", "tune"}
    servers = {"status", "ps", "load", "unload", "swap", "reload", "stop", "cancel", "launch", "route"}
    assert names == models | servers | {"serve", "chat", "run", "generate", "embed", "doctor", "bench"} | {
        "config",
        "version",
        "man",
        "backup",
        "restore",
    }
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(f" {name} " in shown.output or f"`{name}`" in shown.output for name in names)


def test_serve_has_a_flag_for_every_option():
    """Known failure 50: the flags are the fields of Config, each with its help text and bounds."""
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help-all"]).output.replace("│", " ").split())
    for option in options():
        if option.name == "models":  # these are arguments
            continue
        assert (option.flag in shown) or option.name == "model"
        assert option.help.split(";")[0] in shown
        assert option.panel in shown


def test_help_shows_some_twenty_options_in_groups():
    """`--help-all` shows the others. Options work whether or not they are shown."""
    few, all_of_them = (CliRunner().invoke(app, ["serve", name]).output for name in ("--help", "--help-all"))
    shown = [option.name for option in options() if f" {option.flag} " in few]
    assert 15 <= len(shown) <= 25 and {"port", "context", "api_key", "tls_cert"} <= set(shown)
    assert len(few.splitlines()) < 100 < len(all_of_them.splitlines())
    assert "--help-all" in few and "--max-queue" not in few and "--max-queue" in all_of_them
    assert "max_queue\t7\t--max-queue" in run("config", "--max-queue", "7").stdout
    assert "--help-all" not in CliRunner().invoke(app, ["ps", "--help"]).output, "it has few, and shows them all"


@pytest.mark.parametrize(
    ("option", "right"),
    [("--num-ctx", "called --context"), ("--n_ctx=5", "called --context"), ("--num-predict", "called --max-tokens"),
     ("--model-path", "the argument MODEL")],
)  # fmt: skip
def test_an_option_of_another_program_gets_the_right_name(option, right):
    assert f"there is no option {option.partition('=')[0]}: it is {right} here" in sentence(
        run("run", "demo", option, "5")
    )


def test_long_lists_of_choices_stand_in_the_help_text():
    """Next to the flag they would be wrapped anywhere."""
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=80).output
    assert "auto|bf16" not in shown and "one of auto, bf16" in " ".join(shown.replace("│", " ").split())


def test_an_address_in_a_table_can_be_copied_and_a_page_is_shown(monkeypatch, capsys, tmp_path):
    """On a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    url = "https://huggingface.co/" + "a" * 60
    table(("name", "page"), [("x", url), ("long " * 20, "y")])
    assert f";{url}\x1b" in capsys.readouterr().out, "each piece of the folded text is a link to all of it"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    for command, rest in (("cat > shown", ""), ("exit 1", ".TH")):
        (tmp_path / "man").write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "man").chmod(0o700)
        with pytest.raises(SystemExit):
            main(["man", "run"])
        assert capsys.readouterr().out.startswith(rest)
    assert (tmp_path / "shown").read_text().startswith(".TH")


def test_manual_pages_have_every_option_and_are_good_roff(elsewhere):
    assert run("man", "--write", "pages").stdout.endswith("pages in pages\n")
    page = (elsewhere / "pages/cairn-serve.1").read_text()
    for option in options():
        if option.name not in ("model", "models"):
            assert option.flag.replace("-", "\\-") in page
    assert {"cairn.1", "cairn-chat.1", "cairn-cache-stats.1"} <= {path.name for path in (elsewhere / "pages").iterdir()}
    assert run("man", "serve").stdout == page and "[dim]" not in page
    assert "there is no command brew" in sentence(run("man", "brew"))
    if shutil.which("groff"):
        pages = sorted(map(str, (elsewhere / "pages").glob("*.1")))
        command = ["groff", "-man", "-ww", "-z", *pages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_help_loads_nothing_heavy():
    heavy = "('numpy', 'httpx', 'tokenizers', 'pydantic', 'uvicorn', 'jinja2', 'asyncio')"
    code = (
        "import sys\ntry:\n    from cairn.cli import main; main(['--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_an_empty_model_is_named_as_the_argument_that_it_is():
    assert sentence(run("serve", "")) == "MODEL is '' but must be a text that is not empty"


def test_a_model_is_served_beside_those_of_a_folder(elsewhere, monkeypatch):
    from cairn.served_models.served_model import served_models

    make_models(elsewhere / "models", "alpha")
    found = []
    monkeypatch.setattr("cairn.api.server.serve", lambda config, again: found.extend((config, again())))
    for model, names, wanted in (
        (("demo",), (), ["demo", "alpha"]),  # named, though it is the default
        (("demo",), ("--served-name", "mine", "--alias", "other"), ["mine", "alpha"]),
        ((), (), ["alpha"]),
    ):
        assert run("serve", *model, "--models-dir", "models", *names).returncode == 0
        for config in found:
            served = served_models(config)
            assert [one.name for one in served] == wanted and ("other" in served[0].names) == bool(names)
        found.clear()


def test_version():
    from cairn import __version__

    assert process("--version").stdout == f"{__version__}\n"


def test_config_shows_each_value_and_where_it_came_from(elsewhere):
    (elsewhere / "cairn.toml").write_text("max_queue = 7\nadmin_key = 'hush'\n")
    env = {"CAIRN_PORT": "9", "CAIRN_API_KEY": "hush-1,hush-2"}
    done = run("config", "org/m", "--kv-gb", "2", "--allowed-hosts", "a", "--allowed-hosts", "b", env=env)
    rows = {line.split("\t")[0]: tuple(line.split("\t")[1:]) for line in done.stdout.splitlines()}
    assert list(rows) == [*Config.__struct_fields__, "sampling"]
    assert rows["sampling"][0] == "not known" and "cairn pull org/m" in rows["sampling"][1]
    assert rows["port"] == ("9", "CAIRN_PORT")
    assert rows["kv_gb"] == ("2", "--kv-gb")
    assert rows["max_queue"] == ("7", "max_queue in cairn.toml")
    assert rows["allowed_hosts"] == ("a, b", "--allowed-hosts")
    assert rows["model"][0] == "org/m"
    assert rows["host"] == ("127.0.0.1", "default")
    assert rows["api_key"] == ("***, ***", "CAIRN_API_KEY") and rows["admin_key"][0] == "***"
    assert "hush" not in done.stdout + done.stderr


def test_config_shows_the_sampling_defaults_and_their_source():
    done = run("config")
    rows = {line.split("\t")[0]: tuple(line.split("\t")[1:]) for line in done.stdout.splitlines()}
    assert rows["sampling.temperature"] == ("0", "generation_config.json")
    assert rows["sampling.top_k"] == ("40", "default")
    assert rows["sampling.repetition_penalty"] == ("1", "default")


def test_config_shows_which_sampling_options_say():
    done = run("config", "--default-temperature", "0.3", "--default-top-k", "0")
    rows = {line.split("\t")[0]: tuple(line.split("\t")[1:]) for line in done.stdout.splitlines()}
    assert rows["default_temperature"] == ("0.3", "--default-temperature")
    assert (rows["sampling.temperature"], rows["sampling.top_k"]) == (("0.3", "options"), ("0", "options"))
    assert rows["sampling.top_p"] == ("0.95", "default")
    done = run("config", "--default-top-p", "1.5")
    assert done.returncode != 0 and "default-top-p" in done.stderr


def test_a_switch_can_be_turned_off_again(elsewhere):
    (elsewhere / "cairn.toml").write_text("unsafe_no_auth = true\n")
    assert "unsafe_no_auth\ttrue\tunsafe_no_auth in cairn.toml" in run("config").stdout
    assert "unsafe_no_auth\tfalse\t--unsafe-no-auth" in run("config", "--no-unsafe-no-auth").stdout


def test_bad_options_are_one_sentence_and_exit_2(elsewhere):
    assert sentence(run("serve", "--port", "99999")) == "--port is 99999 but must be at least 0 and at most 65535"
    assert sentence(run("chat", "--kv-gb", "no")) == "--kv-gb is 'no' but must be a number"
    said = sentence(run("generate", "-p", "x", "--top-k", "-5"))
    assert said.startswith("--top-k is -5 but must be from -1 to ")
    assert sentence(run("chat", "--top-p", "nan")) == "--top-p is nan but must be from 0 to 1"
    assert sentence(run("config", "--config", "gone.toml")) == "there is no file gone.toml"
    assert "did you mean CAIRN_PORT?" in sentence(run("config", env={"CAIRN_PROT": "1"}))
    done = run("serve", "--prot", "1")
    assert done.returncode == 2 and "--prot" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "status --host https://127.0.0.1:1 --cacert",
        "launch pi --print --host https://127.0.0.1:1 --cacert",
        "swap m",
        "man --write",
        "cluster up demo --folder",
        "cluster prune --shared-store",
        "generate -p x --chat-template",
    ],
)
def test_a_home_that_does_not_exist_is_one_sentence_and_exit_2(command):
    said = sentence(run(*command.split(), "~nosuchuser/x"))
    assert said.startswith("~nosuchuser/x: there is no home folder of that user")


def test_a_certificate_or_store_in_a_home_that_does_not_exist_is_one_sentence():
    from cairn.cli.connection.trust import certificate_file
    from cairn.cluster.shared import open_blobs

    said = sentence(run("status", env={"CAIRN_TLS_CERT": "~nosuchuser/x", "CAIRN_TLS_KEY": "k"}))
    assert "no home folder of that user" in said
    for opened in (certificate_file, lambda place: open_blobs(place, SystemFiles(), SystemRng())):
        with pytest.raises(ConfigError, match="no home folder of that user"):
            opened("~nosuchuser/x")


def test_doctor_and_models_name_what_is_here():
    rows = [line.split("\t") for line in run("doctor").stdout.splitlines()]
    facts = {(section, name): value for section, name, value in rows}
    assert int(facts["machine", "cores"].split()[0]) >= 1
    assert float(facts["machine", "free memory"].split()[0]) > 0
    assert facts["engines", "cpu"].startswith("used") and facts["engines", "fake"].startswith("not used")
    assert facts["models", "demo"].startswith("fits") and "of weights (f32)" in facts["models", "demo"]
    assert run("models").stdout.startswith("demo\t")
    for flag, value, word in (("--kv-gb", "0.000001", "kv_gb"), ("--context", "999999", "was made for at most 2048")):
        shown = [line for line in run("doctor", flag, value).stdout.splitlines() if line.startswith("models\tdemo")]
        assert shown[0].split("\t")[2].startswith("no: ") and word in shown[0]


@pytest.mark.parametrize("command", [["serve"], ["generate", "-p", "x"], ["chat"]])
def test_models_that_cannot_be_served_are_one_sentence_and_exit_2(elsewhere, command, monkeypatch):
    monkeypatch.setenv("CAIRN_PORT", "0")  # no server is looked for
    (elsewhere / "empty").mkdir()
    pickles = elsewhere / "pickles"
    pickles.mkdir()
    demo = Path(sys.modules["cairn"].__path__[0]) / "demo"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (pickles / name).write_bytes((demo / name).read_bytes())
    (pickles / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for model, words in (
        ("org/absent", "cairn pull org/absent"),
        ("absent", "there is no folder absent"),
        ("empty", "empty/"),
        ("pickles", "safetensors"),
    ):
        # A server starts a worker for the model it finds, which must not happen in this process.
        how = process if command == ["serve"] and model in ("empty", "pickles") else run
        said = sentence(how(command[0], model, *command[1:]))
        assert words in said, said


def test_a_failed_start_restores_garbage_collection():
    """Whoever called the command from Python goes on in this process."""
    assert gc.isenabled()
    try:
        for arguments in (["absent", "--port", "0"], ["demo", "--host", "0.0.0.0"]):
            sentence(run("serve", *arguments))
            assert gc.isenabled()
        gc.disable()
        sentence(run("serve", "absent", "--port", "0"))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_model_without_a_chat_template_can_continue_text(elsewhere):
    demo = Path(sys.modules["cairn"].__path__[0]) / "demo"
    plain = elsewhere / "plain"
    shutil.copytree(demo, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    small = ("--kv-gb", "0.1", "--max-tokens", "2")
    said = sentence(run("generate", "plain", "-p", "x", *small), 1)
    assert "no chat template" in said and said.endswith("--raw continues the text without one")
    assert run("generate", "plain", "-p", "x", "--raw", *small).returncode == 0


# ------------------------------------------------------------------------------------------------------ one answer


class Pieces:
    """An answer that comes in these pieces; an exception among them is raised."""

    def __init__(self, *pieces: str | BaseException, reason: FinishReason = FinishReason.STOP) -> None:
        self._pieces = iter(pieces)
        self._said = ""
        self._reason = reason
        self.closed = False

    @property
    def answer(self) -> Answer:
        usage = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=6)
        cache = CacheReport(computed=3, pool=6)
        return Answer(text=self._said, tokens=(1, 2), finish_reason=self._reason, usage=usage, cache=cache)

    def __iter__(self) -> Iterator[Delta]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            self._said += piece
            yield Delta(text=piece)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pieces", "written"),
    [(["a", "b"], "ab\n"), (["a", "b\n"], "ab\n"), (["a\n", "\n"], "a\n\n"), ([""], ""), ([" a"], " a\n")],
)
def test_stdout_is_the_text_and_one_newline(capsys, stream, pieces, written):
    """Known failure 25: no extra blank line and nothing but the text, streamed or not."""
    answering = Pieces(*pieces)
    write(answering, stream)
    assert capsys.readouterr() == (written, "")
    assert answering.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GenerationFailed("no")])
def test_a_partial_answer_is_printed_when_it_breaks_off(capsys, stream, error):
    """Known failure 15: a broken-off answer is printed, but is not a success."""
    answering = Pieces("par", "tial", error)
    with pytest.raises(type(error)):
        write(answering, stream)
    assert capsys.readouterr().out == "partial\n"
    assert answering.closed


# ---------------------------------------------------------------------------------------------------- conversation


class Scripted:
    """A model that answers with these pieces and records what it was asked."""

    def __init__(self, *answers: Pieces | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []

    def chat(self, messages, **sampling):
        self.asked.append(list(messages))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def generate(self, prompt, **sampling):
        raise AssertionError("a conversation does not generate")


def converse(monkeypatch, model, *lines: str | BaseException, system=None) -> Conversation:
    remaining = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    conversation = Conversation(model, {}, system)
    conversation.run()
    return conversation


def test_a_conversation_remembers(monkeypatch, capsys):
    model = Scripted(Pieces("Hi ", "Ada."), Pieces("Ada."))
    conversation = converse(monkeypatch, model, "I am Ada.", "", "Who am I?", system="Be brief.")
    assert [message["content"] for message in model.asked[1]] == ["Be brief.", "I am Ada.", "Hi Ada.", "Who am I?"]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    out, err = capsys.readouterr()
    assert out == "Hi Ada.\nAda.\n"  # stdout has the answers only
    assert "prompt 9 tokens, 6 of them already computed" in err


def test_ctrl_c_stops_the_answer_and_keeps_the_part(monkeypatch, capsys):
    first = Pieces("one two", KeyboardInterrupt())
    model = Scripted(first, Pieces("three"))
    conversation = converse(monkeypatch, model, "count", KeyboardInterrupt(), "go on")
    assert first.closed
    assert conversation.messages[1] == {"role": "assistant", "content": "one two"}
    assert model.asked[1][1]["content"] == "one two"
    assert "stopped" in capsys.readouterr().err


def test_ctrl_c_at_any_time_ends_no_conversation(monkeypatch, capsys):
    class Slow(Pieces):
        def close(self):
            super().close()
            raise KeyboardInterrupt  # an impatient second one

    def interrupted(text):
        raise KeyboardInterrupt

    model = Scripted(Slow("one", KeyboardInterrupt()), Pieces("three"))
    monkeypatch.setattr(Conversation, "_save", lambda self, text: interrupted(text))
    conversation = converse(monkeypatch, model, "count", "/save x", "go on")
    assert [message["content"] for message in conversation.messages] == ["go on", "three"]
    assert capsys.readouterr().err.count("(stopped)") == 2


def test_prompts_are_talk_where_stdout_is_a_file(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "x")
    reader = PipeReader()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert reader.read() == "x" and asked == [""]
    assert capsys.readouterr() == ("", "> ")


def test_characters_that_stdout_cannot_write_are_replaced():
    script = "from cairn.cli import _open_standard_streams; _open_standard_streams(); print('caf\\u00e9 \\udcff')"
    for encoding, said in (("ascii", b"caf? ?\n"), ("latin-1", b"caf\xe9 ?\n"), ("utf-8", b"caf\xc3\xa9 \xff\n")):
        env = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
        assert (done.stdout, done.stderr) == (said, b"")


def test_a_failed_question_is_forgotten(monkeypatch, capsys):
    model = Scripted(
        CairnError("too long"), Pieces("a", GenerationFailed("broke")), Pieces(KeyboardInterrupt()), Pieces("ok")
    )
    conversation = converse(monkeypatch, model, "1", "2", "3", "4")
    assert [message["content"] for message in conversation.messages] == ["4", "ok"]
    err = capsys.readouterr().err
    assert all(words in err for words in ("too long", "broke", "taken back", "there was no answer"))
    assert [len(asked) for asked in model.asked] == [1, 1, 1, 1]


def test_commands_of_a_conversation(monkeypatch, capsys, elsewhere):
    model = Scripted(Pieces("A"), Pieces("B"), Pieces("C"))
    lines = [
        "a",
        "b",
        "/undo",
        "/system Be kind.",
        "c\\",
        "d",
        "/save talk.json",
        "/save talk.json",
        "/save",
        "/sva",
        "/help",
    ]
    conversation = converse(monkeypatch, model, *lines, "/exit", "never")
    assert [message["content"] for message in model.asked[2]] == ["Be kind.", "a", "A", "c\nd"]
    saved = json.loads((elsewhere / "talk.json").read_text())
    assert [message["content"] for message in saved] == ["Be kind.", "a", "A", "c\nd", "C"]
    err = capsys.readouterr().err
    for words in (
        "took back: b",
        "saved 4 messages to talk.json",
        "exists already",
        "needs the name",
        "did you mean /save?",
    ):
        assert words in err
    assert "/clear" in err and len(conversation.messages) == 4


def test_clear_and_undo_on_nothing(monkeypatch, capsys):
    model = Scripted(Pieces("A"), Pieces("B"))
    conversation = converse(monkeypatch, model, "/undo", "a", "/clear", "/system", "b")
    assert [message["content"] for message in model.asked[1]] == ["b"]
    assert len(conversation.messages) == 2
    assert "nothing to take back" in capsys.readouterr().err


def test_a_model_cannot_steer_the_terminal(monkeypatch, capsys):
    converse(monkeypatch, Scripted(Pieces("a\x1b[2Jb\x07\x9bc\nd\té")), "x")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffd\ufffdc\nd\té\n"


# ------------------------------------------------------------------------------------------------- a running server


NOT_FOUND = (404, '{"error": {"message": "no such thing"}}')


class Canned(http.server.BaseHTTPRequestHandler):
    """A server that answers each path with what a test put there, and records what it was asked."""

    answers: dict[str, tuple[int, str]]
    seen: list[tuple[str, str, object]]
    url: str

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def answer(self, body: object) -> None:
        self.seen.append((self.path, self.headers.get("authorization", ""), body))
        self.reply(*self.answers.get(self.path, NOT_FOUND))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def listening(handler: type[Canned]) -> Iterator[None]:
    """Serve with this handler, whose `url` is set, until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def canned():
    class Handler(Canned):
        pass

    Handler.answers = {"/v1/models": (200, '{"data": [{"id": "m", "max_model_len": 64}]}')}
    Handler.seen = []
    with listening(Handler):
        yield Handler


def sse(*chunks: object) -> str:
    return "".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks)


def test_generate_through_a_server(canned):
    canned.answers["/v1/chat/completions"] = (
        200,
        ": waiting\n\n"
        + sse(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
            {"choices": [{"index": 0, "delta": {"content": "Hello "}}]},
            {"choices": [{"index": 0, "delta": {"content": "you"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
            "[DONE]",
        ),
    )
    env = {"CAIRN_API_KEY": "k"}
    done = run("generate", "-p", "-", "--system", "s", "--host", canned.url, "--seed", "7", env=env, typed="hi\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello you\n", "")
    path, key, body = canned.seen[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["seed"], body["stream"]) == ("m", 7, True)


def test_an_answer_that_fits_a_schema_in_a_file(canned, tmp_path):
    chunks = sse({"choices": [{"index": 0, "delta": {"content": "7"}, "finish_reason": "stop"}]}, "[DONE]")
    canned.answers["/v1/chat/completions"] = (200, chunks)
    (tmp_path / "seven.json").write_text('{"const": 7}')
    done = run("generate", "-p", "x", "--host", canned.url, "--json-schema", str(tmp_path / "seven.json"))
    assert (done.returncode, done.stdout) == (0, "7\n")
    asked = {"type": "json_schema", "json_schema": {"name": "seven", "schema": {"const": 7}}}
    assert canned.seen[-1][2]["response_format"] == asked
    for wrong in ("missing.json", "broken.json"):
        (tmp_path / "broken.json").write_text("{")
        said = sentence(run("generate", "-p", "x", "--json-schema", str(tmp_path / wrong)))
        assert said.startswith("--json-schema ") and "cannot be read as JSON" in said


def test_raw_text_through_a_server_fills_the_context(canned):
    canned.answers["/tokenize"] = (200, '{"count": 4, "max_model_len": 64, "tokens": []}')
    canned.answers["/v1/completions"] = (200, sse({"choices": [{"index": 0, "text": "x"}]}, "[DONE]"))
    done = run("generate", "other", "--raw", "-p", "abc", "--stream", "--host", canned.url.removeprefix("http://"))
    assert (done.returncode, done.stdout) == (0, "x\n")
    assert canned.seen[-1][2]["max_tokens"] == 60
    assert canned.seen[-1][2]["model"] == "other"
    assert "parse_special" not in canned.seen[-1][2]


def test_control_tokens_in_a_raw_text_may_be_text(canned):
    canned.answers["/tokenize"] = (200, '{"count": 4, "max_model_len": 64, "tokens": []}')
    canned.answers["/v1/completions"] = (200, sse({"choices": [{"index": 0, "text": "x"}]}, "[DONE]"))
    done = run("generate", "other", "--raw", "--no-parse-special", "-p", "abc", "--host", canned.url)
    assert (done.returncode, done.stdout) == (0, "x\n")
    assert [body["parse_special"] for path, _, body in canned.seen if path != "/v1/models"] == [False, False]
    said = sentence(run("generate", "-p", "x", "--no-parse-special", "--host", canned.url))
    assert said.startswith("--no-parse-special needs --raw")


def test_errors_of_a_server_are_its_own_sentences(canned):
    done = run("generate", "-p", "x", "--host", canned.url)
    assert sentence(done, 1) == "no such thing"
    canned.answers["/v1/chat/completions"] = (401, '{"error": {"message": "a key is needed"}}')
    said = sentence(run("generate", "-p", "x", "--host", canned.url), 1)
    assert said == "a key is needed; give the key with CAIRN_API_KEY or --api-key @FILE"
    canned.answers["/v1/chat/completions"] = (502, "<html>")
    assert "502" in sentence(run("generate", "-p", "x", "--host", canned.url), 1)
    assert "start one with: cairn serve" in sentence(run("status", "--host", "127.0.0.1:1"), 1)
    for model in ((), ("m",)):
        done = run("chat", *model, "--host", "http://127.0.0.1:1")
        assert "start one with: cairn serve" in sentence(done, 1)


def test_an_error_in_a_stream_is_no_success(canned):
    """Known failures 15, 47: the text so far and the error are printed, and the exit code is not 0."""
    start = {"choices": [{"index": 0, "delta": {"content": "half"}}]}
    canned.answers["/v1/chat/completions"] = (200, sse(start, {"error": {"message": "the worker died"}}))
    done = run("generate", "-p", "x", "--host", canned.url)
    assert (done.returncode, done.stdout, done.stderr) == (1, "half\n", "cairn: the worker died\n")
    canned.answers["/v1/chat/completions"] = (200, sse(start))
    done = run("generate", "-p", "x", "--host", canned.url)
    assert (done.returncode, done.stdout) == (1, "half\n")
    assert "ended the answer without a conclusion" in done.stderr


def test_tool_calls_over_the_wire_are_joined(canned):
    pieces = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]} for piece in pieces]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    canned.answers["/v1/chat/completions"] = (200, sse(*chunks, end, "[DONE]"))
    client = Client(canned.url)
    stream = client.chat([{"role": "user", "content": "x"}])
    assert list(stream) == []
    (call,) = stream.answer.tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "f", '{"a": 1}')
    assert stream.answer.finish_reason is FinishReason.TOOL_CALLS
    client.close()


def test_status_of_a_server(canned):
    canned.answers["/health/ready"] = (503, '{"status": "not ready", "reasons": ["loading"]}')
    assert run("status", "--host", canned.url).stdout.splitlines()[1:] == ["status\tnot ready", "because\tloading"]
    canned.answers["/health/ready"] = (200, '{"status": "ready", "reasons": []}')
    canned.answers["/metrics"] = (
        200,
        '# HELP x\ncairn:num_requests_running{model_name="m"} 3.0\ncairn:num_requests_waiting{model_name="m"} 1.0\n'
        'cairn:kv_cache_usage_perc{model_name="m"} 0.25\ncairn:prefix_cache_queries_total{model_name="m"} 200.0\n'
        'cairn:prefix_cache_hits_total{model_name="m"} 150.0\n',
    )
    env = {"CAIRN_ADMIN_KEY": "admin", "CAIRN_API_KEY": "k", "CAIRN_PORT": canned.url.rpartition(":")[2]}
    rows = dict(line.split("\t") for line in run("status", env=env).stdout.splitlines())
    assert rows["model"] == "m, context 64 tokens"
    assert (rows["running"], rows["waiting"], rows["KV pool"]) == ("3 requests", "1 requests", "25.0% held by requests")
    assert rows["cache"].startswith("150 of 200 prompt tokens")
    assert canned.seen[-1][:2] == ("/metrics", "Bearer admin")
    assert canned.seen[-2][:2] == ("/v1/models", "Bearer k")


def test_status_reports_trouble_and_needs_no_key(canned):
    canned.answers["/health/ready"] = (200, '{"status": "ready", "reasons": [], "troubles": ["the disk is full"]}')
    canned.answers["/v1/models"] = (401, '{"error": {"message": "a key is needed", "code": "unauthorized"}}')
    rows = dict(line.split("\t") for line in run("status", "--host", canned.url).stdout.splitlines())
    assert rows["status"] == "ready" and rows["trouble"] == "the disk is full"
    assert rows["load"].startswith("not shown: a key is needed")


@pytest.mark.parametrize("command", ["cancel x", "status", "cache stats", "cache flush", "cache scrub"])
def test_another_server_that_answers_everything_is_no_cairn_server(canned, command):
    """Above all, an unknown order must not be reported as done."""
    said = '{"ok": true, "status": "ready", "reasons": null, "data": 5}'
    for path in ("health/ready", "v1/requests/x/cancel", "v1/cache", "v1/cache/flush", "v1/cache/scrub"):
        canned.answers["/" + path] = (200, said)
    assert "is not a Cairn server" in sentence(run(*command.split(), "--host", canned.url), 1)


REPORT = {
    "id": "00000000000000ff",
    "state": "running",
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "choices": [{"index": 0, "text": "so far", "error": None}],
}


def test_status_and_cancel_of_a_request(canned):
    path = "/v1/requests/chatcmpl-ff"
    canned.answers[path] = (200, json.dumps(REPORT))
    canned.answers[path + "/cancel"] = (200, json.dumps(REPORT | {"state": "cancelled", "cancelled": True}))
    rows = dict(line.split("\t") for line in run("status", "chatcmpl-ff", "--host", canned.url).stdout.splitlines())
    assert rows == {
        "request": "00000000000000ff",
        "state": "running",
        "prompt": "5 tokens",
        "answer": "2 tokens",
        "text": "so far",
    }
    assert "state\tcancelled" in run("cancel", "chatcmpl-ff", "--host", canned.url).stdout
    canned.answers[path + "/cancel"] = (200, json.dumps(REPORT | {"state": "finished", "cancelled": False}))
    said = sentence(run("cancel", "chatcmpl-ff", "--host", canned.url), 1)
    assert said == "request 00000000000000ff had already ended (finished)"
    assert sentence(run("cancel", "a/../b", "--host", canned.url), 1) == "no such thing"
    assert canned.seen[-1][0] == "/v1/requests/a%2F..%2Fb/cancel"


def test_addresses_of_servers():
    assert Client("localhost:8000").url == "http://localhost:8000"
    assert Client("https://h/v1/").url == "https://h"
    for wrong in ("ftp://h", "http://", "http://[::"):
        with pytest.raises(ConfigError, match="is not the address of a server"):
            Client(wrong)
    with pytest.raises(Unavailable, match=r"no server answers at http://127.0.0.1:1;"):
        Client("127.0.0.1:1").get("/v1/models")


def test_local_options_beside_a_server_are_refused(canned):
    """Known failure 50: an option without effect is an error."""
    said = sentence(run("generate", "-p", "x", "--host", canned.url, "--threads", "1"))
    assert said == "--threads is for a model in this process; the server at --host has its own"
    assert "give --host too" in sentence(run("generate", "-p", "x", "--api-key", "k"))
    assert "--raw leaves out" in sentence(run("generate", "-p", "x", "--raw", "--system", "s"))


# ------------------------------------------------------------------------------------------------- Ctrl-C, for real


@pytest.fixture
def slow(canned):
    """Yield a server whose answers go on for ten seconds, a word every 20 ms.

    `spoken` is set after 50 words, `gone` when the client has disconnected.
    """
    canned.gone = threading.Event()
    canned.spoken = threading.Event()

    def chat(handler) -> None:
        handler.rfile.read(int(handler.headers["content-length"]))
        handler.send_response(200)
        handler.end_headers()
        try:
            for number in range(500):
                handler.wfile.write(sse({"choices": [{"index": 0, "delta": {"content": "word "}}]}).encode())
                if number == 50:
                    canned.spoken.set()
                time.sleep(0.02)
        except OSError:
            canned.gone.set()

    canned.do_POST = chat
    return canned


def start(*arguments: str, **more) -> subprocess.Popen[str]:
    more.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, "-c", MAIN, *arguments], text=True, **more)


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_ctrl_c_prints_the_partial_text(slow, stream):
    process = start("generate", "-p", "x", "--host", slow.url, *stream, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert slow.spoken.wait(60)
    first = process.stdout.read(5) if stream else ""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    out = first + out
    assert (process.returncode, err) == (130, "")
    words = out.removesuffix("\n")
    assert out == words + "\n" and 1 <= words.count("word ") < 500 and words.replace("word ", "") == ""
    assert slow.gone.wait(10)  # and the server noticed


def test_a_reader_that_leaves_is_no_traceback(slow):
    process = start(
        "generate", "-p", "x", "--stream", "--host", slow.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(5) == "word "
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) == 1
    assert slow.gone.wait(10)


def test_a_full_stdout_is_a_short_error(slow):
    with open("/dev/full", "w") as full:
        process = start("generate", "-p", "x", "--stream", "--host", slow.url, stdout=full, stderr=subprocess.PIPE)
        said = process.stderr.read()
        process.stderr.close()
        assert process.wait(30) == 1
    assert said.startswith("cairn: ") and "No space left" in said and said.count("\n") == 1
    assert slow.gone.wait(10)


def test_closed_standard_streams_are_no_trap():
    """A file opened later would otherwise get the descriptor of stdout and be written to."""
    closed = "import os, sys\nfor n in (0, 1, 2): os.close(n)\n" + MAIN
    done = subprocess.run([sys.executable, "-c", closed, "config"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()

        def control() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = start(
            *arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=control,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(slave)
        self.seen = ""

    def expect(self, words: str) -> str:
        """Return the output up to these words, once they are there."""
        end = time.monotonic() + 60
        while words not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} did not come; there was {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {words!r}: {self.seen!r}") from None
        shown, _, self.seen = self.seen.partition(words)
        return shown

    def rest(self) -> str:
        """Return the output until the program ends."""
        with contextlib.suppress(OSError):  # how a terminal reports the end
            while data := os.read(self.master, 65536):
                self.seen += data.decode(errors="replace")
        return self.seen

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("pull", "a[/b]c"), "cairn: a[/b]c is not a hub id"),
        (("quantize", "none/none", "a[b]c.gguf"), "a[b]c.gguf"),
    ],
)
def test_brackets_of_a_name_are_no_markup_of_the_progress_bar(arguments, shown):
    with Terminal(*arguments) as terminal:
        terminal.expect(shown)


def test_ctrl_c_in_a_terminal_stops_the_answer_and_the_conversation_goes_on(slow, elsewhere):
    with Terminal("chat", "--host", slow.url) as terminal:
        terminal.expect("is ready")
        terminal.expect("> ")
        terminal.type("count for ever\n")
        terminal.expect("word word")
        terminal.type("\x03")
        terminal.expect("stopped")
        assert slow.gone.wait(10)
        terminal.expect("> ")
        terminal.type("\x03")
        terminal.expect("/exit leaves")
        terminal.expect("> ")
        terminal.type("/save talk.json\n")
        terminal.expect("saved 2 messages")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    question, answer = json.loads((elsewhere / "talk.json").read_text())
    assert question == {"role": "user", "content": "count for ever"}
    assert answer["role"] == "assistant" and answer["content"].startswith("word word")


# ------------------------------------------------------------------------------------------ the bundled model, for real

NO_TORCH = """
import os, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ModuleNotFoundError(f"{name} cannot be imported here", name=name)
sys.meta_path.insert(0, Refuse())
with open(os.path.join(os.path.dirname(__file__), "started"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def serving(process: subprocess.Popen[str]) -> str:
    """Return the address that a started server prints."""
    for line in process.stderr:
        if " serves " in line:
            return line.partition("http://")[2].partition("/v1")[0]
    raise AssertionError(f"the server ended with {process.wait()}")


def test_serve_generate_status_and_cancel_where_torch_cannot_be_imported(elsewhere):
    """End to end on real input, with torch blocked in every process: front, worker, template helper, CLI."""
    (elsewhere / "sitecustomize.py").write_text(NO_TORCH)
    started = elsewhere / "started"
    env = {**os.environ, "PYTHONPATH": str(elsewhere), "OMP_NUM_THREADS": "1"}
    refused = subprocess.run(
        [sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True, check=False
    )
    assert "cannot be imported here" in refused.stderr
    server = start("serve", "demo", "--port", "0", "--kv-gb", "0.1", env=env, stderr=subprocess.PIPE)
    try:
        host = serving(server)
        assert len(set(started.read_text().split())) >= 4  # import torch, front, worker, template helper
        here = process("generate", "-p", "What is Cairn?", "--temperature", "0", "--kv-gb", "0.1", env=env)
        assert (here.returncode, here.stderr) == (0, "") and here.stdout.strip()
        there = process("generate", "-p", "What is Cairn?", "--temperature", "0", "--host", host, "--stream", env=env)
        assert (there.returncode, there.stderr, there.stdout) == (0, "", here.stdout)
        ask = ("generate", "-p", "What is", "--raw", "--max-tokens", "3", "--temperature", "0")
        raw, local = run(*ask, "--host", host), run(*ask, "--kv-gb", "0.1")
        assert (raw.returncode, raw.stdout) == (0, local.stdout)
        rows = dict(line.split("\t") for line in run("status", "--host", host).stdout.splitlines())
        assert (rows["status"], rows["model"]) == ("ready", "demo, context 2048 tokens")
        assert sentence(run("cancel", "00000000000000ff", "--host", host), 1).startswith("there is no such request")
        port = host.rpartition(":")[2]
        said = sentence(process("serve", "--port", port))
        assert said.startswith(f"a Cairn server listens on port {port} already")
    finally:
        server.send_signal(signal.SIGINT)
        server.stderr.read()
        server.stderr.close()
        assert server.wait(30) == 0


def test_cancel_ends_a_request_of_a_server(elsewhere):
    arguments = ("--engine", "fake", "--port", "0", "--kv-gb", "0.1", "--max-running", "1")
    server = start("serve", "demo", *arguments, stderr=subprocess.PIPE)
    try:
        host = serving(server)
        # Eight long choices one after another: they cannot have ended by themselves when the cancel arrives.
        body = {"model": "demo", "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True, "n": 8}
        with httpx.stream("POST", f"http://{host}/v1/completions", json=body, verify=False) as response:
            assert response.status_code == 200
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            number = json.loads(next(lines))["id"]
            done = run("cancel", number, "--host", host)
            assert (done.returncode, done.stderr) == (0, "") and "state\tcancelled" in done.stdout.splitlines()
            assert "cancelled" in list(lines)[-1]
        shown = run("status", number, "--host", host).stdout
        rows = dict(line.split("\t") for line in shown.removesuffix("\n").split("\n"))
        assert rows["state"] == "cancelled"
        assert "had already ended (cancelled)" in sentence(run("cancel", number, "--host", host), 1)
    finally:
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        server.stderr.close()
        assert server.wait(30) == 0


def test_a_memory_limit_of_the_process_is_reported(tmp_path: Path) -> None:
    """`ulimit -v`: a pool that does not fit is refused with an error that names the option; the default pool is
    smaller.
    """

    command = [sys.executable, "-m", "cairn", "generate", "demo", "-p", "Hi", "--max-tokens", "2"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", 'ulimit -v 1500000; exec "$@"', "x", *command, *more],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            check=False,
        )

    small, large = run(), run("--kv-gb", "2")
    assert not small.returncode, small.stderr
    assert large.returncode == 2 and "Traceback" not in large.stderr
    assert re.search(r"needs 2\.\d+ GB of memory .* are free; use --kv-gb for a smaller pool", large.stderr)
