"""Tools that a client runs itself and names by a type alone. Models here get them as functions.

The makers of such tools trained their own models on them, so a request holds nothing but `bash_20250124` or `shell`.
Other models need to know what the tools do and take. Shapes: docs.anthropic.com/en/docs/agents-and-tools/tool-use, as
anthropic-python's `types` state them; platform.openai.com/docs/guides/tools-shell and tools-apply-patch, as
openai-python's `types.responses` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ClientTool(NamedTuple):
    """The description of a tool for a model."""

    name: str
    """Its name unless the client gives one."""
    description: str
    parameters: Mapping[str, Any]

    def function(self, name: str | None = None) -> dict[str, Any]:
        """Return the tool as a function definition."""
        return {"name": name or self.name, "description": self.description, "parameters": dict(self.parameters)}


def _object(required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object; `required` holds names separated by blanks."""
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required.split()} if required else {})


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _whole(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


def _one_of(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: the first and the last line to show, from 1; -1 as the last is the end of the file.",
}
_EDITS = {
    "path": _text("The file or folder."),
    "file_text": _text("For create: the whole text of the new file."),
    "old_str": _text("For str_replace: the text to replace, which must be in the file exactly once."),
    "new_str": _text("For str_replace: the text in its place. For insert, where there is no insert_text: the text."),
    "insert_line": _whole("For insert: the line behind which the text goes; 0 is the beginning of the file."),
    "insert_text": _text("For insert: the text."),
    "view_range": _RANGE,
}

_OLDER = ClientTool(
    "str_replace_editor",
    "View, create and edit text files.",
    _object(
        "command path",
        command=_one_of("view", "create", "str_replace", "insert", "undo_edit"),
        **{name: value for name, value in _EDITS.items() if name != "insert_text"},
    ),
)
"""The first editors, to which a text to insert is a `new_str`."""

ANTHROPIC: Mapping[str, ClientTool] = {
    "bash_": ClientTool(
        "bash",
        "Run a command in a shell that keeps its state from one call to the next.",
        _object(
            "",
            command=_text("The command to run. Leave it out only to restart."),
            restart={"type": "boolean", "description": "True: start the shell anew."},
        ),
    ),
    "text_editor_2024": _OLDER,
    "text_editor_20250124": _OLDER,
    "text_editor_": ClientTool(
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        _object("command path", command=_one_of("view", "create", "str_replace", "insert"), **_EDITS),
    ),
    "memory_": ClientTool(
        "memory",
        "View, create, edit, rename and delete files below /memories, which outlive the conversation.",
        _object(
            "command",
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            old_path=_text("For rename: the file or folder."),
            new_path=_text("For rename: its new path."),
        ),
    ),
}
"""Tools of Anthropic's API by the beginning of their type, which ends with a date."""

_LIMITS = {
    "timeout_ms": _whole("Milliseconds after which the commands are ended."),
    "max_output_length": _whole("Most characters of output to return."),
}
OPENAI: Mapping[str, ClientTool] = {
    "shell": ClientTool(
        "shell",
        "Run shell commands, one after another, and return what each writes and its exit code.",
        _object(
            "commands",
            commands={"type": "array", "items": {"type": "string"}, "description": "The commands, in order."},
            **_LIMITS,
        ),
    ),
    "local_shell": ClientTool(
        "local_shell",
        "Run a program on the user's machine.",
        _object(
            "command",
            command={"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            working_directory=_text("The folder to run it in."),
            env={"type": "object", "additionalProperties": {"type": "string"}, "description": "More variables."},
            timeout_ms=_LIMITS["timeout_ms"],
        ),
    ),
    "apply_patch": ClientTool(
        "apply_patch",
        "Create, update or delete one file. A diff has lines that begin with a space (kept), - (removed) or + (added); "
        "for a new file all begin with +.",
        _object(
            "type path diff",
            type=_one_of("create_file", "update_file", "delete_file"),
            path=_text("The file, relative to the working folder."),
            diff=_text("The diff; empty to delete the file."),
        ),
    ),
}
"""Tools of OpenAI's Responses API by their type."""


def of_anthropic(kind: Any) -> ClientTool | None:
    """Return the tool that a type of Anthropic's names, if it is one that clients run."""
    if not isinstance(kind, str):
        return None
    return next((tool for prefix, tool in ANTHROPIC.items() if kind.startswith(prefix) and "code" not in kind), None)
