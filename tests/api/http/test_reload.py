"""Reloading a running server's options, and the owner's admin listener."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cairn.api.lifetime import _reload
from cairn.cli.connection.client import connect
from cairn.config.config import Config
from cairn.config.resolve import Resolved, resolve
from cairn.config.values import ModelOptions, Secret, TenantKeys, TenantLimits
from cairn.types.errors import ConfigError, InvalidRequest
from tests.api.homes import home
from tests.api.process import free_port, served
from tests.api.sockets import site
from tests.service.several import make_models, several
from tests.service.tiny import make_model, serving

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ADMIN = {"authorization": "Bearer the-owners"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reload") / "tiny")


def tenant(name: str, key: str, **limits: Any) -> TenantKeys:
    return TenantKeys(name, (Secret(key),), TenantLimits(**limits))


async def test_keys_and_limits_change_and_what_cannot_is_named(folder: Path) -> None:
    first = Config(tenants=(tenant("ada", "old"),), admin_key=Secret("the-owners"), requests_per_minute=100)
    async with serving(folder) as service, site(service, first) as at, at.http() as http:
        wanted = first

        def again() -> Config:
            if isinstance(wanted, ConfigError):
                raise wanted
            return wanted

        at.app.state.options.again = again

        async def ask(key: str) -> httpx.Response:
            return await http.post("/v1/chat/completions", json=HELLO, headers={"authorization": f"Bearer {key}"})

        async def reload() -> Any:
            return await http.post("/v1/admin/reload", headers=ADMIN)

        assert (await http.post("/v1/admin/reload", headers={"authorization": "Bearer old"})).status_code == 401
        assert (await reload()).json() == {"object": "reload", "changed": [], "unchanged": []}
        assert (await ask("old")).headers["x-ratelimit-remaining-requests"] == "100"
        wanted = msgspec.structs.replace(
            first,
            tenants=(tenant("ada", "new"), tenant("bob", "his", requests_per_minute=1, weight=3.0, priority=1)),
            requests_per_minute=50,
            alias=("gpt-4o",),
            kv_gb=3.0,
            request_timeout=1.0,
            strict_model=True,
        )
        body = (await reload()).json()
        assert body["changed"] == ["alias", "requests_per_minute", "tenants"]
        assert {one["option"]: one["why"] for one in body["unchanged"]} == dict.fromkeys(
            ("kv_gb", "request_timeout", "strict_model", "tenants.bob.weight", "tenants.bob.priority"),
            "it takes a restart of the server",
        )
        assert (await ask("old")).status_code == 401
        answer = await ask("new")
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "50"
        assert answer.headers["x-ratelimit-remaining-requests"] == "49"  # what was used stays used
        assert [(await ask("his")).status_code for _ in range(2)] == [200, 429]
        assert "gpt-4o" in service.names
        level = logging.getLogger("cairn").level
        try:
            wanted = msgspec.structs.replace(wanted, log_level="error", host="0.0.0.0")
            assert (await reload()).json()["changed"] == ["log_level"]
            assert logging.getLogger("cairn").level == logging.ERROR
        finally:
            logging.getLogger("cairn").setLevel(level)
        for bad, word in (
            (ConfigError("port is 'x' but must be a whole number", field="port"), "must be a whole number"),
            (msgspec.structs.replace(wanted, cors_origins=("nonsense",)), "nothing is changed"),
            (
                msgspec.structs.replace(
                    wanted, tenants=(tenant("ada", "same"), tenant("bob", "same")), alias=("gpt-5",), load_timeout=7.0
                ),
                "nothing is changed: one API key belongs to the tenants ada and bob",
            ),
        ):
            options = at.app.state.options.config
            wanted = bad  # type: ignore[assignment]
            refused = await reload()
            assert refused.status_code == 400 and word in refused.text, refused.text
            assert (await ask("new")).status_code == 200
            assert at.app.state.options.config is options and at.app.state.config is options
            assert at.app.state.models is not None and at.app.state.models.config.load_timeout == options.load_timeout
            assert "gpt-4o" in service.names and "gpt-5" not in service.names
            _reload(at.app)  # as SIGHUP does: the outcome is in the log


@pytest.mark.parametrize(
    ("lost", "field", "said"),
    [
        ({"admin_key": None}, "admin_key", "no admin key any more"),
        ({"tenants": ()}, "tenants", "no tenants any more"),
        ({"tenants": (), "api_key": (), "admin_key": None}, "admin_key", "no admin key any more"),
        ({"tenants": (), "api_key": ()}, "tenants", "no tenants any more"),
        ({"api_key": ()}, "", ""),
        ({"tenants": (tenant("bob", "b"),)}, "", ""),
        ({"admin_key": Secret("another")}, "", ""),
    ],
)
async def test_a_reload_cannot_remove_all_keys(folder: Path, lost: dict[str, Any], field: str, said: str) -> None:
    keys: dict[str, Any] = {"api_key": (Secret("k"),), "tenants": (tenant("ada", "a"), tenant("bob", "b"))}
    first = Config(**keys, admin_key=Secret("the-owners"))
    async with serving(folder) as service, site(service, first) as at, at.http() as http:
        at.app.state.options.again = lambda: msgspec.structs.replace(first, **lost)
        answer = await http.post("/v1/admin/reload", headers=ADMIN)
        if not field:
            assert answer.status_code == 200 and answer.json()["changed"] == list(lost)
            return
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field) and said in error["message"]
        assert "nothing is changed" in error["message"] and "restart the server" in error["message"]
        assert (await http.get("/v1/models")).status_code == (await http.get("/metrics")).status_code == 401
        _reload(at.app)  # SIGHUP reloads the same options
        assert (await http.get("/v1/models")).status_code == 401


async def test_a_reload_does_not_take_the_last_key_of_a_server_without_tenants(folder: Path) -> None:
    first = Config(api_key=(Secret("k"),))
    async with serving(folder) as service, site(service, first) as at, at.http() as http:
        app = at.app
        app.state.options.again = Config
        with pytest.raises(InvalidRequest, match="no API key any more"):
            app.state.options(app.state.models)
        assert (await http.get("/v1/models")).status_code == 401
        app.state.options.again = lambda: Config(tenants=(tenant("ada", "k"),))  # the same key, now a tenant's
        assert app.state.options(app.state.models).changed == ("api_key", "tenants")


@pytest.mark.parametrize("how", ["cut to nothing", "comments alone", "gone"])
def test_an_options_file_that_became_empty_is_refused(tmp_path: Path, how: str) -> None:
    """Otherwise a server without keys would lose all its limits, with a 200."""
    file = tmp_path / "cairn.toml"
    file.write_text("requests_per_minute = 5\n")
    resolved = resolve({}, {}, file)
    assert resolved.again().config.requests_per_minute == 5
    file.unlink() if how == "gone" else file.write_text("# nothing yet\n" if how == "comments alone" else "")
    with pytest.raises(ConfigError, match=r"cairn\.toml"):
        resolved.again()
    file.write_text("requests_per_minute = 7\n")
    assert resolved.again().again().config.requests_per_minute == 7


def test_a_found_options_file_is_not_replaced_by_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "config" / "cairn" / "cairn.toml"
    other.parent.mkdir(parents=True)
    other.write_text('log_level = "error"\n')
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    Path("cairn.toml").write_text('api_key = "k"\n')
    resolved = resolve({}, env)
    Path("cairn.toml").unlink()
    with pytest.raises(ConfigError, match=r"cairn\.toml held options and is gone"):
        resolved.again()


async def test_reloaded_cors_origins_apply_to_forms_too(folder: Path) -> None:
    async with home(folder) as (house, http):
        app = house.web.app  # type: ignore[attr-defined]

        async def post(page: str) -> list[int]:
            """Send a POST without a content type, without a body, and as a form."""
            asked: list[tuple[str, dict[str, Any]]] = [
                ("/api/show", {"content": b"{}"}),
                ("/v1/agents", {}),
                ("/v1/files", {"files": {"file": b"text"}, "data": {"purpose": "user_data"}}),
            ]
            return [(await http.post(path, headers={"origin": page}, **body)).status_code for path, body in asked]

        for allowed, other in (("https://old.example", "https://new.example"), ("https://new.example", "https://old")):
            app.state.options.again = lambda allowed=allowed: Config(cors_origins=(allowed,))
            assert app.state.options(app.state.models).changed == ("cors_origins",)
            assert await post(other) == [403, 403, 403]
            assert 403 not in await post(allowed)


async def test_without_a_source_nothing_is_read(folder: Path) -> None:
    async with serving(folder) as service, site(service) as at, at.http() as http:
        assert (await http.post("/v1/admin/reload")).status_code == 400


async def test_aliases_of_several_models_move(tmp_path: Path) -> None:
    alpha, beta = make_models(tmp_path, "alpha beta")

    def config(a: tuple[str, ...], b: tuple[str, ...], **more: Any) -> Config:
        listed = (
            ModelOptions(model=str(alpha), aliases=a),
            ModelOptions(model=str(beta), load=False, aliases=b, **more),
        )
        return Config(models=listed, load_timeout=7.0)

    async with several(tmp_path, "alpha beta") as models:
        assert models.configure(config(("chat",), ())) == {}
        assert models.find("chat").name == "alpha" and models.config.load_timeout == 7.0
        assert models.configure(config((), ("chat", "beta2"), pin=True, ttl=9.0)) == {}
        assert models.find("chat") is models.find("beta2") is models.models[1]
        assert models.models[1].pinned and models.models[1].ttl == 9.0
        assert not models.has("nobody") and models.find("alpha").name == "alpha"
        with pytest.raises(Exception, match="two models would be called chat"):
            models.configure(config(("chat",), ("chat",)))
        assert models.find("chat") is models.models[1]
        result = models.configure(config((), (), kv_share=0.5))
        assert result == {"models.beta.kv_share": "it takes a restart of the server"} and not models.has("chat")
        left = Config(models=(ModelOptions(model=str(alpha)), ModelOptions(model="/other")))
        assert set(models.configure(left)) == {f"models.{beta}", "models./other"}


async def test_a_new_tenants_agents_are_its_own(folder: Path) -> None:
    first = Config(tenants=(tenant("ada", "a"),), admin_key=Secret("the-owners"))
    async with home(folder, tenants=first.tenants, admin_key=first.admin_key) as (house, http):
        options = house.web.app.state.options  # type: ignore[attr-defined]
        options.again = lambda: msgspec.structs.replace(
            first, tenants=(*first.tenants, tenant("bob", "b", max_agents=1))
        )
        assert (await http.post("/v1/admin/reload", headers=ADMIN)).json()["changed"] == ["tenants"]
        his = {"authorization": "Bearer b"}
        assert (await http.post("/v1/agents", json={"id": "x"}, headers=his)).status_code == 201
        assert (await http.post("/v1/agents", json={"id": "y"}, headers=his)).status_code == 403
        turn = await http.post("/v1/agents/x/turns", json=HELLO, headers=his)
        assert turn.status_code == 200, turn.text
        assert house.agents._find("bob", "x").salt


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_sighup_reads_the_file_again_and_the_owner_has_a_listener(folder: Path, tmp_path: Path) -> None:
    file, port = tmp_path / "cairn.toml", free_port()
    file.write_text('[tenants.ada]\napi_key = "one"\n')
    with served(
        model=str(folder), config_file=str(file), admin_port=port, admin_key="the-owners", log_format="json"
    ) as server:
        admin = f"http://127.0.0.1:{port}"

        def get(url: str, **headers: str) -> int:
            return httpx.get(url, headers=headers, trust_env=False, verify=False, timeout=20).status_code

        def models(key: str) -> int:
            return get(server.url + "/v1/models", authorization=f"Bearer {key}")

        assert models("one") == 200 and models("two") == 401
        file.write_text('[tenants.ada]\napi_key = "two"\n')
        server.signal(signal.SIGHUP)
        eventually(lambda: models("two") == 200)
        assert models("one") == 401
        file.write_text("nonsense = 1\n")
        server.signal(signal.SIGHUP)
        time.sleep(0.3)
        assert models("two") == 200

        # the owner's routes answer on the admin listener and nowhere else
        assert get(server.url + "/metrics", **ADMIN) == 404 and get(admin + "/metrics", **ADMIN) == 200
        assert get(server.url + "/v1/admin/models", **ADMIN) == 404 and get(admin + "/v1/admin/models", **ADMIN) == 200
        assert get(admin + "/metrics", authorization="Bearer two") == 401
        assert get(admin + "/v1/models", authorization="Bearer two") == 404
        assert get(admin + "/health/ready") == get(server.url + "/health/ready") == 200
        resolved = resolve({"port": server.port, "admin_port": port, "admin_key": "the-owners"}, {})
        with connect(resolved) as client:
            assert [item["state"] for item in client.get("/v1/admin/models", admin=True)["data"]] == ["loaded"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    said = [json.loads(line) for line in server.errors.decode().splitlines()]  # each line, from the first on
    assert any("unknown key 'nonsense'" in one["message"] for one in said)
    assert any(one["message"].startswith("serves tiny at http") for one in said)


def test_options_can_be_resolved_again(tmp_path: Path) -> None:
    file = tmp_path / "cairn.toml"
    file.write_text("max_concurrent = 3\n")
    result: Resolved = resolve({"port": "9"}, {}, file)
    file.write_text("max_concurrent = 4\n")
    assert (result.config.max_concurrent, result.again().config.max_concurrent) == (3, 4)
    assert result.again().config.port == 9


def test_an_owners_listener_that_others_reach_needs_a_key(folder: Path) -> None:
    from cairn.api.http.auth import check_exposure

    with pytest.raises(ConfigError, match="set --admin-key"):
        check_exposure(Config(admin_port=1, admin_host="0.0.0.0"))
    check_exposure(Config(admin_port=1, admin_host="0.0.0.0", admin_key=Secret("k")))
