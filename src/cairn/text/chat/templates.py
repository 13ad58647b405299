"""A model's chat templates, and the named templates that can replace them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.config.paths import expanded
from cairn.models.families.families import check_architecture
from cairn.models.files import MAX_TEMPLATE_BYTES, Fields, is_gguf, read_json, read_optional_json, read_small
from cairn.models.spec.tokenizer_files import given_file
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from cairn.models.gguf.reader import Gguf


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
    """Build a template that writes each message by its role; TEXT stands for the content."""

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
    """Change a template for models without a system role: the system text goes before the first user's."""
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
"""Format name, as other programs call it -> template."""


_GO = re.compile(r"\{\{-?\s*(?:\.[A-Z]|(?:if|range|with|else|end|block|template)\b|\$)")
"""Syntax that only Go's text/template has; Ollama's templates use it."""


def load_text(folder: Path, given: str | None = None) -> tuple[Tokenizer, dict[str, str]]:
    """Load the tokenizer and the chat templates of a folder or a GGUF file, which is read once.

    `given` is a tokenizer.json that replaces the model's own. Raises ModelFileError, and ModelError for an unsupported
    architecture: that is checked first, because building a tokenizer may take seconds.
    """
    parsed = None
    if is_gguf(folder):
        from cairn.models.gguf.reader import read_gguf
        from cairn.models.gguf.spec import architecture

        parsed = read_gguf(folder)
        architecture(parsed)
    elif (path := folder / "config.json").is_file():
        check_architecture(Fields(read_json(path), path))
    tokenizer = Tokenizer.load(folder, parsed) if given is None else Tokenizer.given(given_file(given), folder, parsed)
    return tokenizer, load_templates(folder, parsed)


def load_templates(folder: Path, parsed: Gguf | None = None) -> dict[str, str]:
    """Return the chat templates of a folder or a GGUF file by name; one is "default" unless there are none.

    chat_template.jinja and additional_chat_templates/*.jinja override chat_template.json, which overrides
    tokenizer_config.json (a text, or a list of {name, template}). `parsed` is the GGUF file if it was already read.
    Raises ModelFileError naming the file.
    """
    if is_gguf(folder):
        from cairn.models.gguf.reader import read_gguf
        from cairn.text.tokens import gguf

        templates = gguf.load_templates(parsed or read_gguf(folder))
    else:
        templates = _templates_of(folder)
    if len(templates) == 1:  # whatever its name
        templates["default"] = next(iter(templates.values()))
    if templates and "default" not in templates:
        raise ModelFileError(
            f"{folder}: has chat templates {sorted(templates)} but none named 'default'; name one with --chat-template"
        )
    return templates


def _templates_of(folder: Path) -> dict[str, str]:
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        value = read_optional_json(path).get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list) and all(
            isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
            for one in value
        ):
            templates |= {one["name"]: one["template"] for one in value}
        elif value is not None:
            raise ModelFileError(f"{path}: chat_template must be a text or a list of objects with name and template")
    files = [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in [*files, ("default", folder / "chat_template.jinja")]:
        if not path.exists():
            continue
        try:
            text = read_small(path, MAX_TEMPLATE_BYTES, "chat template").decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{path}: cannot be read as text ({error})") from error
        templates[name] = text.replace("\r\n", "\n").replace("\r", "\n")
    return templates


def response_template(folder: Path) -> Any:
    """Return the model's declared `response_template` (see `declared_call_format`); None without one."""
    return None if is_gguf(folder) else read_optional_json(folder / "tokenizer_config.json").get("response_template")


def given_template(given: str) -> str:
    """Return a template by its name in NAMED or read from a file. Raises ConfigError."""
    if given in NAMED:
        return NAMED[given]
    path = expanded(given)
    try:
        if not path.exists():
            raise _bad_template(f"{given!r} is neither a file nor one of {', '.join(NAMED)}")
        if not path.is_file() or path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise _bad_template(f"{given}: must be a file of at most {MAX_TEMPLATE_BYTES:,} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_template(f"{given}: cannot be read as text ({error})") from None


def _bad_template(why: str) -> ConfigError:
    return ConfigError(f"chat_template: {why}", field="chat_template")


def unusable(templates: Mapping[str, str], why: str) -> str:
    """Return why templates cannot be used; `why` is the compiler's message."""
    if any(_GO.search(text) for text in templates.values()):
        return "it is a Go template (as Ollama uses), not a jinja2 template"
    return why


def defaults(template: str, tools: Any, now: float) -> dict[str, Any]:
    """Return the variables that other servers also set, as far as the template mentions them.

    `enable_thinking` is True, `date_string` is today's date, `functions` are the tools' functions. `now` is in seconds
    since 1970.
    """
    found: dict[str, Any] = {}
    if re.search(r"\benable_thinking\b", template):
        found["enable_thinking"] = True
    if re.search(r"\bdate_string\b", template):
        found["date_string"] = datetime.datetime.fromtimestamp(now).strftime("%d %b %Y")
    if tools and re.search(r"\bfunctions\b", template):
        found["functions"] = [tool["function"] for tool in tools if isinstance(tool, Mapping) and "function" in tool]
    return found


_SAID = ("qzjfirst", "qzjsecond", "qzjthird")
"""Contents of ANSWERED: words that no template writes by itself."""
_ROLES = ("user", "assistant", "user")


ANSWERED = [{"role": role, "content": text} for role, text in zip(_ROLES, _SAID, strict=True)]
"""A probe conversation; its rendering shows how a template ends the assistant's turns (`turn_ends`)."""


def turn_ends(text: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end an answer, from the rendering of ANSWERED; an empty set if that is not certain.

    The control token after an answer may instead begin the next turn. It does if the whole text starts with it, or if
    it is the only control token there and also precedes the first question. It does not if the text starts with plain
    text and the same token also follows the question: then turns begin with plain text.
    """
    before, _, rest = text.partition(_SAID[0])
    between, answered, rest = rest.partition(_SAID[1])
    behind, found, _ = rest.partition(_SAID[2])
    controls = tokenizer.controls.ids
    spans = list(tokenizer.controls.find(behind))
    if not answered or not found or not spans or behind[: spans[0][0]].strip():
        return frozenset()
    end = behind[slice(*spans[0])]
    opening = [before[slice(*span)] for span in tokenizer.controls.find(before)]
    bos = tokenizer.special_tokens.get("bos_token") or ""
    start = before.lstrip().removeprefix(bos).lstrip()
    closes = not any(at == 0 for at, _ in tokenizer.controls.find(start)) and between.lstrip().startswith(end)
    same = len(spans) == 1 and opening[-1:] == [end] and end != tokenizer.special_tokens.get("eos_token")
    begins = start.startswith(end) or (same and not closes)
    return frozenset() if begins else frozenset((controls[end],))
