"""Calls of `LLM`: conversations, classes as answers, functions as tools, batches, keywords."""

import asyncio
import dataclasses
import enum
import functools
import inspect
import json
import re
import subprocess
import sys
import textwrap
import threading
import typing
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from cairn import LLM, AsyncLLM
from cairn.config.config import Config
from cairn.config.option import OTHER_NAMES, local_options, options
from cairn.config.resolve import resolve
from cairn.entrypoints.answer import ToolCall
from cairn.entrypoints.inputs import conversations, form_of, offered_tools
from cairn.entrypoints.keywords import ModelKeywords, SamplingKeywords
from cairn.entrypoints.progress import BatchProgress
from cairn.frontend.request_options import SamplingOptions
from cairn.types.errors import ConfigError, GenerationFailed, InvalidRequest, ModelError, Unavailable
from tests.entrypoints.conftest import SMALL
from tests.scripted_model import write_scripted

GREEDY = {"temperature": 0, "max_tokens": 8}
HELLO = [{"role": "user", "content": "Hello, who are you?"}]


# --------------------------------------------------------------------------------------------- a running event loop


async def test_calls_work_inside_a_running_event_loop(tmp_path):
    """As in Jupyter, where every cell runs in one."""
    with LLM("demo", **SMALL) as llm:
        assert llm.chat("Hello", **GREEDY).text
        assert "".join(piece.text for piece in llm.chat("Hello", stream=True, **GREEDY))
    with pytest.raises(ModelError, match="no folder"):
        LLM("nosuch")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(str(tmp_path))
    assert not [thread for thread in threading.enumerate() if thread.name == "cairn-llm"]


def test_calls_work_in_the_shell_of_notebooks():
    """With IPython's own way to run a cell if it is installed, else with code compiled with a top-level await."""
    script = textwrap.dedent("""
        import ast, asyncio, inspect
        from cairn import LLM, AsyncLLM

        async def cells():
            scope = {"LLM": LLM, "AsyncLLM": AsyncLLM}
            for cell in (
                "llm = LLM('demo', threads=1, kv_gb=0.05)\\nprint(len(llm.chat('Hi', max_tokens=3).tokens) > 0)",
                "other = await AsyncLLM.start('demo', threads=1, kv_gb=0.05)",
                "print(len((await other.chat('Hi', max_tokens=3)).tokens) > 0)\\nawait other.close()\\nllm.close()",
            ):
                code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                ran = eval(code, scope)
                if inspect.iscoroutine(ran):
                    await ran

        asyncio.run(cells())
    """)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


async def test_a_model_that_was_not_started_says_how_to_start_it():
    llm = AsyncLLM("demo", **SMALL)
    with pytest.raises(Unavailable, match=r"async with AsyncLLM\(\.\.\.\) as llm.*await AsyncLLM.start"):
        await llm.chat(HELLO)
    await llm.__aenter__()
    await llm.close()
    with pytest.raises(Unavailable, match="the model was closed"):
        await llm.chat(HELLO)


async def test_the_async_twin_streams_as_the_other_does():
    async with AsyncLLM("demo", **SMALL) as llm:
        whole = await llm.chat(HELLO, **GREEDY)
        stream = await llm.chat(HELLO, stream=True, **GREEDY)
        assert "".join([piece.text async for piece in stream]) == whole.text == stream.answer.text
        async with await llm.generate("The cat", stream=True, max_tokens=1900, ignore_eos=True) as stream:
            await anext(stream)
        with pytest.raises(InvalidRequest, match="one conversation"):
            await llm.chat([HELLO, HELLO], stream=True)


# ---------------------------------------------------------------------------------------------------- conversations


def test_a_text_is_a_users_message(llm):
    assert llm.chat("Hello, who are you?", **GREEDY).tokens == llm.chat(HELLO, **GREEDY).tokens
    stream = llm.chat("Hello, who are you?", stream=True, **GREEDY)
    assert "".join(piece.text for piece in stream) == llm.chat(HELLO, **GREEDY).text


def test_several_conversations_are_answered_in_order(llm):
    alone = [llm.chat(text, **GREEDY).tokens for text in ("Hello", "What is Cairn?")]
    both = llm.chat(["Hello", [{"role": "user", "content": "What is Cairn?"}]], **GREEDY)
    assert [answer.tokens for answer in both] == alone
    assert [answer.tokens for answer in llm.chat((list(one) for one in [HELLO]), **GREEDY)] == [
        llm.chat(HELLO, **GREEDY).tokens
    ]
    with pytest.raises(InvalidRequest, match="one conversation, not a list"):
        llm.chat(["Hello"], stream=True)
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must be a list of objects"):
        llm.chat(["Hello", 5])


def test_a_conversation_is_read_once():
    read, several = conversations({"role": "user", "content": text} for text in "ab")
    assert not several and [one["content"] for one in read[0]] == ["a", "b"]


# ------------------------------------------------------------------------------------------------ classes as answers


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)

    @field_validator("name")
    @classmethod
    def known(cls, value):
        if value == "Nobody":
            raise ValueError("nobody is called so")
        return value


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Entry(TypedDict):
    word: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Paint(BaseModel):
    colour: Colour
    thick: bool


def scripted(folder, text, pieces=None):
    return LLM(str(write_scripted(folder / "says.gguf", pieces or list(text))), threads=1, kv_gb=0.05)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (Person, '{"name":"Ada","age":36}', Person(name="Ada", age=36)),
        (list[Person], '[{"name":"Ada","age":36}]', [Person(name="Ada", age=36)]),
        (Point, '{"x":1,"y":2}', Point(1, 2)),
        (Entry, '{"word":"a"}', {"word": "a"}),
        (Literal["yes", "no"], '"yes"', "yes"),
        (Colour, '"blue"', Colour.BLUE),
    ],
)
def test_an_answer_follows_a_class_and_is_parsed_into_it(tmp_path, form, text, expected):
    with scripted(tmp_path, text) as llm:
        whole = llm.chat("Say", response_format=form, temperature=0)
        assert (whole.text, whole.parsed) == (text, expected)
        stream = llm.chat("Say", response_format=form, temperature=0, stream=True)
        next(stream)
        assert stream.answer.parsed is None  # not complete
        list(stream)
        assert stream.answer.parsed == expected
        (many,) = llm.chat(["Say"], response_format=form, temperature=0)
        assert many.parsed == expected
        assert llm.generate("x", response_format=form, temperature=0).parsed == expected


def test_the_schema_is_enforced_on_an_unwilling_model(llm):
    """The class becomes a schema that is enforced, not only asked for."""
    assert llm.chat("Hello", response_format=Colour, temperature=0).parsed in list(Colour)
    assert isinstance(llm.chat("Hello", response_format=Paint, temperature=0, max_tokens=400).parsed, Paint)


def test_a_class_has_no_fields_that_it_does_not_name(llm):
    """pydantic allows extra fields, and a small model invents one after another."""
    form, _ = form_of(list[Person])
    assert form["json_schema"]["schema"]["$defs"]["Person"]["additionalProperties"] is False
    loose, _ = form_of(dict[str, int])
    assert loose["json_schema"]["schema"]["additionalProperties"] == {"type": "integer"}


def test_an_unparsable_answer_says_why_when_parsed(tmp_path):
    with scripted(tmp_path, '{"name":"Nobody","age":36}') as llm:
        cut = llm.chat("Say", response_format=Person, max_tokens=4)
        assert cut.text == '{"na'
        with pytest.raises(GenerationFailed, match="raise max_tokens"):
            cut.parsed  # noqa: B018
        refused = llm.chat("Say", response_format=Person, temperature=0)
        with pytest.raises(GenerationFailed, match="name: Value error, nobody is called so"):
            refused.parsed  # noqa: B018
        assert llm.chat("Say", max_tokens=2).parsed is None
        with pytest.raises(InvalidRequest, match="response_format: no JSON schema of LLM"):
            llm.chat("Say", response_format=LLM)
    assert form_of({"type": "text"}) == ({"type": "text"}, None)


# ------------------------------------------------------------------------------------------------ functions as tools


def weather(city: str, unit: Literal["C", "F"] = "C", days: Annotated[int, Field(description="How many.")] = 1) -> dict:
    """Tell the weather of a city.

    Args:
        city: its name,
            without the country
        unit (str): of the temperature

    Returns:
        what it is: a dict
    """
    return {"city": city, "unit": unit, "days": days}


def test_a_function_is_a_tool():
    (tool,) = offered_tools([weather]).tools
    function = tool["function"]
    assert (function["name"], function["description"]) == ("weather", "Tell the weather of a city.")
    parameters = function["parameters"]
    assert parameters["required"] == ["city"] and parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert {name: value["description"] for name, value in parameters["properties"].items()} == {
        "city": "its name, without the country",
        "unit": "of the temperature",
        "days": "How many.",
    }


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x, "use def"),
        (functools.partial(weather, "here"), "needs a name"),
        (print, "cannot be described|named parameters only"),
        ("weather", "or functions"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named(llm, function, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        llm.chat("Hello", [function])
    assert caught.value.field == "tools"

    def loose(*args: int) -> None: ...

    with pytest.raises(InvalidRequest, match="the function loose, must have named parameters only"):
        llm.chat("Hello", [loose])


def test_the_model_calls_a_function_and_reads_what_it_returned(tmp_path):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    with scripted(tmp_path, call, re.findall(r"\w+|\W+", call)) as llm:
        answer = llm.chat("Weather?", [weather], temperature=0)
        (asked,) = answer.tool_calls
        assert asked.run() == {"city": "Oslo", "unit": "C", "days": 2}
        said = asked.message(asked.run())
        assert said == {
            "role": "tool",
            "tool_call_id": asked.id,
            "name": "weather",
            "content": '{"city":"Oslo","unit":"C","days":2}',
        }
        assert answer.parsed is None and json.dumps(answer.message)
        again = llm.chat([{"role": "user", "content": "Weather?"}, answer.message, said], [weather], temperature=0)
        assert again.tokens
        stream = llm.chat("Weather?", [weather], temperature=0, stream=True)
        list(stream)
        assert stream.answer.tool_calls[0].run()["city"] == "Oslo"


def test_calls_that_do_not_fit_are_refused():
    functions = offered_tools([weather]).functions
    with pytest.raises(InvalidRequest, match=r"called weather with arguments that do not fit: .*city"):
        ToolCall("1", "weather", '{"days": 2}', functions["weather"]).run()
    with pytest.raises(InvalidRequest, match="called weather with arguments that do not fit"):
        ToolCall("1", "weather", "{", functions["weather"]).run()
    with pytest.raises(InvalidRequest, match=r"pass functions as tools.*json.loads"):
        ToolCall("1", "other", "{}").run()


async def test_an_async_function_is_awaited():
    async def later(x: int) -> int:
        """Say it later."""
        await asyncio.sleep(0)
        return x + 1

    call = ToolCall("1", "later", '{"x": 2}', offered_tools([later]).functions["later"])
    assert await call.run() == 3
    assert call.message("text")["content"] == "text"


# ------------------------------------------------------------------------------------------------------------ batches


def test_a_batch_shows_how_far_it_is(llm, capfd):
    assert len(llm.generate(["a", "b", "c"], progress_bar=True, **GREEDY)) == 3
    said = capfd.readouterr().err
    assert "3/3" in said and re.search(r"[1-9][\d,]* tokens/s", said)
    assert len(llm.chat(["a", "b"], progress_bar=True, **GREEDY)) == 2
    assert "2/2" in capfd.readouterr().err
    llm.generate(["a", "b"], **GREEDY)  # no progress bar: stderr is no terminal
    llm.generate(["a", "b"], progress_bar=False, **GREEDY)
    assert capfd.readouterr().err == ""


def test_the_bar_counts_tokens_by_the_clock(capfd):
    class Ticks:
        at = 0.0

        def now(self):
            self.at += 1
            return self.at

        def time_ns(self):
            return 0

    with BatchProgress(1, True, Ticks()) as bar:
        bar.tokens(50)
        bar.answered()
    assert "50 tokens/s" in capfd.readouterr().err


def test_a_batch_in_a_terminal_shows_its_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", type("Terminal", (), {"isatty": lambda self: True, "write": len})())
    assert BatchProgress(2, None)._shown and not BatchProgress(1, None)._shown and not BatchProgress(2, False)._shown


# ----------------------------------------------------------------------------------------------------------- keywords


def test_keywords_are_those_of_the_options():
    """Each has a type, so that editors complete it and `mypy` checks it."""
    assert tuple(typing.get_type_hints(SamplingKeywords)) == SamplingOptions.__struct_fields__
    for name, kind in typing.get_type_hints(SamplingOptions).items():
        wanted = typing.get_type_hints(SamplingKeywords)[name]
        assert wanted == kind, name
    assert ("model", *typing.get_type_hints(ModelKeywords)) == local_options()
    kinds = typing.get_type_hints(Config)
    for name, kind in typing.get_type_hints(ModelKeywords).items():
        assert kind == kinds[name], name


def test_help_shows_every_option():
    for call in (LLM.chat, AsyncLLM.chat, LLM.generate, AsyncLLM.generate):
        said = inspect.getdoc(call)
        assert all(f"    {name} (" in said for name in SamplingOptions.__struct_fields__)
    for kind in (LLM, AsyncLLM):
        said = inspect.getdoc(kind)
        assert all(f"    {name} (" in said for name in local_options() if name != "model")
    assert "temperature (float): 0 to 10; 0 always takes the likeliest token." in inspect.getdoc(LLM.chat)
    assert "Longest context in tokens" in inspect.getdoc(LLM)


@pytest.mark.parametrize("name", ["n_ctx", "num_ctx", "max_model_len"])
def test_other_names_of_an_option_get_the_right_one(llm, name, tmp_path):
    with pytest.raises(ConfigError, match=f"unknown option '{name}': it is called context here"):
        LLM("demo", **{name: 512})
    with pytest.raises(InvalidRequest, match=f"'{name}': context is an option of the model; give it to LLM"):
        llm.chat("Hello", **{name: 512})
    (tmp_path / "cairn.toml").write_text(f"{name} = 512\n")
    with pytest.raises(ConfigError, match="it is called context here"):
        LLM("demo")
    (tmp_path / "cairn.toml").unlink()
    with pytest.raises(ConfigError, match="it is called CAIRN_CONTEXT here"):
        resolve({}, {f"CAIRN_{name.upper()}": "512"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", "it is called max_tokens here"),
        ("num_predict", "it is called max_tokens here"),
        ("repeat_penalty", "it is called repetition_penalty here"),
        ("sampling_params", "give its fields as keywords"),
        ("threads", "threads is an option of the model"),
        ("temprature", r"did you mean temperature\?"),
        ("mesages", r"did you mean messages\?"),
    ],
)
def test_other_names_of_a_call_get_the_right_one(llm, name, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        llm.generate("Hello", **{name: 1})
    assert caught.value.field == name


def test_the_beginning_of_a_name_gets_the_whole_one(llm):
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        llm.chat("hi", temp=1)


def test_names_of_other_libraries_say_what_to_import():
    for name, said in (("SamplingParams", "give its fields to the call"), ("Llama", "it is called LLM")):
        with pytest.raises(ImportError, match=said):
            exec(f"from cairn import {name}")
    assert not hasattr(__import__("cairn"), "anything_else")


@pytest.mark.parametrize("message", [[{"role": "user", "text": "hi"}], ["hi", [{"role": "user"}]]])
def test_a_message_without_content_is_refused(llm, message):
    """It would be answered as if nothing had been said."""
    with pytest.raises(InvalidRequest, match=r"has no content; it must look like .*its fields are: role"):
        llm.chat(message)


def test_a_model_and_an_answer_show_what_matters(llm):
    assert repr(llm).startswith("LLM('")
    answer = llm.chat("hi", **GREEDY)
    shown = repr(answer)
    assert shown.startswith(f"Answer(text={answer.text!r}, ") and f"{len(answer.tokens)} tokens" in shown
    assert f"finish_reason='{answer.finish_reason}'" in shown and "prompt_tokens=" in shown and "logprobs" not in shown


def test_an_option_that_is_for_a_server_is_not_suggested():
    assert set(OTHER_NAMES.values()) <= {option.name for option in options()}
    with pytest.raises(ConfigError, match=r"unknown option 'agentdir'$"):
        LLM("demo", agentdir="x")
    with pytest.raises(ConfigError, match="the option device chooses where it is computed"):
        LLM("demo", n_gpu_layers=99)
    with pytest.raises(ConfigError, match="it is called tp here"):
        LLM("demo", tensor_parallel_size=2)
