"""The table of routes: how a path is matched, and which routes need which key or accept uploads."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.api.app import build_app
from cairn.api.http.routes import Route, Router
from cairn.config.config import Config


async def endpoint(call: Any, service: Any) -> None:
    """Do nothing."""


def router(*paths: str) -> Router:
    return Router([Route("GET", path, endpoint) for path in paths])


def found(table: Router, path: str) -> str | None:
    methods = table.find(path)
    return None if methods is None else methods["GET"].path


def test_a_variable_part_is_one_segment_that_is_not_empty() -> None:
    table = router("/a/{id}", "/a/{id}/b")
    assert found(table, "/a/x") == "/a/{id}" and found(table, "/a/x/b") == "/a/{id}/b"
    for path in ("/a", "/a/", "/a//b", "/a/x/", "/a/x/c", "/a/x/b/", "/a/x/b/c", "", "a/x", "/b/x"):
        assert found(table, path) is None, path


def test_a_fixed_path_hides_a_variable_one_and_not_what_is_below_it() -> None:
    table = Router([Route("POST", "/a/import", endpoint), *router("/a/{id}", "/a/{id}/b").routes])
    assert list(table.find("/a/import") or ()) == ["POST"]
    assert found(table, "/a/import/b") == "/a/{id}/b"


def test_a_variable_part_may_have_a_prefix_or_take_all_that_follows() -> None:
    table = router("/r/{id:resp_}/x", "/m/{id:*}")
    assert found(table, "/r/resp_1/x") == "/r/{id:resp_}/x" and found(table, "/r/conv_1/x") is None
    assert found(table, "/m/org/name") == "/m/{id:*}" and found(table, "/m/name/") == "/m/{id:*}"
    assert found(table, "/m") is None and found(table, "/m/") is None
    assert [route.public_path for route in table.routes] == ["/r/{id}/x", "/m/{id}"]


def test_a_route_is_in_the_table_once() -> None:
    with pytest.raises(ValueError, match=r"GET /a/\{id\} is in the table twice"):
        router("/a/{id}", "/b", "/a/{id}")


def test_routes_of_the_servers_owner_need_the_admin_key() -> None:
    """Every route below these prefixes, also future ones, and a few others."""
    table = build_app(None, Config()).router.routes
    admin = {route.path for route in table if route.access == "admin"}
    prefixed = {route.path for route in table if route.path.startswith(("/v1/admin/", "/v1/cache"))}
    assert admin >= prefixed - {"/v1/cache/share"}  # a router asks for it with the key of the client it serves
    others = {path for path in admin if not path.startswith(("/v1/admin/", "/v1/cache"))}
    adapters = {"/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert others == {"/metrics", "/v1/models/load", "/v1/models/unload", "/api/pull", "/api/delete", *adapters}


def test_the_methods_of_a_path_need_the_same_key() -> None:
    """Authentication comes before the answer whether a path has a method."""
    table = build_app(None, Config()).router
    for route in table.routes:
        path = route.path.replace("{id:resp_}", "resp_").replace("{id:conv_}", "conv_")
        methods = (table.find(path) or {}).values()
        assert len({(method.access, method.always) for method in methods}) == 1, route


def test_which_paths_take_files() -> None:
    table = build_app(None, Config()).router
    assert table.upload("/v1/agents/import") == "file"
    assert table.upload("/v1/files") == table.upload("/v1/collections/any/documents") == "form"
    for path in ("/v1/files/file-1", "/v1/collections/a/documents/b", "/v1/agents/import/turns", "/nowhere", "*"):
        assert table.upload(path) == ""
