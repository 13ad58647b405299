"""Small chat templates that write calls in many formats: the known ones of the table, and some that are in none."""

from __future__ import annotations

from typing import Any

from cairn.text.chat.derived_call_format import derive_form
from cairn.text.chat.template_traits import OFFERED, Message, find_traits
from cairn.text.chat.written_calls import CHECKS, written_by
from cairn.text.output.call_formats import CallFormat
from cairn.text.render.render_process import environment

EACH = "{% for call in m.tool_calls %}{% set c = call.function %}"
_FIRST = "{% set c = m.tool_calls[0].function %}"
_ARGUMENTS = "{% for k, v in c.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_COMMA = "{% if not loop.last %}, {% endif %}"
_BRACED = (
    "{%- macro braced(v) -%}{%- if v is string -%}MARK{{ v }}MARK{%- elif v is mapping -%}"
    "{ {%- for k, one in v.items() -%}{{ k }}:{{ braced(one) }}{%- if not loop.last -%},{%- endif -%}{%- endfor -%} }"
    "{%- elif v is sequence -%}[{%- for one in v -%}{{ braced(one) }}{%- if not loop.last -%},{%- endif -%}"
    "{%- endfor -%}]{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)


def _deepseek(before: str, open: str, close: str) -> str:
    begin, end = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    calls = f"{EACH}{begin}{open}{{{{ c.arguments | tojson }}}}{close}{end}{before}{{% endfor %}}"
    return f"<\uff5ctool\u2581calls\u2581begin\uff5c>{calls}<\uff5ctool\u2581calls\u2581end\uff5c>"


def _list(begin: str, end: str) -> str:
    return f"{begin}[{EACH}{_JSON}{_COMMA}{{% endfor %}}]{end}"


SEP = "<\uff5ctool\u2581sep\uff5c>"
TABLE = {
    "gemma": EACH + '<|tool_call>call:{{ c.name }}{{ braced(c.arguments) }}<tool_call|>{% endfor %}',
    "function_gemma": EACH
    + "<start_function_call>call:{{ c.name }}{{ braced(c.arguments) }}<end_function_call>{% endfor %}",
    "cohere": "<|START_ACTION|>[\n" + EACH + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
    '"parameters": {{ c.arguments | tojson }}}{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>',
    "kimi": "<|tool_calls_section_begin|>" + EACH + "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "deepseek_v3": _deepseek(
        "{% if not loop.last %}\n{% endif %}", "function" + SEP + "{{ c.name }}\n```json\n", "\n```"
    ),
    "deepseek_v31": _deepseek("", "{{ c.name }}" + SEP, ""),
    "mistral_v11": EACH + "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}{% endfor %}",
    "mistral": _list("[TOOL_CALLS]", ""),
    "phi": _list("<|tool_call|>", "<|/tool_call|>"),
    "granite": _list("<|tool_call|>", ""),
    "nemotron": _list("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _list("<tool_calls>", "</tool_calls>"),
    "lfm2": "<|tool_call_start|>[" + EACH + "{{ c.name }}(" + _ARGUMENTS
    + "{{ k }}={{ v | tojson }}" + _COMMA + "{% endfor %})" + _COMMA + "{% endfor %}]<|tool_call_end|>",
    "minimax": "<minimax:tool_call>\n" + EACH + '<invoke name="{{ c.name }}">\n' + _ARGUMENTS
    + '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "seed": "<seed:tool_call>\n" + EACH + "<function={{ c.name }}>\n" + _ARGUMENTS
    + "<parameter={{ k }}>" + _VALUE + "</parameter>\n{% endfor %}</function>\n{% endfor %}</seed:tool_call>",
    "glm": EACH + "<tool_call>{{ c.name }}\n" + _ARGUMENTS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE
    + "</arg_value>\n{% endfor %}</tool_call>\n{% endfor %}",
    "qwen_xml": EACH + "<tool_call>\n<function={{ c.name }}>\n" + _ARGUMENTS + "<parameter={{ k }}>\n" + _VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}",
    "hermes": EACH + "<tool_call>\n" + _JSON + "\n</tool_call>\n{% endfor %}",
    "llama": _FIRST + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
}  # fmt: skip
"""Template sections that write an answer's calls in each format of the table, except gpt-oss's, whose calls are
messages.
"""

FURTHER = {
    "name in a tag": EACH + "<run={{ c.name }}>{{ c.arguments | tojson }}</run>{% endfor %}",
    "no end": _FIRST + "<|do|>" + _JSON,
    "numbered": "<|uses|>" + EACH + "<|use|>"
    + "{{ c.name }}:{{ loop.index0 }}<|with|>{{ c.arguments | tojson }}{% endfor %}<|done|>",
    "with ids": EACH + "[CALL]{{ c.name }}[ID]{{ call.id }}[WITH]{{ c.arguments | tojson }}{% endfor %}",
    "kinds told": "<|do|>\n" + EACH + '<call name="{{ c.name }}">\n' + _ARGUMENTS + '<value name="{{ k }}" text="'
    "{{ 'yes' if v is string else 'no' }}\">" + _VALUE + "</value>\n{% endfor %}</call>\n{% endfor %}</do>",
    "other names": "<|do|>[" + EACH + '{"tool": "{{ c.name }}", "with": {{ c.arguments | tojson }}}' + _COMMA
    + "{% endfor %}]<|done|>",
    "a function in it": EACH + '<do>{"type": "function", "function": {"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments | tojson }}}}</do>{% endfor %}",
    "Python's values": "<do>" + EACH + "<f={{ c.name }}>" + _ARGUMENTS
    + "<v={{ k }}>{{ v }}</v>{% endfor %}</f>{% endfor %}</do>",
    "a fence": "Action:\n```json\n[" + EACH + _JSON + _COMMA + "{% endfor %}]\n```",
    "other braces": EACH + "<do>{{ c.name }}{{ braced(c.arguments) }}</do>{% endfor %}",
}  # fmt: skip
"""Call formats that no published model uses."""

NOT_TOLD = {
    "values without marks": EACH + "<do>{{ c.name }} " + _ARGUMENTS + "{{ k }} {{ v }} {% endfor %}</do>{% endfor %}",
    "no mark before": EACH + "{{ c.name }} with {{ c.arguments | tojson }}{% endfor %}",
    "arguments before": EACH + "<do>{{ c.arguments | tojson }} to {{ c.name }}</do>{% endfor %}",
    "a number before the name": "<|uses|>" + EACH + "<|use|>{{ loop.index0 }}:{{ c.name }} {{ c.arguments | tojson }}"
    "{% endfor %}<|done|>",
    "texts cut": EACH + "<do>{{ c.name }}" + _ARGUMENTS + "<k>{{ k }}</k><v>{{ (v | string)[:20] }}</v>{% endfor %}"
    "</do>{% endfor %}",
}
"""Sections from which no format can be derived."""


def template(section: str, mark: str = '<|"|>') -> str:
    """Return a whole chat template that writes calls in this way."""
    return (
        _BRACED.replace("MARK", mark) + "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.content }}"
        + section
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant{{ '\n' }}"
    )


async def written(text: str) -> dict[str, str]:
    """Return what a template writes in place of answers that are calls."""
    compiled = environment(lambda: "", lambda: 0.0).from_string(text)

    async def render(messages: list[Message], given: dict[str, Any]) -> str | None:
        try:
            return compiled.render({**given, "messages": messages, "add_generation_prompt": True})
        except Exception:
            return None

    _, traits = await find_traits(render)
    assert traits.calls and traits.offers
    given = {} if traits.absent else {"tools": None, "documents": None}
    return await written_by(render, traits, {**given, "tools": [OFFERED]}, {"<|im_end|>"}, CHECKS)


async def derived(section: str, mark: str = '<|"|>') -> CallFormat | None:
    """Return the call format derived from a template's renderings."""
    return derive_form(await written(template(section, mark)))
