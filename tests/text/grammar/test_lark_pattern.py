"""Lark grammars as patterns: what they accept, compared with Python's `re`, and why others are refused."""

from __future__ import annotations

import json
import re
import time

import pytest

from cairn.text.grammar.call_grammar import Offered, lark_of_calls
from cairn.text.grammar.grammar import Shape
from cairn.text.grammar.lark_pattern import NotRegular, pattern_of
from cairn.text.output.call_formats import FORMATS, CallFormat
from tests.text.walks import accepts, checked

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?   // a comment

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
EDIT = '*** Begin Patch\n*** Update File: a/b.py\n@@ def f():\n-\told "x"\n+\tnew \\\\ y\n*** End Patch\n'
SUM = """
%llguidance {}
?start: number (SIGN number)~1..2
number: INT | "0x"i HEXDIGIT{2}
SIGN.2: "+" | "-"
%ignore WS_INLINE
%import common (INT, HEXDIGIT)
%import common.WS_INLINE -> WS_INLINE
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, [EDIT, "*** Begin Patch\n*** Delete File: x\n*** End Patch"], ["", EDIT[4:], EDIT + "x", "*** Begin"]),
        (SUM, ["1+2", " 12 -  3 + 4 ", "0X1F+1"], ["1", "1+2+3+4", "0x1+1", "1+\n2", "1 2+3"]),
        ('start: "a".."c" | /[x-z]+/i ["!"]\n', ["a", "c", "XyZ!", "x"], ["d", "a!", "", "ab"]),
        ('start: A*\nA: "(" B ")"\nB: | "b"\n', ["", "()", "(b)()"], ["(", "bb"]),
        ('start: "a/b\\n" /\\/x|y/\n', ["a/b\n/x", "a/b\ny"], ["a/by", "a/b\nx"]),
        (r'start: "\u00e9\x41\U0001F600\ud83d\ude01"', ["éA😀😁"], ["u00e9x41U0001F600ud83dude01"]),
        (r'start: "\b\f\x00\x7f\u2028\"\\\/"', ['\b\f\0\x7f\u2028"\\/'], ['bf\0\x7f\u2028"\\/']),
        (r'start: "\x00".."\x1f" | "\u00E9"i', ["\0", "\x0b", "\x1f", "é", "É"], [" ", "x", "u"]),
    ],
)
def test_a_grammar_without_recursion_is_a_pattern(grammar: str, good: list[str], bad: list[str]) -> None:
    pattern = re.compile(pattern_of(grammar))
    assert all(pattern.fullmatch(text) for text in good)
    assert not any(pattern.fullmatch(text) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"\n', "comes back to its rule start"),
        ("start: a\na: b\nb: a\n", "comes back to its rule"),
        ("start: nothing\n", "nothing is"),
        ('begin: "x"\n', "no rule start"),
        ("start: %json {}\n", "not read here"),
        ('start: <think> "x"\n', "not read here"),
        ('start[lazy]: "x"\n', "awaited"),
        ('start: "x" & "y"\n', "not read here"),
        ('start: ("x" }\n', "awaited"),
        ('start: ("x"', "ends in the middle"),
        ("%import other.X\n", "not common"),
        ("%import common.NOTHING\n", "not known here"),
        ('start: "x"\nstart: "y"\n', "twice"),
        (r'start: "\d"', r"has the escape '\\d',"),
        (r'start: "a\x4"', r"has the escape '\\x',"),
        (r'start: "\U00110000"', r"has the escape '\\U00110000',"),
        (r'start: "\ud800"', "half a surrogate"),
        ('start: "\\\ud800"', r"has the escape '\\\ud800',"),
        ("start: " + "(" * 500 + '"x"' + ")" * 500 + "\n", "nested too deeply"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40)) + 'a40: "x"\n', "more than 8192"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(400)) + 'r400: "x"\n', "nested too deeply"),
    ],
)
def test_a_grammar_without_a_pattern_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(NotRegular, match=re.escape(why)):
        pattern_of(grammar)


@pytest.mark.parametrize("form", FORMATS, ids=lambda one: one.name)
def test_escapes_in_literals_are_those_of_llguidance_in_every_form(form: CallFormat) -> None:
    said = "a\u00e9A\b\u2028\x0b/"
    pattern = pattern_of(r'start: "a\u00e9\x41" "\b\u2028\x0b\/"')
    text = {"type": "string", "pattern": f"^(?:{pattern})$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    held = checked(Shape(calls=lark_of_calls(form, [Offered("f", schema)], required=True, parallel=False)))
    assert accepts(held, _call(form, {"f": said})), said
    assert not accepts(held, _call(form, {"f": said.replace("\u00e9", "u00e9")}))


@pytest.mark.parametrize("form", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, [EDIT], ["*** Begin Patch\nrm -rf\n*** End Patch", ""]),
        (r"start: /[A-Z]:[\\\/][a-z]+/", ["C:\\a", "C:/a"], ["C:a", "C:\\/a"]),
    ],
    ids=["patch", "slashes"],
)
def test_a_call_is_held_to_it_in_every_form(form: CallFormat, grammar: str, good: list[str], bad: list[str]) -> None:
    """Both as JSON and as plain text between tags."""
    text = {"type": "string", "pattern": f"^(?:{pattern_of(grammar)})$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    offered = [Offered("apply_patch", schema)]
    held = checked(Shape(calls=lark_of_calls(form, offered, required=True, parallel=False)))

    def called(given: str) -> str:
        said = {"apply_patch": given}
        return _call(form, said)

    assert all(accepts(held, called(one)) for one in good)
    assert not any(accepts(held, called(one)) for one in bad)


def _call(form: CallFormat, said: dict[str, str]) -> str:
    ((name, pattern),) = said.items()
    kind, begin, end = form.kind, form.begin, form.end
    text = json.dumps(pattern, ensure_ascii=False)
    if kind == "object":
        head = form.head.replace("{index}", "0")
        inner = f'{{{head}{json.dumps(name)}, "{form.arguments}": {{"input": {text}}}}}'
        inner = f"[{inner}]" if form.listed else inner
    elif kind == "channel":
        inner = f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"input": {text}}}'
    elif kind == "python":
        inner = f"[{name}(input={text})]"
    else:
        opened = form.open.replace("{name}", name).replace("{index}", "0")
        if kind == "named":
            inner = f'{{"input": {text}}}'
        elif kind == "braces":
            inner = f"{{input:{form.value_end}{pattern}{form.value_end}}}"
        else:
            inner = f"{form.key[0]}input{form.key[1]}{pattern}{form.value_end}"
        inner = opened + inner + form.close
    return begin + inner + end


def test_a_long_or_deep_grammar_is_no_pattern() -> None:
    rules = [f"r{at}: {'(' * 60}r{at + 1}{')' * 60}" for at in range(60)]
    deep = "\n".join(["start: r0", *rules, 'r60: "x"'])
    for grammar in (deep, "start: " + "(" * 30_000, "start: " + "a " * 40_000, "%ignore A\n" * 100_000, '"' * 65_000):
        began = time.process_time()
        with pytest.raises(NotRegular):
            pattern_of(grammar)
        assert time.process_time() - began < 2.0
