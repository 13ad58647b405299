"""Tools for templates that show none: they are told of in the first message, as calls in `<tool_call>` tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TEXT = """You can call functions. Each line is one of them:
{tools}

To call a function, write its name and its arguments as JSON between these tags, and wait for the result:
<tool_call>
{{"name": "<the name>", "arguments": {{<the arguments>}}}}
</tool_call>"""


def with_tools_by_instruction(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Plain messages, of which the first says which tools there are and how to call them: behind a system's text, or
    before anybody else's."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _TEXT.format(tools="\n".join(lines))
    first, *rest = messages
    said = first["content"] or ""
    whole = f"{said}\n\n{text}" if first["role"] == "system" else f"{text}\n\n{said}"
    return [{**first, "content": whole}, *rest]
