import math

import msgspec
import pytest

from cairn.frontend.request_options import RequestParams, SamplingOptions, requests, sampling_params
from cairn.frontend.sampling_extras import BEYOND
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.model_spec import CacheGroup, ModelSpec
from cairn.types.request import SAMPLING_RANGES, OutputFormat

SPEC = ModelSpec(
    name="m",
    architecture="llama",
    layers=1,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn=16,
    vocab=100,
    context=64,
    norm_eps=1e-6,
    rope_theta=10000.0,
    groups=(CacheGroup(kind="full", layers=(0,)),),
    eos_ids=(7, 9),
)


class Fixed:
    def bits64(self) -> int:
        return 42


def params(prompt_tokens=4, spec=SPEC, context=None, allow_empty=False, **options):
    return sampling_params(
        spec,
        SamplingOptions(**options),
        prompt_tokens=prompt_tokens,
        context=context,
        allow_empty=allow_empty,
        rng=Fixed(),
    )


def counter():
    return iter(range(100, 200)).__next__


def test_defaults_come_from_the_model_then_from_cairn():
    spec = msgspec.structs.replace(SPEC, defaults={"temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": 0.1})
    plain, model = params(), params(spec=spec)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (0.8, 40, 0.95, 0.05)
    assert (model.temperature, model.top_k, model.top_p, model.min_p) == (0.6, 20, 0.95, 0.1)
    asked = params(spec=spec, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.1)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty) == (0, 0, 1, 0, 1.1)


def test_nothing_that_is_asked_for_is_dropped():
    """Known failure 10: every option of the caller arrives in the parameters."""
    options = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 4,
        "prompt_logprobs": True,
        "min_tokens": 2,
    }
    result = params(**options, logit_bias={3: 1, 2: -5.5}, stop_token_ids=[50, 7])
    assert {name: getattr(result, name) for name in options} == options
    assert result.logit_bias == ((2, -5.5), (3, 1.0))
    assert result.stop_token_ids == (7, 9, 50)
    assert params(ignore_eos=True, stop_token_ids=[50]).stop_token_ids == (50,)
    used = {*options, "logit_bias", "stop_token_ids", "ignore_eos"}
    assert set(SamplingOptions.__struct_fields__) - used == {
        "stop",
        "n",
        "priority",
        "timeout",
        "first_token_timeout",
        "parallel_tool_calls",
        "repetition_stop",  # test_repetition.py
        "progress",  # of a request, not of its sampling
        "samplers",  # test_sampler_order.py
        "prediction",  # tests/api/test_speculation.py
        "reasoning_budget",  # test_reasoning_budget.py
        *BEYOND,  # test_sampling_extras.py
    }
    (first, second) = requests(
        SPEC,
        [1],
        SamplingOptions(stop=["a", "b"], n=2, priority=3),
        RequestParams(salt=b"s"),
        ids=counter(),
        timeout=9.0,
    )
    assert (first.stop, first.priority, first.timeout, first.salt) == (("a", "b"), -3, 9.0, b"s")  # 3 is added later
    assert (first.id, first.choice, second.id, second.choice) == (100, 0, 101, 1)
    for tools in (True, False):
        plan = SamplingOptions(parallel_tool_calls=False)
        (one,) = requests(SPEC, [1], plan, RequestParams(output=OutputFormat(tools=tools)), ids=counter())
        assert one.output == OutputFormat(tools=tools, one_call=tools)
    assert first.sampling == second.sampling


def refusal(field, **options):
    with pytest.raises(InvalidRequest) as caught:
        requests(SPEC, [1, 2], SamplingOptions(**options), ids=counter())
    assert caught.value.field == field
    return str(caught.value)


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_hold_at_the_limit_and_not_beyond(name):
    low, high = SAMPLING_RANGES[name]
    for value in (low, high):
        assert getattr(params(**{name: value}), name) == (value or (1e-9 if name == "top_p" else 0))
    for value in (SAMPLING_RANGES[name][0] - 0.01, high + 0.01, math.nan, math.inf, "1", True):
        assert name in refusal(name, **{name: value})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("top_k", [-1, 0, 1 << 31], [-2, 1.5, True, (1 << 31) + 1]),
        ("min_tokens", [0, 62], [-1, 63, "2"]),
        ("max_tokens", [1, 62, 2.0, -1], [0, -2, 2.5, "1", True]),
        ("seed", [-(1 << 63), (1 << 64) - 1, 1.0], [-(1 << 63) - 1, 1 << 64, 1.5]),
        ("n", [1, 8], [0, 9, "1"]),
        ("priority", [-100, 100], [-101, 101]),
        ("stop_token_ids", [[], [0, 99], [1] * 64], [[100], [-1], ["a"], "12", [1] * 65]),
        ("logit_bias", [{}, {0: -100, 99: 100}], [{100: 1}, {-1: 1}, {1: 101}, {1: math.nan}, {1: "x"}, [1]]),
        ("stop", [[], "x", ["x"] * 64, "é" * 128], [["x"] * 65, "", [""], [5], "é" * 129]),
        ("logprobs", [True], [1, "yes"]),
        ("ignore_eos", [True], [1]),
        ("prompt_logprobs", [True], ["x"]),
        ("parallel_tool_calls", [True, False], [0, "no"]),
    ],
)
def test_limits(field, good, bad):
    for value in good:
        assert requests(SPEC, [1, 2], SamplingOptions(**{field: value}), ids=counter())
    for value in bad:
        assert field.split("_")[0] in refusal(field, **{field: value})


@pytest.mark.parametrize("name", ("max_tokens", *FLOATS))
def test_a_huge_number_is_not_repeated_to_its_sender(name):
    for sign in (1, -1):
        assert "it is a number of 3001 bits" in refusal(name, **{name: sign << 3000})
    assert refusal(name, **{name: -11}).endswith("it is -11")


def test_logit_bias_has_a_limit():
    wide = msgspec.structs.replace(SPEC, vocab=5000)
    assert params(spec=wide, logit_bias={token: 1 for token in range(1024)}).logit_bias[1023] == (1023, 1.0)
    with pytest.raises(InvalidRequest, match="1025 entries; at most 1024"):
        params(spec=wide, logit_bias={token: 1 for token in range(1025)})


def test_top_logprobs_need_logprobs():
    assert params(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert params(top_logprobs=0).top_logprobs == 0
    assert "needs logprobs" in refusal("top_logprobs", top_logprobs=1)
    assert "top_logprobs" in refusal("top_logprobs", logprobs=True, top_logprobs=21)


def test_seeds_are_drawn_or_kept():
    assert params().seed == 42
    assert params(seed=5).seed == 5
    assert params(seed=-1).seed == 42 and params(seed=(1 << 64) - 1).seed == (1 << 64) - 1
    assert params(seed=4.0).seed == 4
    assert params(seed=-(1 << 63)).seed == 1 << 63, "not that of seed 0"
    assert params(seed=(1 << 63) - 1).seed == (1 << 63) - 1


def test_the_context_bounds_prompt_and_answer():
    assert params(prompt_tokens=60).max_tokens == 4
    assert params(prompt_tokens=60, max_tokens=4).max_tokens == 4
    assert params(prompt_tokens=10, context=32).max_tokens == 22
    assert params(prompt_tokens=64, max_tokens=0, allow_empty=True).max_tokens == 0
    assert params(prompt_tokens=60, max_tokens=5).max_tokens == params(prompt_tokens=60, max_tokens=-1).max_tokens == 4
    assert params(prompt_tokens=60, max_tokens=1 << 40).max_tokens == 4, "clients that always ask for a lot"
    cut = params(prompt_tokens=60, max_tokens=32, min_tokens=20)
    assert (cut.max_tokens, cut.min_tokens) == (4, 4)
    for length, asked in ((64, None), (65, None), (64, 5), (64, -1), (65, 1)):
        with pytest.raises(ContextTooLong) as caught:
            params(prompt_tokens=length, max_tokens=asked)
        assert (caught.value.prompt_tokens, caught.value.context) == (length, 64)
        assert str(length) in str(caught.value) and "64" in str(caught.value)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="max_tokens must be from 1"):
        params(max_tokens=0)


def test_prompts_hold_ids_of_the_vocabulary():
    with pytest.raises(InvalidRequest, match="empty"):
        requests(SPEC, [], ids=counter())
    for wrong in (-1, 100):
        with pytest.raises(InvalidRequest, match=f"token id {wrong}; ids go from 0 to 99"):
            requests(SPEC, [0, wrong, 99], ids=counter())
    (request,) = requests(SPEC, [0, 99], params=RequestParams(output=OutputFormat(tools=True)), ids=counter())
    assert request.prompt == (0, 99) and request.output.tools


def test_stop_texts_are_one_or_many():
    (one,) = requests(SPEC, [1], SamplingOptions(stop="x"), ids=counter())
    (two,) = requests(SPEC, [1], SamplingOptions(stop=["x", "x", "y"]), ids=counter())
    assert (one.stop, two.stop) == (("x",), ("x", "y"))


def test_a_stop_text_that_is_a_control_token_is_a_stop_token_too():
    controls = {"<|a|>": 50, "<|b|>": 7, "<|c|>": 1_000_000}
    asked = SamplingOptions(stop=["<|a|>", "x<|b|>", "<|c|>"])
    (one,) = requests(SPEC, [1], asked, ids=counter(), controls=controls)
    (other,) = requests(SPEC, [1], asked, ids=counter())
    assert one.sampling.stop_token_ids == (*other.sampling.stop_token_ids, 50)
