"""Chat templates by name, for models that come without one or with one that cannot be used."""

from __future__ import annotations

_CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n\\n' }}{% endif %}
{{- 'You can call these functions, one a line:\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) ~ '\\n' }}{% endfor %}
{{- '</tools>\\n\\nTo call one:\\n<tool_call>\\n{"name": its name, "arguments": an object}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def _turns(user: str, assistant: str, prompt: str, system: str, *, begin: str = "{{ bos_token }}") -> str:
    """A template that writes each message by its role. In `user`, `assistant` and `system`, TEXT is the content."""

    def written(text: str) -> str:
        before, _, after = text.partition("TEXT")
        return "{{ %r ~ message.content | trim ~ %r }}" % (before, after)  # noqa: UP031 (braces mean jinja here)

    return (
        f"{begin}{{% for message in messages %}}{{% if message.role == 'user' %}}{written(user)}"
        f"{{% elif message.role == 'assistant' %}}{written(assistant)}"
        f"{{% elif message.role == 'system' %}}{written(system)}"
        "{% else %}{{ raise_exception('there is no role ' ~ message.role) }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )


def _folded(template: str) -> str:
    """For models without a system role: its text begins the first user's."""
    return (
        "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
        "{% set ns.system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}"
        + template.replace(
            "{% if message.role == 'user' %}{{ ", "{% if message.role == 'user' %}{% set content = message.content "
            "if not (ns.system and loop.first) else ns.system ~ '\\n\\n' ~ message.content %}{{ ", 1
        ).replace("message.content | trim", "content | trim", 1)
    )  # fmt: skip


_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\nTEXT<|eot_id|>"
_PHI3 = "<|{}|>\nTEXT<|end|>\n"
_ZEPHYR = "<|{}|>\nTEXT</s>\n"
_DEEPSEEK = "<\uff5c{}\uff5c>TEXT"
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_GRANITE = "<|start_of_role|>{}<|end_of_role|>TEXT<|end_of_text|>\n"

NAMED: dict[str, str] = {
    "chatml": _CHATML,
    "llama2": _folded(_turns("[INST] TEXT [/INST]", " TEXT </s>", "", "[INST] TEXT [/INST]")),
    "llama3": _turns(
        _LLAMA3.format("user"),
        _LLAMA3.format("assistant"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        _LLAMA3.format("system"),
    ),
    "gemma": _folded(
        _turns(
            "<start_of_turn>user\nTEXT<end_of_turn>\n",
            "<start_of_turn>model\nTEXT<end_of_turn>\n",
            "<start_of_turn>model\n",
            "<start_of_turn>user\nTEXT<end_of_turn>\n",
        )
    ),
    "mistral": _folded(_turns("[INST] TEXT[/INST]", " TEXT</s>", "", "[INST] TEXT[/INST]")),
    "phi3": _turns(_PHI3.format("user"), _PHI3.format("assistant"), "<|assistant|>\n", _PHI3.format("system")),
    "zephyr": _turns(
        _ZEPHYR.format("user"), _ZEPHYR.format("assistant"), "<|assistant|>\n", _ZEPHYR.format("system"), begin=""
    ),
    "granite": _turns(
        _GRANITE.format("user"),
        _GRANITE.format("assistant"),
        "<|start_of_role|>assistant<|end_of_role|>",
        _GRANITE.format("system"),
        begin="",
    ),
    "deepseek": _turns(
        _DEEPSEEK.format("User"), _DEEPSEEK.format("Assistant") + _DEEPSEEK_END, "<\uff5cAssistant\uff5c>", "TEXT\n\n"
    ),
    "vicuna": _turns("USER: TEXT\n", "ASSISTANT: TEXT</s>\n", "ASSISTANT:", "TEXT\n\n"),
    "alpaca": _turns("### Instruction:\nTEXT\n\n", "### Response:\nTEXT\n\n", "### Response:\n", "TEXT\n\n"),
}
"""Templates by the name of the format, as other programs call it."""
