"""The formats in which models write tool calls: one record per format, used by its parser and its grammar.

A section of calls is between `begin` and `end`, a call between `open`, which holds the tool's name, and `close`. The
text between those two has one of six kinds:

    object    {"name": "f", "arguments": {"x": 1}}, perhaps several in a list
    named     the arguments alone, as JSON
    tagged    each argument between tags, a text unchanged and any other value as JSON
    python    f(x=1, y="a")
    braces    {x:1,y:<|"|>a<|"|>}, with marks around texts
    channel   the arguments alone, in a message on a channel (`harmony`)

A model's format is declared in its files (`declared_call_format`), or detected in its chat template: by signs, for the
formats of the table below, or from how it renders calls (`derived_call_format`). `hermes`, `qwen_xml` and `llama` are
read by `tool_parser` with every template, `harmony` by the module of its name, the others by `section_reader` if the
template shows them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from cairn.text.output.tagged_values import ValueTags

Kind = Literal["object", "named", "tagged", "python", "braces", "channel"]

CONTROL = re.compile(r"<[^<>\s=\"]+>|\[[A-Z_]+\]")
"""A part of a format that may be one token of the model."""
_LAST_KEY = re.compile(r'"([^"]+)"\s*:\s*\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls. Its line breaks and blanks are generated, but not required when parsing."""

    name: str
    signs: tuple[str, ...]
    """Texts that all occur in a template with this format."""
    kind: Kind
    begin: str = ""
    """Text before the first call; "" if an answer is a call and nothing else."""
    end: str = ""
    """Text after the last call; "" if the answer ends there."""
    open: str = ""
    """Text before a call's arguments, with {name}, {index} (a number) and {id} (letters and digits); empty for objects
    and Python."""
    close: str = ""
    """Text after a call; empty for objects and Python."""
    joint: str = ""
    """Text between two calls."""
    apart: str = "\n"
    """Text between two sections."""
    listed: bool = False
    """Whether objects are in a list."""
    others: tuple[tuple[str, str], ...] = ()
    """Alternatives to (`begin`, `end`) that models sometimes write."""
    id_mark: str = ""
    """Text between a call's name and an optional id written by the model."""
    single: bool = False
    """Whether a section holds one call, so that several calls are several sections."""
    head: str = '"name": '
    """Text in an object before the tool's name, with {index} for a number."""
    arguments: str = "arguments"
    """Member name of an object's arguments."""
    tail: str = "}"
    """Text after the arguments of an object."""
    key: tuple[str, str] = ("", "")
    """Texts before and after an argument's name in tags; the second has {kind} if it states whether the value is a
    text."""
    words: tuple[str, str] = ("", "")
    """The word for {kind} of a text and of any other value."""
    value_end: str = ""
    """Text after a value in tags; in braces the mark around a text."""
    plain: bool = False
    """Whether `tool_parser` reads it."""

    @property
    def named(self) -> str:
        """Member name of an object's tool name."""
        found = _LAST_KEY.search(self.head)
        return found[1] if found else "name"

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a section, without white space around them."""
        return tuple(mark for one in (self.begin, *(begin for begin, _ in self.others)) if (mark := one.strip()))

    @property
    def bare_name(self) -> bool:
        """Whether only white space follows a call's name, so that any text may look like a call."""
        return self.kind in ("named", "tagged") and not self.open.partition("{name}")[2].strip()

    @property
    def ids_last(self) -> bool:
        """Whether models may write a call's id after its arguments."""
        return self.kind == "object" and (self.begin.strip() == "[TOOL_CALLS]" or '"id"' in self.tail)

    @property
    def tags(self) -> ValueTags:
        """The tags of its arguments."""
        return _tags_of(self)

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts that may be control tokens of a model and must be read as text."""
        others = [mark for pair in self.others for mark in pair]
        texts = [self.begin, self.end, self.open, self.close, self.joint, *self.key, self.value_end, self.id_mark]
        written = [*texts, *others]
        parts = [part.replace("{name}", "").replace("{id}", "") for part in written]
        found = [one for part in parts for one in CONTROL.findall(part)]
        return tuple(dict.fromkeys([*found, self.value_end] if self.kind == "braces" else found))


@functools.lru_cache(maxsize=64)
def _tags_of(form: CallFormat) -> ValueTags:
    opened = form.open.partition("{name}")[0].strip()
    begins = [opened] if len(opened) > 1 else []
    begins += [] if form.close.strip() else form.begins
    return ValueTags(form.value_end, form.key, form.close, form.end, begins)


FORMATS: tuple[CallFormat, ...] = (
    CallFormat(name="harmony", signs=("<|channel|>", "<|message|>"), kind="channel", single=True),
    CallFormat(
        name="gemma",
        signs=("<|tool_call>", "<tool_call|>"),
        kind="braces",
        begin="<|tool_call>",
        end="<tool_call|>",
        open="call:{name}",
        value_end='<|"|>',
        apart="",
        single=True,
    ),
    CallFormat(
        name="function_gemma",
        signs=("<start_function_call>",),
        kind="braces",
        begin="<start_function_call>",
        end="<end_function_call>",
        open="call:{name}",
        value_end="<escape>",
        apart="",
        single=True,
    ),
    CallFormat(
        name="cohere",
        signs=("<|START_ACTION|>",),
        kind="object",
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        joint=",\n",
        head='"tool_call_id": "{index}", "tool_name": ',
        arguments="parameters",
        listed=True,
    ),
    CallFormat(
        name="kimi",
        signs=("<|tool_calls_section_begin|>",),
        kind="named",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        open="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
        others=(("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),),
    ),
    CallFormat(
        name="deepseek_v3",
        signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"),
        kind="named",
        begin="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        end="<\uff5ctool\u2581calls\u2581end\uff5c>",
        open="<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n```json\n",
        close="\n```<\uff5ctool\u2581call\u2581end\uff5c>",
        joint="\n",
    ),
    CallFormat(
        name="deepseek_v31",
        signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        kind="named",
        begin="<\uff5ctool\u2581calls\u2581begin\uff5c>",
        end="<\uff5ctool\u2581calls\u2581end\uff5c>",
        open="<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>",
        close="<\uff5ctool\u2581call\u2581end\uff5c>",
    ),
    CallFormat(
        name="mistral_v11",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        kind="named",
        begin="[TOOL_CALLS]",
        open="{name}[ARGS]",
        id_mark="[CALL_ID]",
        joint="[TOOL_CALLS]",
    ),
    CallFormat(name="mistral", signs=("[TOOL_CALLS]",), kind="object", begin="[TOOL_CALLS]", joint=", ", listed=True),
    CallFormat(
        name="phi",
        signs=("<|tool_call|>", "<|/tool_call|>"),
        kind="object",
        begin="<|tool_call|>",
        end="<|/tool_call|>",
        joint=", ",
        listed=True,
    ),
    CallFormat(name="granite", signs=("<|tool_call|>",), kind="object", begin="<|tool_call|>", joint=", ", listed=True),
    CallFormat(
        name="nemotron",
        signs=("<TOOLCALL>",),
        kind="object",
        begin="<TOOLCALL>",
        end="</TOOLCALL>",
        joint=", ",
        listed=True,
    ),
    CallFormat(
        name="jamba",
        signs=("<tool_calls>",),
        kind="object",
        begin="<tool_calls>",
        end="</tool_calls>",
        joint=", ",
        listed=True,
    ),
    CallFormat(
        name="lfm2",
        signs=("<|tool_call_start|>",),
        kind="python",
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
        joint=", ",
    ),
    CallFormat(
        name="minimax",
        signs=("<minimax:tool_call>",),
        kind="tagged",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        open='<invoke name="{name}">\n',
        close="</invoke>\n",
        key=('<parameter name="', '">'),
        value_end="</parameter>\n",
    ),
    CallFormat(
        name="seed",
        signs=("<seed:tool_call>",),
        kind="tagged",
        begin="<seed:tool_call>\n",
        end="</seed:tool_call>",
        open="<function={name}>\n",
        close="</function>\n",
        key=("<parameter=", ">"),
        value_end="</parameter>\n",
    ),
    CallFormat(
        name="glm",
        signs=("<tool_call>", "<arg_key>"),
        kind="tagged",
        begin="<tool_call>",
        end="</tool_call>",
        open="{name}\n",
        key=("<arg_key>", "</arg_key>\n<arg_value>"),
        value_end="</arg_value>\n",
        single=True,
    ),
    CallFormat(
        name="qwen_xml",
        signs=("<tool_call>", "<function="),
        kind="tagged",
        begin="<tool_call>\n",
        end="</tool_call>",
        open="<function={name}>\n",
        close="</function>\n",
        key=("<parameter=", ">\n"),
        value_end="\n</parameter>\n",
        single=True,
        plain=True,
    ),
    CallFormat(
        name="hermes",
        signs=("<tool_call>",),
        kind="object",
        begin="<tool_call>\n",
        end="\n</tool_call>",
        single=True,
        plain=True,
    ),
    CallFormat(name="llama", signs=(), kind="object", arguments="parameters", single=True, plain=True),
)
"""All formats; the first whose signs occur in a template is its format."""

BY_NAME = {one.name: one for one in FORMATS}
_BARE = re.compile(r"""\{\s*\\?"name\\?":""")
"""The beginning of a call without tags in a template's source."""


def format_of(template: str) -> CallFormat | None:
    """Return the known format in which a template shows calls; None if there is none."""
    for one in FORMATS:
        if one.signs and all(sign in template for sign in one.signs):
            return one
    return BY_NAME["llama"] if _BARE.search(template) else None


@functools.lru_cache(maxsize=256)
def form_by(name: str) -> CallFormat | None:
    """Return the format for a text of `name_of`; None for "" and for an unknown format."""
    if not name.startswith("{"):
        return BY_NAME.get(name)
    try:
        return msgspec.json.decode(name, type=CallFormat)
    except msgspec.DecodeError:  # written by another version of Cairn
        return None


def name_of(form: CallFormat) -> str:
    """Return a text that identifies a format: its name in the table, or the whole format as JSON."""
    return form.name if BY_NAME.get(form.name) is form else msgspec.json.encode(form).decode()


def markers_of(formats: Iterable[CallFormat]) -> tuple[str, ...]:
    """Return the distinct markers of several formats."""
    return tuple(dict.fromkeys(marker for one in formats for marker in one.markers))
