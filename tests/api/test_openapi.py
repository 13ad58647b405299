"""The OpenAPI description: valid, complete, and with the types that validate requests."""

from __future__ import annotations

import json
import re
from typing import Any

import openapi_spec_validator
import pytest

from cairn.api.app import App, build_app
from cairn.api.chat.schemas import ChatBody
from cairn.api.http.not_found import canonical
from cairn.config.config import Config


@pytest.fixture(scope="module")
def app() -> App:
    return build_app(None, Config())


@pytest.fixture(scope="module")
def described(app: App) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(app.described())
    return parsed


def test_it_is_valid(described: dict[str, Any]) -> None:
    openapi_spec_validator.validate(described)


def test_it_names_every_route_and_no_other(app: App, described: dict[str, Any]) -> None:
    served = {route.public_path for route in app.router.routes if not route.path.startswith("/web/")}
    assert served == set(described["paths"]) and len(served) > 100


def test_it_names_every_route_that_a_module_says_it_has(described: dict[str, Any]) -> None:
    """Routes with an id in their path are listed in the docstrings of the modules that serve them."""
    from cairn.api import app
    from cairn.api.native import agents, collections, teams, workflows
    from cairn.api.openai import conversations, responses

    said = " ".join(
        str(module.__doc__) for module in (agents, app, collections, conversations, responses, teams, workflows)
    )
    named = set(re.findall(r"(/v1/[a-z_]+(?:/(?:{\w+}|[a-z_]+))+)", said))
    assert len(named) > 15 and {canonical(path) for path in named} <= set(described["paths"])


def test_every_method_of_a_route_is_described(app: App, described: dict[str, Any]) -> None:
    operations = [(path, method) for path, methods in described["paths"].items() for method in methods]
    assert ("/v1/conversations/{id}", "delete") in operations and ("/v1/agents/{id}/turns", "get") in operations
    names = [one["operationId"] for methods in described["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names)) == len(operations)
    assert all(len(one["summary"]) > 5 for methods in described["paths"].values() for one in methods.values())


def test_every_post_describes_its_body(described: dict[str, Any]) -> None:
    posts = [methods["post"] for methods in described["paths"].values() if "post" in methods]
    assert len(posts) > 30 and all("requestBody" in post for post in posts)


def test_a_body_is_the_type_that_checks_it(described: dict[str, Any]) -> None:
    chat = described["components"]["schemas"]["ChatBody"]
    assert set(chat["properties"]) == set(ChatBody.model_fields)
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False


def test_what_is_not_served_is_not_described() -> None:
    parsed = json.loads(build_app(None, Config(page=False, docs=False)).described())
    assert "/docs" not in parsed["paths"] and "/v1/agents" in parsed["paths"]


def test_a_stream_of_progress_is_described_beside_what_is_created(described: dict[str, Any]) -> None:
    answers = described["paths"]["/v1/collections/{id}/documents"]["post"]["responses"]
    assert "201" in answers and list(answers["200"]["content"]) == ["text/event-stream"]
