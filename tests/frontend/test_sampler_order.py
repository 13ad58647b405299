"""Lists of samplers as llama.cpp's clients send them: supported orders, and errors that name the unsupported
sampler.
"""

from __future__ import annotations

from typing import Any

import pytest

from cairn.frontend.request_options import SamplingOptions, sampling_params
from cairn.frontend.sampling_extras import ORDERS
from cairn.types.errors import InvalidRequest, Unsupported
from cairn.types.request import SamplingParams
from tests.api.scripted import SPEC

LLAMA = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
ALL = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}


def made(samplers: Any, order: Any = "default", **options: Any) -> SamplingParams:
    asked = SamplingOptions(samplers=samplers, seed=1, **(ALL | options))
    return sampling_params(SPEC, asked, prompt_tokens=1, sampler_order=order)


@pytest.mark.parametrize(
    "samplers", [LLAMA, "edskypmxt", [*LLAMA, "adaptive_p"], ["temp" if one == "temperature" else one for one in LLAMA]]
)
def test_what_llama_cpps_clients_send_is_its_order(samplers: Any) -> None:
    assert made(samplers) == made(None, "llama")
    assert made(samplers, "llama").temperature_last
    assert not made(None).temperature_last


@pytest.mark.parametrize(
    ("samplers", "last"),
    [
        (["penalties", "temperature", "top_k", "top_p", "min_p"], False),
        (["penalties", "top_k", "temperature", "top_p", "min_p"], False),  # top_k commutes with it
        (["penalties", "top_p", "min_p", "top_k", "temperature"], None),
        (["penalties", "temperature", "top_k", "top_p", "min_p", "dry"], False),
        ("etkpm", False),
        ("ekpmt", True),
        (["penalties", "min_p", "top_k", "temperature"], True),
    ],
)
def test_the_place_of_the_temperature(samplers: Any, last: bool | None) -> None:
    """`last` is None where the order is not supported."""
    if last is None:
        with pytest.raises((Unsupported, InvalidRequest)):
            made(samplers)
    else:
        assert made(samplers).temperature_last is last


def test_a_list_beats_the_servers_order() -> None:
    assert not made(["penalties", "temperature", "top_k", "top_p", "min_p"], "llama").temperature_last


def test_samplers_not_listed_do_not_apply() -> None:
    params = made(["top_k", "temperature"])
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 40, 1.0, 0.0)
    assert params.repetition_penalty == 1.0 and not params.temperature_last
    params = made(["penalties", "top_p"])
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 0, 0.9, 1.1)
    plain = made([])
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    "changed",
    [{"temperature": 1.0}, {"temperature": 0}, {"top_p": 1.0, "min_p": 0}, {"top_p": 1, "min_p": 0, "top_k": 0}],
)
def test_where_the_order_changes_nothing_it_is_the_usual_one(changed: dict[str, float]) -> None:
    """One order draws tokens by id, the other by rank, so an equal order must not change the answer of a seed."""
    assert made(LLAMA, **changed) == made(None, **changed)


def test_samplers_without_effect_may_stand_anywhere() -> None:
    params = made(["top_p", "top_k", "min_p", "temperature", "penalties"], top_k=0, repetition_penalty=1)
    assert params.temperature_last
    assert made(["min_p", "top_p", "temperature"], min_p=0).temperature_last
    assert made(["top_p", "temperature", "min_p"], temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("samplers", "words"),
    [
        (["top_k", "penalties"], "top_k, penalties"),
        (["top_p", "top_k", "temperature"], "top_p, top_k, temperature"),
        (["min_p", "top_p"], "min_p, top_p"),
        (["top_p", "temperature", "min_p"], "top_p, temperature, min_p"),
        ("tpe", "temperature, top_p, penalties"),
    ],
)
def test_an_unknown_order_is_refused_with_the_two_known(samplers: Any, words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        made(samplers)
    assert caught.value.field == "samplers" and words in str(caught.value)
    assert all(", ".join(order) in str(caught.value) for order in ORDERS.values())


@pytest.mark.parametrize(
    ("samplers", "words"),
    [
        (["top_k", "mirostat_v3"], "'mirostat_v3', expected penalties"),
        ("kq", "'q', expected the letters edskypmxt"),
        (["infill"], "infill, and this sampler is not supported"),
        ("i", "infill"),
        (["top_k", "temp", "temperature"], "temperature twice"),
        (["top_k"] * 65, "65 samplers; the limit is 64"),
        ([3], "which are texts"),
        (7, "a list of names"),
        (b"k", "a list of names"),
    ],
)
def test_an_unknown_sampler_is_named(samplers: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        made(samplers)
    assert caught.value.field == "samplers"
