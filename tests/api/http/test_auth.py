"""Authentication: closed by default, one layer over every route."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from typing import Any

import pytest

from cairn.api.app import App, build_app
from cairn.api.http.auth import Access, Origins, _same_address, check_exposure, has_tenants
from cairn.api.http.call import BodyBudget, HTTPCall
from cairn.api.server import serve
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.types.errors import ConfigError
from tests.api.scripted import ScriptedService
from tests.api.sockets import Site, site

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
ONE = Config(api_key=(Secret("alpha"),), admin_key=Secret("root"))
TWO = Config(api_key=(Secret("alpha"), Secret("beta")))


async def call(at: Site, path: str, method: str = "GET", body: Any = None, **headers: str) -> Any:
    async with at.http() as http:
        return await http.request(method, path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def preflight(at: Site, origin: str, **headers: str) -> Any:
    headers |= {"origin": origin, "access_control_request_method": "POST"}
    return await call(at, "/v1/chat/completions", "OPTIONS", **headers)


def every_route(app: App) -> list[tuple[str, str]]:
    """Return each path and method in the application's own table of routes."""
    ids = {"{id:resp_}": "resp_0", "{id:conv_}": "conv_0", "{id:*}": "x"}
    routes = [route for route in app.router.routes if route.access != "open" and not route.always]
    return [(one.method, re.sub(r"{[^}]*}", lambda id: ids.get(id[0], "0" * 16), one.path)) for one in routes]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"x_api_key": "alphA"},
        {"authorization": "Basic alpha"},
        {"authorization": "alpha"},
    ],
)
async def test_every_route_needs_a_key(headers: dict[str, str]) -> None:
    """Known failure 45: no route is open because somebody forgot it."""
    async with site(ScriptedService(), ONE) as at:
        routes = [
            *every_route(at.app),
            ("GET", "/version"),
            ("GET", "/openapi.json"),
            ("POST", "/chat/completions"),
            ("GET", "/models/x"),
            ("DELETE", "/v1/models"),
        ]
        assert len(routes) > 10
        for method, path in routes:
            response = await call(at, path, method, **headers)
            assert response.status_code == 401, (method, path)
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert "key" in error, "the path's shape"
            else:
                assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
            assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]


async def test_only_health_and_the_files_of_the_page_are_open() -> None:
    probes = {"/health/live", "/health/ready", "/health/startup", "/health/role", "/livez", "/readyz"}
    async with site(ScriptedService(), ONE) as at:
        free = {route.path for route in at.app.router.routes if route.access == "open"}
        assert {"/", "/docs", "/v1/health", "/health"} | probes == {path for path in free if path[:5] != "/web/"}
        for path in free:
            assert (await call(at, path)).status_code == 200


async def test_an_unknown_route_is_a_404_without_a_key_and_lists_no_routes() -> None:
    """A wrong base URL must not look like a wrong key. Whether an object exists is told only to callers with a key."""
    async with site(ScriptedService(), ONE) as at:
        for path in ("/v1", "/nowhere", "//health/live", "/v1/v1/models", "/v1/cache/nothing", "/v1/requests/1/2"):
            assert (await call(at, path)).status_code == 404, path
        for path in ("/v1/models/scripted", "/v1/models/other", "/v1/requests/0000000000000001", "/v1/agents/one"):
            assert (await call(at, path)).status_code == 401, path


async def test_bearer_and_x_api_key() -> None:
    async with site(ScriptedService(), ONE) as at:
        assert (await call(at, "/v1/models", authorization="Bearer alpha")).status_code == 200
        assert (await call(at, "/v1/models", authorization="bearer  alpha")).status_code == 200
        assert (await call(at, "/v1/models", x_api_key="alpha")).status_code == 200
        assert (await call(at, "/v1/models", api_key="alpha")).status_code == 200, "as Azure's clients send it"
        assert (await call(at, "/v1/models", api_key="beta")).status_code == 401
        assert (await call(at, "/v1/chat/completions", "POST", CHAT, x_api_key="alpha")).status_code == 200


async def test_admin_routes_need_their_own_key() -> None:
    async with site(ScriptedService(), ONE) as at:
        assert (await call(at, "/metrics", authorization="Bearer alpha")).status_code == 401
        assert (await call(at, "/metrics", authorization="Bearer root")).status_code == 200
        assert (await call(at, "/v1/models", authorization="Bearer root")).status_code == 401
    async with site(ScriptedService(), TWO) as at:
        assert (await call(at, "/metrics", authorization="Bearer alpha")).status_code == 403
    async with site(ScriptedService(), Config()) as at:
        assert (await call(at, "/metrics")).status_code == 200


async def test_one_key_is_the_default_tenant_and_several_never_share() -> None:
    """Known failure 40, at the front: each key has its own salt."""
    salts = {}
    for config, key in ((ONE, "alpha"), (TWO, "alpha"), (TWO, "beta")):
        service = ScriptedService()
        async with site(service, config) as at:
            for _ in range(2):
                response = await call(at, "/v1/chat/completions", "POST", CHAT, authorization=f"Bearer {key}")
                assert response.status_code == 200
        assert len({stream.request.salt for stream in service.streams}) == 1
        salts[len(config.api_key), key] = (service.streams[0].request.salt, service.prompts[0][2])
    assert salts[1, "alpha"] == (b"", "default")
    (first, first_name), (second, second_name) = salts[2, "alpha"], salts[2, "beta"]
    assert len(first) == 32 and first != second and first_name != second_name
    assert "alpha" not in first_name


async def seen(config: Config, key: str) -> tuple[bytes, str]:
    """Return the salt and tenant name of a call with this key."""
    service = ScriptedService()
    async with site(service, config) as at:
        assert (await call(at, "/v1/chat/completions", "POST", CHAT, authorization=f"Bearer {key}")).status_code == 200
    return service.streams[0].request.salt, service.prompts[0][2]


def tenants(**keys: str) -> tuple[TenantKeys, ...]:
    return tuple(TenantKeys(name, tuple(Secret(key) for key in words.split())) for name, words in keys.items())


async def test_a_named_tenant_keeps_its_salt_when_its_keys_change() -> None:
    """Known failure 40, at the front: the salt belongs to the name, whatever the keys."""
    before = Config(tenants=tenants(ada="old", bob="other"))
    after = Config(tenants=tenants(ada="new newer", bob="other"))
    salts = [await seen(before, "old"), await seen(after, "new"), await seen(after, "newer")]
    assert salts == [salts[0]] * 3 and salts[0][1] == "ada" and len(salts[0][0]) == 32
    other = await seen(after, "other")
    assert other[1] == "bob" and other[0] != salts[0][0]
    async with site(ScriptedService(), after) as at:
        assert (await call(at, "/v1/models", authorization="Bearer old")).status_code == 401
        assert (await call(at, "/v1/models")).status_code == 401


async def test_bare_keys_beside_named_tenants() -> None:
    """A single bare key is `default`, as without tenants; several bare keys share nothing with anybody."""
    named = tenants(ada="a", default="d")
    assert await seen(Config(api_key=(Secret("x"),), tenants=named), "x") == (b"", "default")
    assert await seen(Config(api_key=(Secret("x"),), tenants=named), "d") == (b"", "default")
    several = Config(api_key=(Secret("x"), Secret("y")), tenants=named)
    salts = [(await seen(several, key))[0] for key in "xyad"]
    assert len(set(salts)) == 4
    assert salts[0] == (await seen(Config(api_key=(Secret("x"), Secret("z"))), "x"))[0]


def test_a_key_has_one_tenant() -> None:
    with pytest.raises(ConfigError, match="one API key belongs to the tenants ada and bob"):
        Access(Config(tenants=tenants(ada="k", bob="j k")))
    with pytest.raises(ConfigError, match="tenants default and ada"):
        Access(Config(api_key=(Secret("k"),), tenants=tenants(ada="k")))
    Access(Config(api_key=(Secret("k"), Secret("k")), tenants=tenants(default="k")))


async def test_requests_of_another_tenant_do_not_exist() -> None:
    service = ScriptedService()
    async with site(service, TWO) as at:
        made = await call(at, "/v1/chat/completions", "POST", CHAT, authorization="Bearer alpha")
        path = "/v1/requests/" + made.json()["id"]
        assert (await call(at, path, authorization="Bearer alpha")).status_code == 200
        other = await call(at, path, authorization="Bearer beta")
        never = await call(at, "/v1/requests/00000000000000ff", authorization="Bearer beta")
        assert other.status_code == never.status_code == 404
        assert other.json()["error"]["message"] == never.json()["error"]["message"]
        assert (await call(at, path + "/cancel", "POST", authorization="Bearer beta")).status_code == 404


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:80", "LOCALHOST", "127.8.8.8"),
        *("app.localhost:3000", "a.b.localhost", "host.docker.internal:8000", "Host.Docker.Internal"),
        *("10.0.0.7:8000", "172.16.0.1", "172.31.255.255", "192.168.1.20:80", "169.254.1.1"),
        *("[fd00::5]:8000", "[fe80::1]", "[::ffff:192.168.1.20]"),
    ],
)
async def test_hosts_that_cannot_be_rebound(host: str) -> None:
    """These names and addresses cannot be pointed at another machine. The Origin check is the same for each."""
    async with site(ScriptedService()) as at, at.http() as http:
        assert (await call(at, "/v1/models", host=host)).status_code == 200
        for origin, status in ((f"http://{host}", 200), ("https://evil.example", 403), ("null", 403)):
            headers = {"host": host, "origin": origin, "content-type": "text/plain"}
            answer = await http.post("/api/chat", content=b"{}", headers=headers)
            assert answer.status_code == status, (origin, answer.text)
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "docker.internal",
        "host.docker.internal.evil.example",
        "notlocalhost",
        "8.8.8.8",
        "172.32.0.1:8000",
        "192.169.0.1",
        "[2001:db8::1]",
        "[::ffff:8.8.8.8]",
        "127.1",
        "2130706433",
        "10.0.0.7.evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8000",
        "",
        "a:b:c",
        "[x",
        "[localhost]",
        "[localhost]evil.com",
        "[localhost]:80",
        "[127.0.0.1]",
        "[::1].evil.com",
        "[::1]evil.com:80",
        "[::1]:80.evil.com",
        "[::1]:evil",
        "localhost:evil",
        "[[::1]]",
        "localhost:80:80",
    ],
)
async def test_another_host_is_refused(host: str) -> None:
    """DNS rebinding: a page's own host name never reaches the API, not even /health."""
    async with site(ScriptedService()) as at:
        for path in ("/v1/models", "/health/live"):
            response = await call(at, path, host=host)
            assert response.status_code == 403 and response.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/v1/models", 200),
        (b"HTTP://127.0.0.1:8000/v1/models?x=1", 200),
        (b"https://localhost/v1/models", 200),
        (b"http://localhost", 200),
        (b"http://localhost?x=1", 200),
        (b"http://evil.example/v1/models", 403),
        (b"http://evil.example:80/v1/models", 403),
        (b"http://evil.example", 403),
        (b"http://localhost@evil.example/v1/models", 403),
        (b"http://evil.example@localhost/v1/models", 403),
        (b"http://localhost.evil.example/health/live", 403),
        (b"ftp://localhost/v1/models", 400),
        (b"evil://evil.example/v1/models", 400),
        (b"http:///v1/models", 400),
        (b"*", 400),
    ],
)
async def test_a_host_in_the_request_line_is_checked_as_host_is(target: bytes, status: int) -> None:
    """RFC 9112, 3.2.2: the authority in the request line takes precedence over Host."""
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 %d " % status), said
        writer.close()


async def test_hosts_can_be_allowed() -> None:
    async with site(ScriptedService(), Config(allowed_hosts=("box.lan", "port.lan:9000", "[fd00::5]:9000"))) as at:
        for host in ("box.lan:9000", "port.lan:9000", "[fd00::5]:9000", "[fd00::5]"):
            assert (await call(at, "/v1/models", host=host)).status_code == 200
        assert (await call(at, "/v1/models", host="evil.example")).status_code == 403


def test_a_socket_for_both_kinds_has_the_address_that_the_client_used() -> None:
    assert _same_address("192.168.1.5", "::ffff:192.168.1.5") and _same_address("fd00::5", "fd00:0::5")
    assert not _same_address("192.168.1.6", "::ffff:192.168.1.5") and not _same_address("box.lan", "fd00::5")


async def test_two_host_headers_are_refused() -> None:
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_cors_is_off_and_never_reflected() -> None:
    """Known failure 45."""
    async with site(ScriptedService()) as at:
        response = await call(at, "/v1/models", origin="https://evil.example")
        assert not any(name.startswith("access-control") for name in response.headers)
        asked = await preflight(at, "https://evil.example")
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("app.example", "no scheme"),
        ("localhost:3000", "no scheme"),
        ("https://app.example/", "a path"),
        ("https://app.example/page", "a path"),
        ("https://*.app.example", "a star"),
        ("https://b\u00fccher.example", "xn--"),
        ("https://app.example:port", "can never match"),
        ("https://user@app.example", "can never match"),
        ("https://app.example?x", "can never match"),
        ("://app.example", "no scheme"),
        ("", "no scheme"),
    ],
)
def test_an_origin_that_no_page_has_is_refused(entry: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr("cairn.api.server.bind", bind)
    with pytest.raises(ConfigError, match="can never match") as caught:
        serve(Config(cors_origins=("https://app.example", entry)))
    assert wrong in str(caught.value) and caught.value.field == "cors_origins"


@pytest.mark.parametrize(
    ("entry", "pages", "others"),
    [
        (
            "http://localhost",
            ["http://localhost", "http://localhost:5173"],
            ["https://localhost", "http://localhost.x"],
        ),
        ("http://127.0.0.1", ["http://127.0.0.1:3000"], ["http://127.0.0.11", "http://localhost:3000"]),
        ("http://[::1]", ["http://[::1]:3000"], ["http://[::2]:3000"]),
        ("http://localhost:3000", ["http://localhost:3000"], ["http://localhost:3001", "http://localhost"]),
        ("HTTPS://App.Example:443", ["https://app.example"], ["https://app.example:444", "http://app.example"]),
        ("https://app.example", ["https://app.example"], ["https://app.example:8443", "https://app.example.org"]),
        ("vscode-webview://abc", ["vscode-webview://abc"], ["vscode-webview://abd", ""]),
        ("null", ["null"], ["", "http://localhost"]),
        (
            "localhost",
            [
                *("http://localhost", "http://localhost:5173", "https://localhost:8443", "http://127.0.0.1:3000"),
                *("https://127.0.0.1", "http://[::1]", "http://[::1]:3000"),
            ],
            ["http://localhost.evil.example", "http://127.0.0.2", "http://[::2]", "ftp://localhost", "null", ""],
        ),
        ("127.0.0.1", ["http://localhost:3000"], ["http://192.168.0.1"]),
        ("*", ["null", "http://anything:1"], [""]),
    ],
)
def test_origins_as_browsers_write_them(entry: str, pages: list[str], others: list[str]) -> None:
    origins = Origins(Config(cors_origins=(entry,)))
    assert origins and not Origins(Config())
    assert [page for page in (*pages, *others) if origins.allow(page)] == pages


async def test_cors_for_configured_origins_only() -> None:
    config = Config(cors_origins=("https://app.example",), api_key=(Secret("alpha"),))
    async with site(ScriptedService(), config) as at:
        asked = await preflight(at, "https://app.example")
        assert asked.status_code == 200 and asked.content == b""
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        response = await call(at, "/v1/models", origin="https://app.example", x_api_key="alpha")
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert response.headers["vary"] == "origin"
        other = await call(at, "/v1/models", origin="https://evil.example", x_api_key="alpha")
        assert "access-control-allow-origin" not in other.headers
        asked = await preflight(at, "https://evil.example")
        assert asked.status_code == 401


async def test_a_page_may_send_what_its_client_adds() -> None:
    """OpenAI's client for browsers sends a dozen headers about itself, and a preflight must allow all of them."""
    names = "authorization,content-type,x-stainless-lang,x-stainless-package-version"
    async with site(ScriptedService(), Config(cors_origins=("https://app.example",))) as at:
        for asked, allowed in ((names, names), ("x-a\tb", "")):
            response = await preflight(at, "https://app.example", access_control_request_headers=asked)
            assert response.headers["access-control-allow-headers"] == allowed


ALLOWED = {
    "access-control-allow-origin": lambda page, any: "*" if any else page,
    "access-control-allow-credentials": lambda page, any: None if any else "true",
    "access-control-allow-methods": lambda page, any: "GET, POST, PATCH, DELETE",
    "access-control-allow-headers": lambda page, any: "Authorization",
    "access-control-max-age": lambda page, any: "600",
}


@pytest.mark.parametrize("header", ALLOWED)
@pytest.mark.parametrize(
    ("entry", "page"),
    [("localhost", "http://localhost:5173"), ("https://web.example", "https://web.example"), ("*", "null")],
)
async def test_a_preflight_is_answered_as_browsers_need_it(entry: str, page: str, header: str) -> None:
    """The key travels in a header, so no page needs cookies; some pages ask with credentials all the same."""
    config = Config(cors_origins=(entry,), api_key=(Secret("alpha"),))
    async with site(ScriptedService(), config) as at:
        asked = await preflight(at, page, access_control_request_headers="Authorization")
        assert asked.status_code == 200
        assert asked.headers.get(header) == ALLOWED[header](page, entry == "*")


async def test_a_preflight_allows_every_method_of_a_route() -> None:
    """A page of another origin renames a chat with PATCH."""
    methods = {route.method for route in build_app(None, Config()).router.routes}
    assert "PATCH" in methods
    async with site(ScriptedService(), Config(cors_origins=("https://app.example",))) as at:
        response = await preflight(at, "https://app.example")
    assert methods <= set(response.headers["access-control-allow-methods"].split(", "))


async def test_a_page_cannot_post_without_a_preflight() -> None:
    """A form or a plain fetch cannot send application/json, and nothing else is parsed."""
    async with site(ScriptedService()) as at, at.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            response = await http.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
            assert response.status_code == 415
            assert response.json()["error"]["code"] == "unsupported_media_type"
        for coding in ("zstd", "br", "deflate", "gzip, gzip"):
            headers = {"content-type": "application/json", "content-encoding": coding}
            assert (await http.post("/v1/chat/completions", content=b"{}", headers=headers)).status_code == 415


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
async def test_a_body_may_be_compressed_with_gzip(coding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    long = CHAT | {"user": "x" * 100_000}
    async with site(ScriptedService()) as at, at.http() as http:
        for body in (CHAT, long):
            packed = gzip.compress(json.dumps(body).encode())
            answer = await http.post("/v1/chat/completions", content=packed, headers=headers)
            assert answer.status_code == 200, answer.text
        for packed, said in (
            (b"{}", "gzip"),
            (gzip.compress(b"{}")[:-4], "one whole gzip stream"),
            (gzip.compress(b"{}") * 2, "one whole gzip stream"),
        ):
            answer = await http.post("/v1/chat/completions", content=packed, headers=headers)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert not at.app.bodies.held


async def test_decompressed_bodies_are_bounded() -> None:
    """The decompressed size counts against the limit of bodies and the body budget."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    bomb = gzip.compress(b" " * (8 << 20))
    assert len(bomb) < 10_000
    async with site(ScriptedService(), Config(max_body_mib=1)) as at, at.http() as http:
        tracemalloc.start()
        answer = await http.post("/v1/chat/completions", content=bomb, headers=headers)
        assert answer.status_code == 413 and "1048576 bytes" in answer.json()["error"]["message"]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert not at.app.bodies.held


@pytest.mark.parametrize("path", ["/v1/models/", "/models/", "/health/", "/v1/models/scripted/", "/docs/", "/livez/"])
async def test_a_trailing_slash_is_ignored(path: str) -> None:
    async with site(ScriptedService()) as at:
        slashed, plain = await call(at, path), await call(at, path.rstrip("/"))
        assert slashed.status_code == plain.status_code == 200 and slashed.text == plain.text
        assert (await call(at, "/v1/chat/completions/", "POST", CHAT)).status_code == 200
        assert (await call(at, "/v1/models//")).status_code == 404
    async with site(ScriptedService(), ONE) as at:
        assert (await call(at, "/metrics/", x_api_key="alpha")).status_code == 401, "an admin's route stays one"


async def test_probes_by_the_names_of_kubernetes() -> None:
    async with site(None) as at:
        assert (await call(at, "/livez")).status_code == 200
        assert (await call(at, "/readyz")).status_code == 503
    async with site(ScriptedService(), ONE) as at:
        assert (await call(at, "/livez")).json() == {"status": "live"}
        assert (await call(at, "/readyz")).json()["status"] == "ready"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_another_address_needs_a_key(host: str) -> None:
    """Known failure 45: nothing listens beyond this machine without a key unless an option says so explicitly."""
    assert Config().host == "127.0.0.1"
    with pytest.raises(ConfigError, match="--unsafe-no-auth"):
        check_exposure(Config(host=host))
    check_exposure(Config(host=host, api_key=(Secret("k"),)))
    check_exposure(Config(host=host, tenants=tenants(ada="k")))
    check_exposure(Config(host=host, unsafe_no_auth=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_this_machine_needs_no_key(host: str) -> None:
    check_exposure(Config(host=host))


async def test_a_request_takes_the_share_of_its_tenant() -> None:
    service = ScriptedService()
    async with site(service, TWO) as at:
        for key in ("alpha", "beta", "alpha"):
            headers = {"x_api_key": key}
            assert (await call(at, "/v1/chat/completions", "POST", CHAT, **headers)).status_code == 200
            body = {"model": "scripted", "prompt": "hi"}
            assert (await call(at, "/v1/completions", "POST", body, **headers)).status_code == 200
    shares = [stream.request.share for stream in service.streams]
    assert shares[0] == shares[1] == shares[4] == shares[5] != shares[2] == shares[3]
    assert all(share.startswith("key-") for share in shares)


@pytest.mark.parametrize(
    ("client", "agent", "share"),
    [
        (("10.0.0.7", 5000), None, "10.0.0.7"),
        (("10.0.0.7", 5001), "x", "10.0.0.7"),
        (("::ffff:10.0.0.7", 1), None, "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1), None, "2001:db8:1:2::/64"),
        (("127.0.0.1", 1), None, "127.0.0.1"),
        (("127.0.0.1", 1), "ada", "127.0.0.1 ada"),
        (("127.0.0.1", 1), "a\x07", "127.0.0.1 a?"),
        (("::1", 1), "ada", "::1 ada"),
        (("", 0), None, ""),
        (None, None, ""),
    ],
)
def test_without_keys_each_client_has_its_own_share(
    client: tuple[str, int] | None, agent: str | None, share: str
) -> None:
    """A share by client-chosen agent name applies on this machine only: a remote client could claim any number of
    names.
    """
    headers = [] if agent is None else [(b"x-cairn-agent", agent.encode())]
    scope: Any = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers, "client": client}
    made = HTTPCall(scope, None, None, 1, BodyBudget(1, 1))  # type: ignore[arg-type]
    Access(Config()).check(made)
    assert made.share == share and made.tenant == "default"
    assert made.payer == share.removesuffix(f" {agent}".replace("\x07", "?"))


def test_clients_without_keys_share_bodies_where_others_can_reach_the_server() -> None:
    assert not has_tenants(Config())
    assert has_tenants(Config(host="0.0.0.0", unsafe_no_auth=True))
    assert not has_tenants(ONE) and has_tenants(TWO)
