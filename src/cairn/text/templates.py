"""The tokenizer and the chat templates that come with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cairn.errors import ModelFileError
from cairn.models.families import family_of
from cairn.models.files import MAX_TEMPLATE_BYTES, Fields, is_gguf, read_json, read_optional_json, read_small
from cairn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cairn.models.gguf import Gguf


def load_text(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer and the chat templates of a folder or a GGUF file, which is read once.

    Raises ModelFileError, and ModelError for an architecture that is not built: before the tokenizer is, which may take
    seconds.
    """
    parsed = None
    if is_gguf(folder):
        from cairn.models.gguf import read_gguf
        from cairn.models.gguf_spec import architecture

        parsed = read_gguf(folder)
        architecture(parsed)
    elif (path := folder / "config.json").is_file():
        family_of(Fields(read_json(path), path))
    return Tokenizer.load(folder, parsed), load_templates(folder, parsed)


def load_templates(folder: Path, parsed: Gguf | None = None) -> dict[str, str]:
    """The chat templates of a folder or a GGUF file by name, {} if it has none; "default" is always among them.

    chat_template.jinja and additional_chat_templates/*.jinja come before chat_template.json, which comes before
    tokenizer_config.json (a text, or a list of {name, template}). `parsed`: the GGUF file, where it was read. Raises
    ModelFileError naming the file.
    """
    if is_gguf(folder):
        from cairn.models.gguf import read_gguf
        from cairn.text import gguf

        templates = gguf.load_templates(parsed or read_gguf(folder))
    else:
        templates = _templates_of(folder)
    if templates and "default" not in templates:
        raise ModelFileError(f"{folder}: has chat templates {sorted(templates)} but none named 'default'")
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
