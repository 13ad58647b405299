"""Models pulled from a hub: only the needed files, resumed, verified, and complete or absent."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from cairn.models import files
from cairn.models.files import shards
from cairn.models.hub import download, hub, install, snapshots
from cairn.text.chat.templates import load_templates
from cairn.types.errors import ModelError, ModelFileError

COMMIT = "a" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1-of-2.safetensors", "y": "model-2-of-2.safetensors"}}).encode()


class FakeHub:
    """A server that speaks the hub's protocol for one model, org/m, and misbehaves on request."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b'{"chat_template": "x"}',
            "model.safetensors.index.json": INDEX,
            "model-1-of-2.safetensors": bytes(range(256)) * 12000,
            "model-2-of-2.safetensors": b"second" * 1000,
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": b"again" * 1000,
            "modeling_evil.py": b"import os",
            "README.md": b"# m",
            "onnx/model.onnx": b"x",
        }
        self.commit = COMMIT
        self.stated: dict[str, str] = {}
        """Checksums that differ from the true ones."""
        self.cut: dict[str, list[int]] = {}
        """Bytes after which the connection of the next answers for a file is cut."""
        self.endless: set[str] = set()
        """Files after which more is sent, for some seconds."""
        self.over, self.left = threading.Event(), threading.Event()
        """Whether such an answer is over, and whether the client had closed the connection by then."""
        self.ranges = True
        self.broken: list[int | tuple[int, dict[str, str]]] = []
        """Statuses (perhaps with headers) of the next answers to requests for a file's bytes."""
        self.busy: list[int | tuple[int, dict[str, str]]] = []
        """The same for the listing."""
        self.token = ""
        self.stateless = False
        """Whether it sends no checksums, as some mirrors."""
        self.unstated: set[str] = set()
        """Files without one."""
        self.status: tuple[int, str] | None = None
        self.served: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        fake = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        path = unquote(http.path.partition("?")[0])
        self.requests.append((http.path, http.headers.get("range", "")))
        if self.status is not None:
            self.send(http, self.status[0], b"{}", {"x-error-code": self.status[1]})
        elif self.token and http.headers.get("authorization") != f"Bearer {self.token}":
            self.send(http, 401, b"{}", {"x-error-code": "GatedRepo"})
        elif http.path == "/api/models/org/m/revision/main?blobs=true":
            if self.busy:
                self.refuse(http, self.busy.pop(0))
                return
            self.send(http, 200, json.dumps(self.listing()).encode())
        elif path.startswith(f"/org/m/resolve/{self.commit}/"):
            self.redirect_or_send(http, path.removeprefix(f"/org/m/resolve/{self.commit}/"))
        elif path.startswith("/cdn/"):
            self.bytes(http, path.removeprefix("/cdn/"))
        else:
            self.send(http, 404, b"{}", {"x-error-code": "RepoNotFound"})

    def redirect_or_send(self, http: BaseHTTPRequestHandler, name: str) -> None:
        if name.endswith((".safetensors", ".gguf")):  # large files live elsewhere
            self.send(http, 302, b"", {"location": f"/cdn/{quote(name)}"})
        else:
            self.bytes(http, name)

    def bytes(self, http: BaseHTTPRequestHandler, name: str) -> None:
        if self.broken:
            self.refuse(http, self.broken.pop(0))
            return
        data, start = self.files[name], 0
        asked = http.headers.get("range", "")
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send(http, 416, b"", {"content-range": f"bytes */{len(data)}"})
                return
        headers = {"content-range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        body = data[start:]
        if name in self.endless:
            self.more(http, body)
            return
        limit = self.cut.get(name, [])
        send = body[: limit.pop(0)] if limit else body
        self.served[name] += len(send)
        self.send(http, 206 if start else 200, send, headers, len(body))
        if len(send) < len(body):
            http.close_connection = True

    def refuse(self, http, answer) -> None:
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        self.send(http, status, b"{}", headers)

    def send(self, http, status: int, body: bytes, headers=None, length=None) -> None:
        http.send_response_only(status)  # without a date, unless a test sets one
        for name, value in (headers or {}).items():
            http.send_header(name, value)
        http.send_header("content-length", str(len(body) if length is None else length))
        http.end_headers()
        http.wfile.write(body)

    def more(self, http: BaseHTTPRequestHandler, body: bytes) -> None:
        http.send_response(200)
        http.send_header("transfer-encoding", "chunked")
        http.end_headers()
        http.close_connection = True
        try:
            http.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            for _ in range(400):
                http.wfile.write(b"4\r\nmore\r\n")
                self.over.wait(0.01)
            http.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.left.set()

    def listing(self):
        siblings = []
        for name, data in self.files.items():
            entry = {"rfilename": name, "size": len(data)}
            if self.stateless or name in self.unstated:
                siblings.append({"rfilename": name})
                continue
            if name.endswith((".safetensors", ".bin", ".gguf")):
                digest = self.stated.get(name) or hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 135}
            else:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entry["blobId"] = self.stated.get(name) or git
            siblings.append(entry)
        return {"id": "org/m", "sha": self.commit, "siblings": siblings}


@pytest.fixture
def remote(monkeypatch):
    pull = hub.pull
    monkeypatch.setattr(hub, "pull", lambda *given, **named: pull(*given, **{"sleep": lambda _: None} | named))
    fake = FakeHub()
    yield fake
    fake.close()


@pytest.fixture
def env(remote, tmp_path):
    return {"HF_ENDPOINT": remote.url, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


WANTED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-1-of-2.safetensors",
    "model-2-of-2.safetensors",
}


def test_pull_fetches_what_is_needed_and_nothing_else(remote, env):
    """Never pickles, never code, no second copy of the weights."""
    seen = []
    folder = hub.pull("org/m", env=env, progress=seen.append)
    assert {file.name for file in folder.iterdir()} == WANTED
    assert all((folder / name).read_bytes() == remote.files[name] for name in WANTED)
    assert not {"pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors"} & set(remote.served)
    assert hub.locate("org/m", env) == folder
    assert [(model.name, model.folder) for model in hub.downloaded(env)] == [("org/m", folder)]
    assert hub.downloaded(env)[0].bytes == sum(len(remote.files[name]) for name in WANTED)
    total = sum(len(remote.files[name]) for name in WANTED)
    assert seen[-1].done == seen[-1].total == total
    assert all(before.done <= after.done for before, after in itertools.pairwise(seen))


def test_the_cache_has_the_layout_of_the_hubs_own_tools(remote, env):
    folder = hub.pull("org/m", env=env)
    home = Path(env["HF_HOME"]) / "hub" / "models--org--m"
    assert folder == home / "snapshots" / COMMIT
    assert (home / "refs" / "main").read_text() == COMMIT
    blob = hashlib.sha256(remote.files["model-2-of-2.safetensors"]).hexdigest()
    assert (folder / "model-2-of-2.safetensors").resolve() == (home / "blobs" / blob).resolve()
    assert hub.cache_folder({"HF_HUB_CACHE": "/x"}) == Path("/x")
    assert hub.cache_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/huggingface/hub")


def test_modules_after_a_transformer_are_pulled_with_it(remote, env):
    wanted = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    other = ("2_Dense/pytorch_model.bin", "onnx/model.safetensors", "1_Pooling/code.py")
    remote.files |= {name: b"{}" + name.encode() for name in (*wanted, *other)}
    folder = hub.pull("org/m", env=env)
    assert all((folder / name).read_bytes() == remote.files[name] for name in wanted)
    assert not any((folder / name).exists() for name in other)


def test_named_chat_templates_are_pulled_with_their_model(remote, env):
    places = [f"additional_chat_templates/{name}" for name in ("tool_use.jinja", "rag-2.jinja", "code.py", "a/b.jinja")]
    remote.files |= {name: b"{{ messages }}" + name.encode() for name in places}
    folder = hub.pull("org/m", env=env)
    assert load_templates(folder) == {
        "default": "x",
        **{name: "{{ messages }}" + f"additional_chat_templates/{name}.jinja" for name in ("tool_use", "rag-2")},
    }
    assert not any((folder / name).exists() for name in places[2:])
    remote.stated[places[0]] = "0" * 40
    shutil.rmtree(env["HF_HOME"])
    with pytest.raises(ModelFileError, match=r"tool_use\.jinja of org/m has checksum"):
        hub.pull("org/m", env=env)
    remote.unstated = {places[0]}
    with pytest.raises(ModelFileError, match=r"states no checksum of additional_chat_templates/tool_use\.jinja"):
        hub.pull("org/m", env=env)


def test_a_cut_connection_goes_on_where_it_stopped(remote, env):
    name = "model-1-of-2.safetensors"
    size = len(remote.files[name])
    remote.cut[name] = [1_500_000, 700_000]
    folder = hub.pull("org/m", env=env)
    assert (folder / name).read_bytes() == remote.files[name]
    assert remote.served[name] == size
    ranges = [asked for path, asked in remote.requests if path == f"/cdn/{name}"]
    assert ranges == ["", "bytes=1500000-", "bytes=2200000-"]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_that_is_broken_for_a_while_is_asked_again(remote, env, status):
    name = "model-1-of-2.safetensors"
    remote.cut[name] = [1_500_000]
    remote.broken = [status] * 4
    assert (hub.pull("org/m", env=env) / name).read_bytes() == remote.files[name]
    assert remote.served[name] == len(remote.files[name])
    shutil.rmtree(env["HF_HOME"])
    remote.broken = [status] * 5
    with pytest.raises(ModelError, match=f": it answered {status}; run the same command again to continue$"):
        hub.pull("org/m", env=env)
    remote.broken = [418]
    with pytest.raises(ModelError, match=r"answered 418 for model\.safetensors\.index\.json of org/m"):
        hub.pull("org/m", env=env)


def test_a_pull_that_was_given_up_resumes_in_the_next_process(remote, env):
    name = "model-1-of-2.safetensors"
    remote.cut[name] = [1_000_000] + [0] * 100
    with pytest.raises(ModelError, match="run the same command again to continue"):
        hub.pull("org/m", env=env)
    with pytest.raises(ModelError, match=r"neither a folder nor downloaded; get it with: cairn pull org/m"):
        hub.locate("org/m", env)
    remote.cut.clear()
    served = remote.served[name]
    folder = hub.pull("org/m", env=env)
    assert remote.served[name] - served == len(remote.files[name]) - 1_000_000
    assert (folder / name).read_bytes() == remote.files[name]
    assert not list(folder.parent.parent.rglob("*.incomplete"))


def test_a_server_without_ranges_starts_over(remote, env):
    name = "model-1-of-2.safetensors"
    remote.cut[name] = [1_000_000]
    remote.ranges = False
    assert (hub.pull("org/m", env=env) / name).read_bytes() == remote.files[name]


@pytest.mark.parametrize("name", ["model-2-of-2.safetensors", "config.json"])
def test_a_wrong_checksum_installs_nothing(remote, env, name):
    """A partial model must never look like a model (known failure 38)."""
    remote.stated[name] = "0" * (64 if name.endswith("safetensors") else 40)
    with pytest.raises(ModelFileError, match=f"{name} of org/m has checksum .* but the hub states 0000"):
        hub.pull("org/m", env=env)
    with pytest.raises(ModelError):
        hub.locate("org/m", env)
    assert hub.downloaded(env) == []
    home = Path(env["HF_HOME"]) / "hub" / "models--org--m"
    assert not (home / "snapshots").exists() and not (home / "refs").exists()
    assert not [blob for blob in (home / "blobs").iterdir() if blob.name.startswith("0000")]


def test_a_damaged_part_is_not_trusted(remote, env):
    name = "model-1-of-2.safetensors"
    remote.cut[name] = [1_000_000] + [0] * 100
    with pytest.raises(ModelError):
        hub.pull("org/m", env=env)
    (part,) = Path(env["HF_HOME"]).rglob("*.incomplete")
    data = bytearray(part.read_bytes())
    data[17] ^= 1
    part.write_bytes(data)
    remote.cut.clear()
    with pytest.raises(ModelFileError, match="what was downloaded is removed"):
        hub.pull("org/m", env=env)
    assert (hub.pull("org/m", env=env) / name).read_bytes() == remote.files[name]


def test_pull_again_verifies_and_repairs(remote, env):
    folder = hub.pull("org/m", env=env)
    name = "model-1-of-2.safetensors"
    served = Counter(remote.served)
    assert hub.pull("org/m", env=env) == folder
    assert remote.served == served  # nothing was fetched twice
    blob = (folder / name).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    hub.pull("org/m", env=env)
    assert (folder / name).read_bytes() == remote.files[name]


def test_a_new_commit_keeps_unchanged_files(remote, env):
    old = hub.pull("org/m", env=env)
    served = remote.served["model-1-of-2.safetensors"]
    remote.commit = "b" * 40
    remote.files["config.json"] = b'{"model_type": "qwen3"}'
    new = hub.pull("org/m", env=env)
    assert new != old and hub.locate("org/m", env) == new
    assert (new / "config.json").read_bytes() == remote.files["config.json"]
    assert remote.served["model-1-of-2.safetensors"] == served


def test_a_crash_during_assembly_leaves_the_old_model(remote, env, monkeypatch):
    """A new commit counts only once all of it is there (known failure 38)."""
    old = hub.pull("org/m", env=env)
    remote.commit = "b" * 40
    link = install._link
    linked = []

    def crash(blob, name):
        if len(linked) == 3:
            raise KeyboardInterrupt
        linked.append(name)
        link(blob, name)

    monkeypatch.setattr(install, "_link", crash)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("org/m", env=env)
    assert hub.locate("org/m", env) == old
    monkeypatch.setattr(install, "_link", link)
    assert hub.pull("org/m", env=env).name == "b" * 40


def test_offline_works_from_the_cache(remote, env):
    folder = hub.pull("org/m", env=env)
    remote.close()
    asked = len(remote.requests)
    assert hub.locate("org/m", env | {"HF_HUB_OFFLINE": "1"}) == folder
    assert len(remote.requests) == asked
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        hub.pull("org/m", env=env | {"HF_HUB_OFFLINE": "1"})


def test_no_network_is_a_short_error(remote, env):
    remote.close()
    with pytest.raises(ModelError, match=r"cannot download org/m from http://127.0.0.1:\d+: "):
        hub.pull("org/m", env=env)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:1"),
        ("SSL_CERT_FILE", "/there/is/none.pem"),
    ],
)
def test_an_unusable_environment_variable_is_a_short_error(remote, env, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match="the proxy or the certificates that the environment names cannot be used"):
        hub.pull("org/m", env=env)


def test_a_name_that_is_not_found_asks_whether_this_machine_is_online(env):
    with pytest.raises(ModelError, match="its address was not found; is this machine online"):
        hub.pull("org/m", env=env | {"HF_ENDPOINT": "http://no-such-host.invalid"})


@pytest.mark.parametrize("address", ["http://host:abc", "http://..x"])
def test_an_invalid_endpoint_is_a_short_error(env, address):
    with pytest.raises(ModelError, match="cannot download org/m from"):
        hub.pull("org/m", env=env | {"HF_ENDPOINT": address})


def test_a_damaged_file_stays_until_there_is_a_better_one(remote, env):
    """A failed pull leaves the model as it was."""
    folder = hub.pull("org/m", env=env)
    blob = (folder / "model-1-of-2.safetensors").resolve()
    damaged = bytes(len(blob.read_bytes()))
    blob.write_bytes(damaged)
    remote.cut["model-1-of-2.safetensors"] = [0] * 5
    with pytest.raises(ModelError, match="run the same command again"):
        hub.pull("org/m", env=env)
    assert blob.read_bytes() == damaged
    assert (hub.pull("org/m", env=env) / "model-1-of-2.safetensors").read_bytes() != damaged


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "does not exist on .* or is private: check the name, or set HF_TOKEN"),
        (401, "GatedRepo", "is gated on .*accept its terms there, then set HF_TOKEN"),
        (403, "GatedRepo", "is gated on"),
        (403, "", r"127.0.0.1:\d+ refuses org/m \(403 Forbidden\); a firewall or a proxy may be in between$"),
        (404, "RepoNotFound", "there is no org/m on"),
        (429, "", "asks to wait"),
        (500, "", "answered 500 for org/m"),
    ],
)
def test_a_refusal_by_the_hub_is_a_short_error(remote, env, status, code, words):
    remote.status = (status, code)
    with pytest.raises(ModelError, match=words):
        hub.pull("org/m", env=env)


@pytest.mark.parametrize("token", ["", "secret"])
def test_one_file_that_is_refused_does_not_make_a_model_gated(remote, env, token):
    remote.broken = [403]
    with pytest.raises(
        ModelError, match=r"refuses model\.safetensors\.index\.json of org/m \(403 Forbidden\)"
    ) as caught:
        hub.pull("org/m", env=env | {"HF_TOKEN": token})
    assert "gated" not in str(caught.value) and ("HF_TOKEN" in str(caught.value)) == bool(token)


class Waiting:
    """Clock and pauses of a pull: the seconds it waited, and the messages before."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.said: list[str] = []

    def now(self) -> float:
        return 0.0

    def time_ns(self) -> int:
        return 784_111_777 * 10**9  # Sun, 06 Nov 1994 08:49:37 GMT

    def pull(self, model, env):
        return hub.pull(model, env=env, clock=self, sleep=self.slept.append, say=self.said.append)


AFTER = {"retry-after": "Sun, 06 Nov 1994 08:50:37 GMT"}


@pytest.mark.parametrize("place", ["busy", "broken"])
@pytest.mark.parametrize(
    ("answers", "slept"),
    [
        ([(429, {"retry-after": "7"})], [7]),
        ([(503, {"retry-after": "120"})] * 3, [120] * 3),
        ([(429, AFTER)], [60]),
        ([(429, AFTER | {"date": "Sun, 06 Nov 1994 08:50:07 GMT"})], [30]),
        ([(429, {"retry-after": "Sun, 06 Nov 1994 08:49:30 GMT"})], [1]),
        ([(429, {"ratelimit": '"api";r=0;t=55'})], [55]),
        ([429, 429, (429, {"retry-after": "soon"})], [5, 10, 20]),
    ],
)
def test_a_hub_that_asks_to_wait_is_waited_for_and_reported(remote, env, place, answers, slept):
    """For the listing as for a file: as many seconds as it names, or a default."""
    getattr(remote, place).extend(answers)
    waiting = Waiting()
    assert waiting.pull("org/m", env).is_dir()
    assert waiting.slept == slept
    host = remote.url.removeprefix("http://")
    assert [one.partition(" (")[0] for one in waiting.said] == [f"{host} asks to wait {one} s" for one in slept]


def test_nobody_is_kept_waiting_for_hours(remote, env):
    waiting = Waiting()
    remote.busy = [(429, {"retry-after": "3600"})]
    with pytest.raises(ModelError, match=r"asks to wait 3,600 s \(429 Too Many Requests\); run the same command again"):
        waiting.pull("org/m", env)
    remote.busy = [(503, {"retry-after": "500"})] * 4
    with pytest.raises(ModelError, match=r"asks to wait 500 s \(503 Service Unavailable\); run the same"):
        waiting.pull("org/m", env)
    assert waiting.slept == [500] * 3
    remote.busy = [429] * 5
    with pytest.raises(ModelError, match=r"asks to wait \(429\); try again later"):
        Waiting().pull("org/m", env)


def test_a_listing_that_breaks_for_a_moment_is_asked_for_again(remote, env):
    remote.busy = [502, 503, 500, 504]
    assert hub.pull("org/m", env=env).is_dir()


def test_a_part_beyond_what_the_server_has_is_fetched_from_the_start(remote, env):
    """It was longer once, or the part belongs to another file: status 416 must not end the pull."""
    name = "model-2-of-2.safetensors"
    blobs = Path(env["HF_HOME"]) / "hub" / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    size = len(remote.files[name])
    digest = hashlib.sha256(remote.files[name]).hexdigest()
    (blobs / f"{digest}.incomplete").write_bytes(b"x" * (size - 1))
    send = remote.send

    def short(http, status, body, headers=None, length=None):
        if http.headers.get("range") and status == 206:
            status, body, headers, length = 416, b"", {"content-range": f"bytes */{size}"}, None
        send(http, status, body, headers, length)

    remote.send = short
    assert (hub.pull("org/m", env=env) / name).read_bytes() == remote.files[name]


@pytest.mark.parametrize("model", ["org/m", "org/m:Q8_0"])
def test_a_mirror_without_checksums_is_named(remote, env, model):
    """The message must not blame a missing config.json."""
    remote.files |= GGUFS
    remote.stateless = True
    with pytest.raises(ModelFileError, match=rf"{remote.url} states no checksum of .* of org/m, and Cairn keeps no"):
        hub.pull(model, env=env)
    assert not remote.served


def test_a_token_opens_a_gated_model_and_stays_at_home(remote, env):
    remote.token = "secret"
    with pytest.raises(ModelError, match="gated"):
        hub.pull("org/m", env=env)
    hub.pull("org/m", env=env | {"HF_TOKEN": "secret"})
    shutil.rmtree(Path(env["HF_HOME"]) / "hub")
    (Path(env["HF_HOME"]) / "token").write_text("secret\n")
    hub.pull("org/m", env=env)


def test_an_error_with_a_token_says_that_the_token_may_be_wrong(remote, env):
    """The hub answers an expired token with 401 even where none is needed."""
    places = f"HF_TOKEN, or {env['HF_HOME']}/token"
    with_token = env | {"HF_TOKEN": "old"}
    remote.status = (401, "")
    with pytest.raises(ModelError) as caught:
        hub.pull("org/m", env=with_token)
    assert f"or the token ({places}) is not valid or has no access: check the name, renew or remove" in str(
        caught.value
    )
    for remote.status in ((401, "GatedRepo"), (403, "GatedRepo")):
        with pytest.raises(ModelError, match=r"is gated on .*: accept its terms there") as caught:
            hub.pull("org/m", env=with_token)
        assert f"the token ({places}) is not valid or has no access" in str(caught.value)
        assert "set HF_TOKEN" not in str(caught.value)


def test_a_full_disk_is_found_before_the_download(remote, env, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"org/m needs 0\.00 GB more, but .* has only 0\.00 GB free"):
        hub.pull("org/m", env=env)
    assert "model-1-of-2.safetensors" not in remote.served


def test_a_disk_that_fills_during_a_pull_is_a_short_error(remote, env, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.Hub, "_fill", full)
    with pytest.raises(ModelError, match=r"cannot be written to .*: No space left on device"):
        hub.pull("org/m", env=env)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (["config.json"], "has no config.json on the hub"),
        (["tokenizer.json"], "has no tokenizer.json on the hub"),
        (["model.safetensors.index.json"], r"has no model.safetensors on the hub, only pickles \(.bin\)"),
        (["model-2-of-2.safetensors"], "names model-2-of-2.safetensors, which the hub does not have"),
    ],
)
def test_models_that_cannot_be_served_are_refused(remote, env, drop, words):
    for name in drop:
        del remote.files[name]
    with pytest.raises(ModelFileError, match=words):
        hub.pull("org/m", env=env)
    assert hub.downloaded(env) == []


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", 7, "x.bin"])
def test_an_index_cannot_name_other_places(remote, env, name):
    remote.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"x": name}}).encode()
    with pytest.raises(ModelFileError, match="is not an index of safetensors files"):
        hub.pull("org/m", env=env)


def test_an_invalid_listing_is_a_short_error(remote, env):
    for commit in ("../..", "main"):
        remote.commit = commit
        with pytest.raises(ModelError, match="does not answer as a model hub does"):
            hub.pull("org/m", env=env)


def test_an_endlessly_nested_listing_is_a_short_error(remote, env, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda _: "[" * 200_000)
    with pytest.raises(ModelError, match="does not answer as a model hub does"):
        hub.pull("org/m", env=env)


@pytest.mark.parametrize("index", [b"[" * 200_000, b'{"weight_map": ' + b'{"a":' * 100_000, b"\xff", b"{}"])
def test_a_broken_index_in_the_cache_is_no_model_and_hides_none(remote, env, index):
    folder = hub.pull("org/m", env=env)
    other = folder.parent.parent.parent / "models--org--deep"
    (other / "snapshots" / "abc").mkdir(parents=True)
    (other / "refs").mkdir()
    (other / "refs" / "main").write_text("abc")
    (other / "snapshots" / "abc" / "model.safetensors.index.json").write_bytes(index)
    assert [model.name for model in hub.downloaded(env)] == ["org/m"]
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        hub.locate("org/deep", env)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index)
    remote.files |= GGUFS
    path = hub.pull("org/m:Q8_0", env=env)
    assert hub.locate("org/m:Q8_0", env) == path and path.read_bytes() == GGUFS["m-Q8_0.gguf"]


@pytest.mark.parametrize(("commit", "error"), [("abc", ModelFileError), ("a" * 256, ModelError)])
def test_a_name_that_no_file_can_have_hides_no_model(remote, env, commit, error):
    """The system reports an error (ENAMETOOLONG) for such a name, rather than a missing file."""
    folder = hub.pull("org/m", env=env)
    other = folder.parent.parent.parent / "models--org--long"
    snapshot = other / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (other / "refs").mkdir()
    (other / "refs" / "main").write_text(commit)
    for name in snapshots.NEEDED:
        (snapshot / name).write_text("{}")
    index = {"weight_map": {"w": "x" * 244 + ".safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [model.name for model in hub.downloaded(env)] == ["org/m"]
    with pytest.raises(error):
        hub.locate("org/long", env)


def test_an_index_beyond_every_models_is_not_read(remote, env, monkeypatch):
    folder = hub.pull("org/m", env=env)
    monkeypatch.setattr(files, "MAX_JSON_BYTES", len(INDEX) - 1)
    with pytest.raises(ModelFileError, match="larger than"):
        snapshots.index_shards(folder / "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_json_file_beyond_every_models_is_not_fetched(remote, env, monkeypatch, name):
    monkeypatch.setattr(install, "MAX_JSON_BYTES", 2 << 20)
    remote.files[name] = bytes((2 << 20) + 1)
    with pytest.raises(ModelFileError, match=f"^{name} of org/m: larger than 2 MiB, the limit for a JSON file"):
        hub.pull("org/m", env=env)
    assert not remote.served


@pytest.mark.parametrize("size", [pytest.param(10**400, id="huge"), 1 << 62, -1, True, 1.0, "1", None])
def test_a_size_that_no_file_has_leaves_the_file_out(remote, env, monkeypatch, size):
    listing = remote.listing()
    for entry in listing["siblings"]:
        if entry["rfilename"] == "model-1-of-2.safetensors":
            entry["lfs"]["size"] = size
    monkeypatch.setattr(remote, "listing", lambda: listing)
    with pytest.raises(ModelFileError, match=r"names model-1-of-2\.safetensors, which the hub does not have"):
        hub.pull("org/m", env=env)


def test_a_server_that_goes_on_after_the_end_is_left(remote, env):
    """A pull would wait for it for ever."""
    remote.endless.add("model-2-of-2.safetensors")
    folder = hub.pull("org/m", env=env)
    assert (folder / "model-2-of-2.safetensors").read_bytes() == b"second" * 1000
    assert remote.left.wait(10), "the server was listened to until it ended"


def test_one_pull_at_a_time(remote, env):
    home = Path(env["HF_HOME"]) / "hub" / "models--org--m"
    home.mkdir(parents=True)
    with install.locked(home, "org/m"), pytest.raises(ModelError, match="being downloaded by another process"):
        hub.pull("org/m", env=env)
    hub.pull("org/m", env=env)


@pytest.mark.parametrize("code", sorted({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EIO}))
def test_a_file_system_without_locks_takes_a_pull_too(remote, env, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(install.fcntl, "flock", refuse)
    if code == errno.EIO:  # locks do not matter here
        with pytest.raises(ModelError, match="cannot be written to"):
            hub.pull("org/m", env=env)
    else:
        assert {file.name for file in hub.pull("org/m", env=env).iterdir()} == WANTED


@pytest.mark.parametrize("hard", [True, False])
def test_a_file_system_without_links_takes_a_pull_too(remote, env, monkeypatch, hard):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    if not hard:
        monkeypatch.setattr(install.os, "link", refuse)
    for _ in range(2):
        folder = hub.pull("org/m", env=env)
        assert {file.name for file in folder.iterdir()} == WANTED and hub.locate("org/m", env) == folder
        assert all((folder / name).read_bytes() == remote.files[name] for name in WANTED)
        assert all((folder / name).stat().st_nlink == 1 + hard for name in WANTED)
    assert all(remote.served[name] == len(remote.files[name]) for name in WANTED), "nothing is downloaded twice"


def test_a_copy_that_does_not_fit_leaves_no_half(remote, env, monkeypatch):
    def half(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(install.os, "link", refuse)
    monkeypatch.setattr(install.shutil, "copyfile", half)
    with pytest.raises(ModelError, match=r"cannot be written to .*No space left"):
        hub.pull("org/m", env=env)
    (folder,) = Path(env["HF_HOME"]).rglob(COMMIT)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("model", ["x" * 300, "org/" + "x" * 250, "org/" + "x" * 250 + ":Q4_K_M", "secret"])
def test_an_inaccessible_place_is_a_short_error(env, monkeypatch, model):
    hub.cache_folder(env).mkdir(parents=True)
    is_dir = Path.is_dir

    def closed(path):
        if path.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", closed)
    with pytest.raises(ModelError, match=f"^{model}: cannot be searched for "):
        hub.locate(model, env)


@pytest.mark.parametrize("name", ["tokenizer.json", "m-Q4_K_M.gguf", "notes"])
def test_a_snapshot_that_cannot_be_read_hides_no_model(remote, env, name):
    folder = hub.pull("org/m", env=env)
    other = folder.parent.parent.parent / "models--org--a"
    shutil.copytree(folder.parent.parent, other, symlinks=True)
    place = other / "snapshots" / COMMIT / name
    place.unlink(missing_ok=True)
    place.symlink_to("x" * 300)  # ENAMETOOLONG, for root too
    assert [model.name for model in hub.downloaded(env)] == ["org/m"]


@pytest.mark.parametrize("kind", ["folder", "link", "file", "cache"])
def test_a_name_that_is_not_utf_8_is_a_short_error(remote, env, tmp_path, kind):
    """Names go to the worker, to callers and into metrics as UTF-8."""
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le"))
    latin.mkdir()
    model = str(latin)
    if kind == "link":
        model = str(tmp_path / "link")
        Path(model).symlink_to(latin)
    elif kind == "file":
        model = str(latin / "m.gguf")
        Path(model).write_bytes(b"")
    elif kind == "cache":
        model, env = "org/m", env | {"HF_HOME": str(latin)}
        hub.pull(model, env=env)
    with pytest.raises(ModelError, match=r"^the name of the model .*mod\ufffdle.* is not UTF-8; rename the"):
        hub.locate(model, env)


def test_an_incomplete_snapshot_names_the_missing_file(remote, env):
    folder = hub.pull("org/m", env=env)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete \(model-2-of-2.safetensors is missing\); run: cairn pull org/m"):
        hub.locate("org/m", env)
    assert hub.downloaded(env) == []


def test_a_model_of_another_kind_in_the_cache_is_not_listed(remote, env):
    folder = hub.pull("org/m", env=env)
    other = folder.parent.parent.parent / "models--org--image"
    (other / "snapshots" / "abc" / "unet").mkdir(parents=True)
    (other / "refs").mkdir()
    (other / "refs" / "main").write_text("abc")
    index = {"weight_map": {"w": "unet/model-00001.safetensors"}}
    (other / "snapshots" / "abc" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [model.name for model in hub.downloaded(env)] == ["org/m"]


@pytest.mark.parametrize("token", ["hf_s\u00e9cret", "hf_se cret", "hf_\x7fsecret"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(remote, env, token):
    with pytest.raises(ModelError, match="characters that a token cannot have") as caught:
        hub.pull("org/m", env=env | {"HF_TOKEN": token})
    assert "cret" not in str(caught.value)


def test_a_token_may_end_in_a_line_break(remote, env):
    hub.pull("org/m", env=env | {"HF_TOKEN": "hf_token\n"})


def test_a_downloaded_model_is_called_by_its_hub_id(remote, env, tmp_path):
    assert hub.model_name(hub.pull("org/m", env=env)) == "org/m"
    assert hub.model_name(tmp_path / "mine") == "mine"
    assert hub.model_name(hub.demo_folder()) == "demo"


def test_names_of_models(tmp_path, monkeypatch):
    env = {"HF_HOME": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    assert hub.locate("demo", env) == Path(hub.__file__).parent.parent.parent / "demo"
    (tmp_path / "here").mkdir()
    assert hub.locate(str(tmp_path / "here"), env) == tmp_path / "here"
    (tmp_path / "m.gguf").touch()
    assert hub.locate("m.gguf", env) == Path("m.gguf")
    (tmp_path / "m.bin").touch()
    with pytest.raises(ModelError, match=r"m.bin is a file; a model is a \.gguf file, or a folder"):
        hub.locate("m.bin", env)
    with pytest.raises(ModelError, match=r"there is no file away\.gguf"):
        hub.locate("away.gguf", env)
    with pytest.raises(ModelError, match="there is no folder nowhere; a model is a folder, a GGUF file, a hub id"):
        hub.locate("nowhere", env)
    for wrong in ("nowhere", "a/b/c", "../x", "org/..", "/abs/path", "org/m?x", ""):
        with pytest.raises(ModelError):
            hub.pull(wrong, env=env)


def cairn(env, *arguments):
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", "HF_"))}
    command = [sys.executable, "-c", "from cairn.cli import main; main()", *arguments]
    return subprocess.run(command, env=outside | env, capture_output=True, text=True, timeout=60, check=False)


def test_cairn_pull_prints_the_folder_and_models_lists_it(remote, env):
    done = cairn(env, "pull", "org/m")
    folder = str(hub.locate("org/m", env))
    assert (done.returncode, done.stdout, done.stderr) == (0, folder + "\n", "")
    assert f"org/m\t3.1 MB\t{folder}" in cairn(env, "models").stdout.splitlines()
    remote.stated["config.json"] = "0" * 40
    done = cairn(env, "pull", "org/m")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cairn: config.json of org/m has checksum") and done.stderr.count("\n") == 1


# -- GGUF -------------------------------------------------------------------------------------------------------------

GGUFS = {
    "m-Q4_K_M.gguf": b"four" * 300_000,
    "m-Q8_0.gguf": b"eight" * 1000,
    "F16/m-F16-00001-of-00002.gguf": b"first" * 1000,
    "F16/m-F16-00002-of-00002.gguf": b"last" * 300_000,
    "mmproj-m-f32.gguf": b"eyes",
    "imatrix.gguf": b"matrix",
}


@pytest.fixture
def ggufs(remote):
    """Return a repository with GGUF files only, as most have."""
    remote.files = {"README.md": b"# m", "config.json": b"{}"} | GGUFS
    return remote


def test_a_quantisation_is_pulled_alone_and_found_again(ggufs, env):
    seen = []
    path = hub.pull("org/m:q4_k_m", env=env, progress=seen.append)
    assert path.read_bytes() == GGUFS["m-Q4_K_M.gguf"] and path.name == "m-Q4_K_M.gguf"
    assert set(ggufs.served) == {"m-Q4_K_M.gguf"}
    assert seen[-1].done == seen[-1].total == len(GGUFS["m-Q4_K_M.gguf"])
    for name in ("org/m:Q4_K_M", "org/m:m-Q4_K_M", hub.model_name(path)):
        assert hub.locate(name, env | {"HF_HUB_OFFLINE": "1"}) == path
    models = hub.downloaded(env)
    assert [(model.name, model.folder, model.bytes) for model in models] == [("org/m:m-Q4_K_M", path, 1_200_000)]


def test_models_that_only_their_folders_tell_apart_stay_beside_each_other(remote, env):
    remote.files = {"Q4_0/model.gguf": b"four" * 100, "Q8_0/model.gguf": b"eight" * 100}
    four, eight = (hub.pull(f"org/m:{tag}", env=env) for tag in ("Q4_0", "Q8_0"))
    assert [hub.locate(f"org/m:{tag}", env) for tag in ("Q4_0", "Q8_0")] == [four, eight]
    with pytest.raises(ModelError, match=r"org/m:model may be one of Q4_0, Q8_0; put its type after the colon"):
        hub.locate("org/m:model", env)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("My Model + Q4_K_M.gguf", "Q4_K_M"),
        ("Modèle é+ (v2).gguf", "modèle e\u0301+ (V2)"),
        ("M-Q8_0.GGUF", "M-Q8_0.GGUF"),
        ("all/Q6_K/m #1 100%?.gguf", "q6_k"),
        ("M-Q6_K-00001-of-00001.GGUF", "Q6_K"),
    ],
)
def test_names_of_any_writing_are_found_and_found_again(remote, env, name, tag):
    remote.files = {
        name: b"weights" * 1000,
        "other-Q2_K.gguf": b"x",
        "imatrix.gguf": b"y",
        "b/imatrix-unsloth.gguf": b"z",
    }
    path = hub.pull(f"org/m:{tag}", env=env)
    assert path.read_bytes() == b"weights" * 1000 and path.as_posix().endswith("/" + name)
    called = hub.model_name(path)
    assert called.startswith("org/m:") and hub.locate(called, env) == path == hub.locate(f"org/m:{tag}", env)
    assert [model.name for model in hub.downloaded(env)] == [called]


def test_models_that_only_a_folder_tells_apart_can_be_asked_for(remote, env):
    remote.files = {"one/model.gguf": b"1" * 100, "two/model.gguf": b"2" * 100}
    with pytest.raises(ModelError, match="org/m:model may be one of one/model, two/model; put its name after the"):
        hub.pull("org/m:model", env=env)
    one, two = (hub.pull(f"org/m:{name}/model", env=env) for name in ("one", "two"))
    assert [hub.locate(f"org/m:{name}/model.gguf", env) for name in ("one", "two")] == [one, two]


def test_a_quantisation_that_moved_to_a_folder_is_the_last_one_pulled(remote, env):
    for folder, commit in (("old/", "0" * 40), ("new/", "1" * 40), ("", "2" * 40)):
        remote.commit, remote.files = commit, {f"{folder}m-Q4_0.gguf": commit.encode()}
        path = hub.pull("org/m:Q4_0", env=env)
        os.utime(path, ns=(0, int(commit[0])), follow_symlinks=False)
    assert hub.locate("org/m:Q4_0", env) == path
    assert hub.locate("org/m:new/m-Q4_0", env).read_bytes() == b"1" * 40


def test_the_parts_of_a_split_model_come_together_in_their_folder(ggufs, env):
    path = hub.pull("org/m:F16", env=env)
    assert path.parent.name == "F16" and path.name == "m-F16-00001-of-00002.gguf"
    assert [shard.read_bytes() for shard in shards(path)] == [GGUFS[f"F16/{shard.name}"] for shard in shards(path)]
    assert set(ggufs.served) == {name for name in GGUFS if name.startswith("F16/")}
    assert hub.locate("org/m:f16", env) == path and hub.model_name(path) == "org/m:m-F16"
    assert hub.downloaded(env)[0].bytes == 1_205_000
    shards(path)[1].unlink()
    with pytest.raises(ModelError, match=r"F16 of org/m is not among the downloads, .*; get it with: cairn pull"):
        hub.locate("org/m:F16", env)
    assert hub.downloaded(env) == []


def test_a_gguf_that_was_cut_is_resumed_and_a_wrong_one_refused(ggufs, env):
    """A partial model must never look like a model (known failure 38)."""
    name = "F16/m-F16-00002-of-00002.gguf"
    ggufs.cut[name] = [1_000_000] + [0] * 100
    with pytest.raises(ModelError, match="run the same command again to continue"):
        hub.pull("org/m:F16", env=env)
    with pytest.raises(ModelError, match="no GGUF file at all"):
        hub.locate("org/m:F16", env)
    ggufs.cut.clear()
    hub.pull("org/m:F16", env=env)
    assert ggufs.served[name] == len(GGUFS[name])
    ggufs.stated["m-Q8_0.gguf"] = "0" * 64
    with pytest.raises(ModelFileError, match=r"m-Q8_0.gguf of org/m has checksum .* but the hub states 0000"):
        hub.pull("org/m:Q8_0", env=env)
    with pytest.raises(ModelError, match="not among the downloads, only F16;"):
        hub.locate("org/m:Q8_0", env)


def test_a_quantisation_that_is_not_there_lists_those_that_are(ggufs, env):
    with pytest.raises(ModelError, match=r"Q2_K of org/m is not on the hub, only F16, Q4_K_M, Q8_0$"):
        hub.pull("org/m:Q2_K", env=env)
    with pytest.raises(ModelError, match=r"org/m has only GGUF on the hub: add one of F16, .*, as in org/m:F16$"):
        hub.pull("org/m", env=env)
    del ggufs.files["F16/m-F16-00002-of-00002.gguf"]
    with pytest.raises(ModelFileError, match=r"F16/m-F16-00002-of-00002.gguf, a part of org/m:F16, is not on the hub"):
        hub.pull("org/m:F16", env=env)
    ggufs.files["other-Q8_0.gguf"] = b"other"
    with pytest.raises(ModelError, match="org/m:Q8_0 may be one of m-Q8_0, other-Q8_0; put its name after the colon"):
        hub.pull("org/m:Q8_0", env=env)
    assert hub.pull("org/m:other-Q8_0", env=env).read_bytes() == b"other"
    with pytest.raises(ModelError, match="org/m is downloaded only as GGUF: add one of Q8_0 after a colon"):
        hub.locate("org/m", env)
    ggufs.files = {"README.md": b"# m"}
    with pytest.raises(ModelError, match="Q8_0 of org/m is not on the hub, no GGUF file at all"):
        hub.pull("org/m:Q8_0", env=env)


def test_quantisations_of_several_commits_and_the_model_itself_live_side_by_side(remote, env):
    remote.files |= GGUFS
    folder = hub.pull("org/m", env=env)
    assert not set(remote.served) & set(GGUFS)
    old = hub.pull("org/m:Q8_0", env=env)
    assert old.parent == folder
    remote.commit, remote.files["m-Q4_K_M.gguf"] = "b" * 40, b"new"
    new = hub.pull("org/m:Q4_K_M", env=env)
    assert new.parent.name == "b" * 40
    assert hub.locate("org/m", env) == folder
    assert hub.locate("org/m:Q8_0", env) == old and hub.locate("org/m:Q4_K_M", env) == new
    again = hub.pull("org/m:Q8_0", env=env)
    assert again != old and hub.locate("org/m:Q8_0", env) == again
    assert [model.name for model in hub.downloaded(env)] == ["org/m", "org/m:m-Q4_K_M", "org/m:m-Q8_0"]
    assert hub.downloaded(env)[0].bytes == sum(len(remote.files[name]) for name in WANTED)


def test_cairn_pull_of_a_quantisation_prints_its_file(ggufs, env):
    done = cairn(env, "pull", "org/m:Q8_0")
    path = str(hub.locate("org/m:Q8_0", env))
    assert (done.returncode, done.stdout, done.stderr) == (0, path + "\n", "")
    assert f"org/m:m-Q8_0\t5.0 kB\t{path}" in cairn(env, "models").stdout.splitlines()
    done = cairn(env, "pull", "org/m:Q3_K")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
