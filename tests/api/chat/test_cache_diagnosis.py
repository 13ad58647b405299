"""Cache diagnosis: every reason for a miss is one of the values that the SDKs know."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from cairn.api.anthropic.schemas import MessagesBody
from cairn.api.chat.cache_diagnosis import RecentPrompts, message_diagnostics, response_diagnostics
from cairn.api.openai.responses_schemas import ResponseBody

BEFORE, OTHER = list(range(100)), [*range(40), *range(500, 560)]
NEVER = {
    "prompt_cache_key_changed": "a key is whose account it is, and parts no prefix of a tenant's",
    "service_tier_changed": "all requests are served alike",
}
"""Reasons in OpenAI's API that this server never has."""


def told(parts: dict[str, Any], change: str | None, prompt: list[int]) -> Any:
    recent = RecentPrompts()
    recent.note("t", "one", parts, BEFORE)
    return recent.compare("t", "one", parts | ({change: object.__name__} if change else {}), prompt)


def test_openai() -> None:
    response = pytest.importorskip("openai.types.responses.response")
    kinds = get_args(get_args(response.PromptCacheDiagnostics)[0])
    types = {get_args(kind.model_fields["type"].annotation)[0] for kind in kinds}
    reasons = set(get_args(response.PromptCacheDiagnosticsCacheMiss.model_fields["reason"].annotation))
    parts = {"model_changed": "m"} | ResponseBody(input="hi").parts
    results = [response_diagnostics(told(parts, change, OTHER), 100, 0) for change in (*parts, None)]
    for result in results:
        response.PromptCacheDiagnosticsCacheMiss.model_validate(result, strict=True)
    assert {result["reason"] for result in results} == reasons - NEVER.keys()
    others = [
        response_diagnostics(None, 100, 0),
        response_diagnostics(told(parts, None, [*BEFORE, 7]), 101, 100),
        response_diagnostics(told(parts, None, [*BEFORE, 7]), 101, 0),
    ]
    assert {one["type"] for one in [*results, *others]} == types


@pytest.mark.parametrize("beta", [False, True])
def test_anthropic(beta: bool) -> None:
    types = pytest.importorskip("anthropic.types.beta" if beta else "anthropic.types")
    module = types.beta_cache_miss_reason if beta else types.cache_miss_reason
    union = get_args(module.BetaCacheMissReason if beta else module.CacheMissReason)[0]
    literals = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(union)}
    parts = {"model": "m"} | MessagesBody(messages=[], max_tokens=1).parts
    results = [message_diagnostics(told(parts, change, OTHER)) for change in (*parts, None)]
    results.append(message_diagnostics(None))
    assert message_diagnostics(told(parts, None, [*BEFORE, 7])) is None
    said = set()
    for result in results:
        assert result is not None
        reason = result["cache_miss_reason"]
        literals[reason["type"]].model_validate(reason, strict=True)
        said.add(reason["type"])
    assert said == literals.keys() - {"unavailable"}, "a message's prompt is compared with a known one, or not at all"
