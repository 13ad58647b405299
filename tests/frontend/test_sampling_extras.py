"""Further samplers as clients ask for them: the parameters they become, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.frontend.request_options import SamplingOptions, sampling_params
from cairn.frontend.sampling_extras import BEYOND
from cairn.types.errors import InvalidRequest
from cairn.types.request import SamplingExtras, SamplingParams
from tests.api.scripted import SPEC

LLAMA = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
ALL: dict[str, Any] = {
    "typical_p": 0.9,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["!"],
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "allowed_token_ids": [5, 6],
    "bad_words": ["ab"],
}


def made(**options: Any) -> SamplingParams:
    return sampling_params(
        SPEC, SamplingOptions(seed=1, **options), prompt_tokens=1, encode=lambda text: [*text.encode()]
    )


def test_all_extras_reach_the_sampler() -> None:
    assert set(ALL) == set(BEYOND)
    assert made(**ALL).extras == SamplingExtras(
        typical_p=0.9,
        top_n_sigma=1.5,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_breakers=(256, 33),
        dynatemp_range=0.5,
        dynatemp_exponent=2.0,
        mirostat=2,
        mirostat_tau=4.0,
        mirostat_eta=0.2,
        allowed_token_ids=(5, 6),
        bad_words=((97, 98), (32, 97, 98)),
    )


@pytest.mark.parametrize(
    "off",
    [
        {},
        {"typical_p": 1, "top_n_sigma": -1, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0},
        {"dry_base": 2, "xtc_threshold": 0.3, "dry_sequence_breakers": ["a"], "dynatemp_exponent": 3},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
    ],
)
def test_extras_that_are_off_change_nothing(off: dict[str, Any]) -> None:
    assert made(**off).extras is None


def test_the_breakers_that_a_request_does_not_name_are_llama_cpps() -> None:
    extras = made(dry_multiplier=1).extras
    assert extras is not None and set(extras.dry_breakers) == {256, *b'\n:"*'}


def test_a_list_of_samplers_says_which_apply_and_where_the_temperature_does() -> None:
    for samplers in (LLAMA, "edskypmxt"):
        params = made(samplers=samplers, **ALL)
        assert params.temperature_last and params.extras == made(**ALL).extras
    assert not made(**ALL).temperature_last
    params = made(samplers=["top_k", "typ_p", "temperature"], **ALL)
    assert params.extras is not None and params.extras.typical_p == 0.9
    assert not (params.extras.dry_multiplier or params.extras.xtc_probability or params.extras.top_n_sigma)
    assert made(samplers=["temperature", "typ_p"], typical_p=0.5).temperature_last is False
    assert made(samplers=["top_k", "temperature"], typical_p=0.5).extras is None


@pytest.mark.parametrize(
    "samplers", [["xtc", "top_p"], ["top_k", "dry"], ["typ_p", "top_k"], ["typ_p", "temperature", "xtc"]]
)
def test_another_order_is_refused(samplers: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(samplers=samplers, **ALL | {"temperature": 0.5, "top_k": 5, "top_p": 0.5})
    assert caught.value.field == "samplers"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"typical_p": 1.5}, "typical_p"),
        ({"typical_p": True}, "typical_p"),
        ({"mirostat": 10**350}, "mirostat"),
        ({"top_n_sigma": float("nan")}, "top_n_sigma"),
        ({"xtc_threshold": "a"}, "xtc_threshold"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers"),
        ({"dynatemp_exponent": 0}, "dynatemp_exponent"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a" * 100]}, "bad_words"),
        ({"bad_words": 5}, "bad_words"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": [[1, 101]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[1, 1]] * 1025}, "logit_bias"),
    ],
)
def test_invalid_input_is_named_in_the_error(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(**options)
    assert caught.value.field == field and field in str(caught.value)


def test_a_list_of_biases_is_of_ids_or_of_texts() -> None:
    assert made(logit_bias=[[5, 1.5], ["ab", -2], [7, False]]).logit_bias == (
        (5, 1.5),
        (7, -100.0),
        (97, -2.0),
        (98, -2.0),
    )
    assert made(logit_bias={5: 1}).logit_bias == ((5, 1.0),)


def test_texts_need_the_models_tokens() -> None:
    for options in ({"bad_words": ["a"]}, {"logit_bias": [["a", 1]]}):
        with pytest.raises(InvalidRequest, match="takes only token ids"):
            sampling_params(SPEC, SamplingOptions(**options), prompt_tokens=1)
