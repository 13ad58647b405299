"""/openapi.json against a whole server on the fake engine, with requests made by schemathesis.

No answer is a 5xx, every answer has a type and shape that the document names, and the server survives. Left out are
routes that end the server, use the hub, or stream without end.
"""

from __future__ import annotations

import collections
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.api.process import Served
from tests.service.tiny import make_embedder

schemathesis = pytest.importorskip("schemathesis")

LEFT_OUT = {
    ("POST", "/v1/admin/drain"),
    ("POST", "/v1/admin/models/unload"),
    ("POST", "/v1/models/unload"),
    ("POST", "/api/pull"),
    ("GET", "/v1/events"),
    ("GET", "/v1/cache/events"),
    ("GET", "/v1/requests/{id}/events"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("whole")
    places = {"kv_dir": str(folder / "kv"), "agents_dir": str(folder / "agents")}
    models = ["demo", str(make_embedder(folder / "embedder"))]  # collections need an embedding model
    served = Served(models=models, **places, context=512, request_timeout=50)
    assert served.process.stderr is not None
    log = threading.Thread(target=served.process.stderr.read, daemon=True)
    log.start()  # a process that writes thousands of lines to a pipe that nobody reads blocks
    served.wait_ready()
    yield served
    served.signal()
    served.process.wait(60)
    log.join()
    served.process.stderr.close()


FLOW = {"name": "flow", "nodes": {"say": {"type": "agent", "prompt": "Say something."}}}


def things(server: Served) -> dict[str, str]:
    """Create one of each kind of object; return their ids by the beginning of their path."""
    hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    server.post("/v1/agents", {"id": "ada", "system": "You remember."})
    server.post("/v1/agents/ada/turns", hi)
    topology = {"kind": "broadcast"}
    server.post(
        "/v1/teams",
        {
            "id": "team",
            "members": [{"name": "a", "max_tokens": 8}, {"name": "b", "max_tokens": 8}],
            "topology": topology,
        },
    )
    server.post("/v1/collections", {"id": "papers"})
    server.post("/v1/collections/papers/documents", {"id": "0", "name": "a.txt", "text": "A fact. " * 40})
    response = server.post("/v1/responses", {"model": "demo", "input": "hi", "max_output_tokens": 16})
    conversation = server.post("/v1/conversations", {"items": [{"role": "user", "content": "hi"}]})
    models = json.load(urllib.request.urlopen(server.url + "/v1/models", timeout=20))
    return {
        "/v1/agents/": "ada",
        "/v1/teams/": "team",
        "/v1/collections/": "papers",
        "/v1/responses/": response["id"],
        "/v1/conversations/": conversation["id"],
        "/v1/models/": models["data"][0]["id"],
    }


def test_no_request_that_the_document_allows_is_a_5xx(server: Served, prove: bool, figure: Callable[..., None]) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import openapi
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    there = things(server)
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    asked = 0
    for result in openapi.from_url(server.url + "/openapi.json").get_all_operations():
        operation = result.ok()
        key = (operation.method.upper(), operation.path)
        if key in LEFT_OUT:
            continue
        known = next((id for begin, id in there.items() if operation.path.startswith(begin + "{id}")), None)
        if key[0] == "DELETE" and key[1].count("{") == 1:
            known = None  # what other requests use stays

        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            if known is not None and asked % 2:  # noqa: B023  it is asked before the next one
                case.path_parameters["id"] = known  # noqa: B023
            answer = case.call(timeout=60)  # more than the server's own limit, so that a slow machine reaches neither
            try:
                case.validate_response(answer, checks=checks)
            except* Exception as group:
                said = f"{answer.status_code} {answer.text[:500]}, asked by {case.as_curl_command()[:1000]}"
                wrong[" ".join(key)] += [f"{type(one).__name__}: {one}"[:800] + said for one in group.exceptions]  # noqa: B023

        settings(
            max_examples=30 if prove else 2,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
            database=None,
        )(given(case=operation.as_strategy())(ask))()
        assert server.process.poll() is None, f"the server ended at {key}"
    figure("requests of schemathesis to every route, without a 5xx", f"{asked}")
    assert not wrong, "\n\n".join(f"{key}: {one}" for key, said in wrong.items() for one in sorted(set(said))[:3])
