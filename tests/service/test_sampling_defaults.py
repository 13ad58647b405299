"""Sampling defaults: which value applies where a request has none, and where it comes from."""

import msgspec
import pytest

from cairn.config.config import Config
from cairn.frontend.request_options import RequestParams, SamplingOptions, requests, sampling_params
from cairn.frontend.sampling_defaults import described, sampling_defaults, sentence, with_options
from cairn.frontend.sampling_extras import NEUTRAL
from cairn.types.model_spec import MakersSampling
from cairn.types.request import SAMPLING_RANGES, OutputFormat
from tests.frontend.test_request_options import SPEC

OURS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def spec(**said: float):
    return msgspec.structs.replace(SPEC, defaults=said)


def drawn(said: dict[str, float], **asked) -> dict[str, float]:
    result = sampling_params(spec(**said), SamplingOptions(**asked), prompt_tokens=4)
    return {name: getattr(result, name) for name in OURS}


def test_a_model_that_says_nothing_is_sampled_as_people_expect():
    assert drawn({}) == OURS
    params = sampling_params(SPEC, prompt_tokens=4)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)


@pytest.mark.parametrize("name", list(OURS))
def test_a_request_that_names_one_value_keeps_the_other_defaults(name):
    asked = {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.2}[name]
    assert drawn({}, **{name: asked}) == {**OURS, name: asked}


def test_a_request_can_turn_each_of_them_off():
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert drawn({}, **off) == off


def test_a_file_that_names_a_cut_is_the_whole_recipe():
    assert drawn({"temperature": 0.6, "top_p": 0.9}) == {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0}
    assert drawn({"top_k": 64.0, "top_p": 0.95}) == {"temperature": 1, "top_k": 64, "top_p": 0.95, "min_p": 0}
    assert drawn({"min_p": 0.1}) == {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0.1}
    assert drawn({"top_p": 0.9}, temperature=0.2) == {"temperature": 0.2, "top_k": 0, "top_p": 0.9, "min_p": 0}


def test_a_file_that_names_a_temperature_alone_keeps_the_cuts():
    assert drawn({"temperature": 0.3}) == {**OURS, "temperature": 0.3}
    assert drawn({"temperature": 0.0}, temperature=1.0) == {**OURS, "temperature": 1.0}  # do_sample: false


def test_a_penalty_alone_sets_no_sampling_recipe():
    assert drawn({"repetition_penalty": 1.1}) == OURS
    assert sampling_params(spec(repetition_penalty=1.1), prompt_tokens=4).repetition_penalty == 1.1


CARD = MakersSampling(values={"temperature": 0.2, "top_p": 0.9}, source="https://x/card", read="2026-11-28")


def test_the_model_card_is_the_recipe_if_the_files_have_none():
    carded = msgspec.structs.replace(spec(repetition_penalty=1.1), makers=CARD)
    applied = sampling_defaults(carded)
    values = {name: value.value for name, value in applied.items() if name in OURS}
    assert values == {"temperature": 0.2, "top_k": 0, "top_p": 0.9, "min_p": 0}
    assert {applied[name].source for name in OURS} == {"makers"}
    assert (applied["repetition_penalty"].value, applied["repetition_penalty"].source) == (1.1, "model")
    assert sentence(applied) == (
        "temperature 0.2, top_p 0.9 (its makers' card), repetition_penalty 1.1 (the model's own)"
    )
    asked = sampling_params(carded, SamplingOptions(temperature=1.0, top_k=7), prompt_tokens=4)
    assert (asked.temperature, asked.top_k, asked.top_p) == (1.0, 7, 0.9)


@pytest.mark.parametrize("said", [{"temperature": 0.7}, {"top_k": 20.0}, {"min_p": 0.1}])
def test_files_with_a_recipe_replace_the_model_card(said):
    carded = msgspec.structs.replace(spec(**said), makers=CARD)
    assert sampling_defaults(carded) == sampling_defaults(spec(**said))


def test_options_come_before_files_and_cards_each_by_itself():
    config = Config(default_temperature=0.0, default_top_k=9)
    for one in (spec(temperature=0.6, top_p=0.9), msgspec.structs.replace(SPEC, makers=CARD)):
        applied = sampling_defaults(with_options(one, config))
        assert (applied["temperature"], applied["top_k"]) == ((0.0, "option"), (9.0, "option"))
        assert (applied["top_p"].value, applied["min_p"].value) == (0.9, 0.0)
    assert sampling_defaults(with_options(SPEC, Config())) == sampling_defaults(SPEC)
    line = sentence(sampling_defaults(with_options(SPEC, Config(default_top_p=0.5))))
    assert "top_p 0.5 (the server's options)" in line


def test_every_value_says_where_it_comes_from():
    applied = sampling_defaults(spec(temperature=0.6, top_p=0.9))
    assert {name: value.source for name, value in applied.items()} == {
        **dict.fromkeys(OURS, "model"),
        **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "default"),
    }
    assert {sampling_default.source for sampling_default in sampling_defaults(SPEC).values()} == {"default"}
    assert list(applied) == list(NEUTRAL) == list(SAMPLING_RANGES)


def test_one_line_describes_the_defaults():
    def said(**values: float) -> str:
        return sentence(sampling_defaults(spec(**values)))

    assert said() == "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (Cairn's defaults)"
    assert said(temperature=0.6, top_p=0.9) == "temperature 0.6, top_p 0.9 (the model's own)"
    assert said(temperature=0.7) == (
        "temperature 0.7 (the model's own), top_k 40, top_p 0.95, min_p 0.05 (Cairn's defaults)"
    )
    assert said(temperature=0.0, repetition_penalty=1.1) == "greedy, repetition_penalty 1.1 (the model's own)"
    assert said(top_k=-1.0) == "temperature 1 (the model's own)"


MODES = msgspec.structs.replace(
    CARD,
    values={"temperature": 0.7, "top_p": 0.8, "top_k": 20.0},
    thinking={"temperature": 0.6, "top_p": 0.95, "top_k": 20.0},
)
PLAIN, THINKING = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
)


def of_mode(own: dict[str, float], output: OutputFormat | None) -> dict[str, float]:
    carded = msgspec.structs.replace(spec(**own), makers=MODES)
    request = requests(carded, [1, 2], params=RequestParams(output=output or OutputFormat()), ids=lambda: 1)[0]
    return {name: getattr(request.sampling, name) for name in OURS}


@pytest.mark.parametrize("own", [{}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0}])
def test_the_model_cards_row_depends_on_reasoning(own: dict[str, float]):
    """Also where the model's file repeats the model card's values for answers with reasoning."""
    assert of_mode(own, OutputFormat(reasoning=True)) == THINKING
    assert of_mode(own, OutputFormat(reasoning=True, reasoning_open=True)) == THINKING
    assert of_mode(own, OutputFormat(reasoning=True, reasoning_closed=True)) == PLAIN
    assert of_mode(own, OutputFormat()) == of_mode(own, None) == PLAIN


def test_a_file_with_values_of_no_row_applies_in_both_modes():
    own = {"temperature": 0.5, "top_p": 0.95}
    want = {"temperature": 0.5, "top_k": 0, "top_p": 0.95, "min_p": 0}
    assert of_mode(own, OutputFormat(reasoning=True)) == of_mode(own, None) == want


def test_one_line_describes_both_modes():
    assert described(msgspec.structs.replace(spec(), makers=CARD)) == "temperature 0.2, top_p 0.9 (its makers' card)"
    assert described(msgspec.structs.replace(spec(), makers=MODES)) == (
        "temperature 0.7, top_k 20, top_p 0.8 (its makers' card); with reasoning: "
        "temperature 0.6, top_k 20, top_p 0.95 (its makers' card)"
    )
