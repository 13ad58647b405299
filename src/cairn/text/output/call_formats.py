"""How models write calls of tools: one record a form, from which its parser and its grammar are made.

A section of calls stands between `begin` and `end`; a call between `open`, which holds the tool's name, and `close`.
What stands between those two is of one of six kinds:

    object    {"name": "f", "arguments": {"x": 1}}, perhaps several in a list
    named     the arguments alone, as JSON
    tagged    each argument between tags, a text as it is and anything else as JSON
    python    f(x=1, y="a")
    braces    {x:1,y:<|"|>a<|"|>}, with marks around texts
    channel   the arguments alone, in a message on a channel (`harmony`)

Which form a model uses is said by what comes with it (`declared_call_format`), or seen in its chat template: by signs,
for the forms of the table below, or in how it writes calls (`derived_call_format`). `hermes`, `qwen_xml` and `llama`
are read by `tool_parser`, whatever the template, `harmony` by the module of its name; the others by `call_section`,
where the template shows them.
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
"""What in a form may be one token of the model."""
_LAST_KEY = re.compile(r'"([^"]+)"\s*:\s*\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls. Line breaks and blanks in it are written, and need not be read."""

    name: str
    signs: tuple[str, ...]
    """A template that shows this form holds all of these."""
    kind: Kind
    begin: str = ""
    """Before the first call; "" where an answer is a call and nothing else."""
    end: str = ""
    """After the last one; "" where the answer ends there."""
    open: str = ""
    """Before a call, with {name} where its name stands, {index} for a number, {id} for letters and digits; of objects
    and of Python nothing."""
    close: str = ""
    """Behind it; of objects and of Python nothing."""
    joint: str = ""
    """Between two calls."""
    apart: str = "\n"
    """Between two sections."""
    listed: bool = False
    """Objects stand in a list."""
    others: tuple[tuple[str, str], ...] = ()
    """What models write in place of `begin` and `end` now and then."""
    id_mark: str = ""
    """Stands between a call's name and an id that the model writes, where it writes one."""
    single: bool = False
    """A section holds one call, and several stand one behind the other."""
    head: str = '"name": '
    """What an object holds before the name of its tool, with {index} for a number."""
    arguments: str = "arguments"
    """What an object calls its arguments."""
    tail: str = "}"
    """Behind the arguments of an object."""
    key: tuple[str, str] = ("", "")
    """Before and behind the name of an argument in tags; {kind} where the second says whether it is a text."""
    words: tuple[str, str] = ("", "")
    """What stands there of a text and of anything else."""
    value_end: str = ""
    """Behind its value; in braces what stands around a text."""
    plain: bool = False
    """`tool_parser` reads it."""

    @property
    def named(self) -> str:
        """What an object calls the name of its tool."""
        found = _LAST_KEY.search(self.head)
        return found[1] if found else "name"

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin a section, without the blanks around them."""
        return tuple(mark for one in (self.begin, *(begin for begin, _ in self.others)) if (mark := one.strip()))

    @property
    def bare_name(self) -> bool:
        """Nothing but white space stands behind a call's name, so that any text may look like one."""
        return self.kind in ("named", "tagged") and not self.open.partition("{name}")[2].strip()

    @property
    def ids_last(self) -> bool:
        """Models may write the id of a call behind its arguments, so that it is not known before."""
        return self.kind == "object" and (self.begin.strip() == "[TOOL_CALLS]" or '"id"' in self.tail)

    @property
    def tags(self) -> ValueTags:
        """The tags of its arguments."""
        return _tags_of(self)

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of it that may be control tokens of a model, and must be read as text."""
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
"""The first whose signs a template holds is its form."""

BY_NAME = {one.name: one for one in FORMATS}
_BARE = re.compile(r"""\{\s*\\?"name\\?":""")
"""How a template writes the beginning of a call that has no tags."""


def format_of(template: str) -> CallFormat | None:
    """The form in which a template shows calls; None where it shows none that is known."""
    for one in FORMATS:
        if one.signs and all(sign in template for sign in one.signs):
            return one
    return BY_NAME["llama"] if _BARE.search(template) else None


@functools.lru_cache(maxsize=256)
def form_by(name: str) -> CallFormat | None:
    """The form that `name_of` tells; None for "" and for what is none."""
    if not name.startswith("{"):
        return BY_NAME.get(name)
    try:
        return msgspec.json.decode(name, type=CallFormat)
    except msgspec.DecodeError:  # of another version
        return None


def name_of(form: CallFormat) -> str:
    """What a form is told by: its name in the table, or all of it."""
    return form.name if BY_NAME.get(form.name) is form else msgspec.json.encode(form).decode()


def markers_of(formats: Iterable[CallFormat]) -> tuple[str, ...]:
    """The markers of several forms."""
    return tuple(dict.fromkeys(marker for one in formats for marker in one.markers))
