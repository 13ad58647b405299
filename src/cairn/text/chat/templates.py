"""The tokenizer and the chat templates that come with a model, or a template that is given in their place."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.models.files import MAX_TEMPLATE_BYTES, Fields, is_gguf, read_json, read_optional_json, read_small
from cairn.models.spec.config import given_file
from cairn.models.spec.families import check_architecture
from cairn.text.chat.named_templates import NAMED
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from cairn.models.gguf.reader import Gguf

_GO = re.compile(r"\{\{-?\s*(?:\.[A-Z]|(?:if|range|with|else|end|block|template)\b|\$)")
"""What only a template of Go's text/template has: Ollama's are such."""


def load_text(folder: Path, given: str | None = None) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer and the chat templates of a folder or a GGUF file, which is read once.

    `given`: a tokenizer.json in place of the model's own.
    Raises ModelFileError, and ModelError for an architecture that is not built: before the tokenizer is, which may take
    seconds.
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
    """The chat templates of a folder or a GGUF file by name, {} if it has none; "default" is always among them.

    chat_template.jinja and additional_chat_templates/*.jinja come before chat_template.json, which comes before
    tokenizer_config.json (a text, or a list of {name, template}). `parsed`: the GGUF file, where it was read. Raises
    ModelFileError naming the file.
    """
    if is_gguf(folder):
        from cairn.models.gguf.reader import read_gguf
        from cairn.text.tokens import gguf

        templates = gguf.load_templates(parsed or read_gguf(folder))
    else:
        templates = _templates_of(folder)
    if len(templates) == 1:  # whatever it is called
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
    """What a model declares of how its answers are read (`declared_call_format`); None where it says nothing of it."""
    return None if is_gguf(folder) else read_optional_json(folder / "tokenizer_config.json").get("response_template")


def given_template(given: str) -> str:
    """A template by name or from a file. Raises ConfigError."""
    if given in NAMED:
        return NAMED[given]
    path = Path(given).expanduser()
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
    """Why templates cannot be used, in words for a person: `why` is what compiling said."""
    if any(_GO.search(text) for text in templates.values()):
        return "it is a Go template, as Ollama has them, and no jinja2 one"
    return why


def defaults(template: str, tools: Any, now: float) -> dict[str, Any]:
    """What other servers give to a template beside its messages, where it asks for it: thinking is on unless it is
    turned off; today's date; and the tools' functions by their older name. `now`: seconds since 1970."""
    found: dict[str, Any] = {}
    if re.search(r"\benable_thinking\b", template):
        found["enable_thinking"] = True
    if re.search(r"\bdate_string\b", template):
        found["date_string"] = datetime.datetime.fromtimestamp(now).strftime("%d %b %Y")
    if tools and re.search(r"\bfunctions\b", template):
        found["functions"] = [tool["function"] for tool in tools if isinstance(tool, Mapping) and "function" in tool]
    return found


# What a template ends the assistant's turns with is found by rendering a conversation of these.
_SAID = ("qzjfirst", "qzjsecond", "qzjthird")
"""Words that no template writes."""
_ROLES = ("user", "assistant", "user")


ANSWERED = [{"role": role, "content": text} for role, text in zip(_ROLES, _SAID, strict=True)]
"""A conversation of these."""


def turn_ends(text: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer, of the conversation ANSWERED as it was rendered; none where it cannot be told.

    What stands behind an answer may also begin the next turn. It does where the whole text begins with it, or where it
    is all that stands there and stood before the first question too; but not where the text begins with plain text and
    the question has it behind it as well: then turns begin with plain text.
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
