"""Let the model call a function, and answer with what it returned.

    python examples/tools.py [MODEL]

The function's name, docstring and types are what the model reads. Small models call badly: try one of 1.7B or more.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from cairn import LLM

HEIGHTS = {"Everest": 8849, "Denali": 6190, "Snowdon": 1085}


def height(mountain: Literal["Everest", "Denali", "Snowdon"], unit: Literal["m", "ft"] = "m") -> dict[str, Any]:
    """Tell how high a mountain is.

    Args:
        mountain: its name
        unit: metres or feet
    """
    metres = HEIGHTS[mountain]
    return {"mountain": mountain, "height": metres if unit == "m" else round(metres * 3.281), "unit": unit}


def main() -> None:
    """Ask, call what the model wants called, and ask again with the results."""
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "How high is Denali?"}]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        answer = llm.chat(
            conversation, tools=[height], tool_choice="required", parallel_tool_calls=False, temperature=0
        )
        conversation.append(answer.message)
        for call in answer.tool_calls:
            result = call.run()
            print(f"{call.name}({call.arguments}) -> {result}")
            conversation.append(call.message(result))
        print(llm.chat(conversation, tools=[height], tool_choice="none", temperature=0, max_tokens=60).text)


if __name__ == "__main__":
    main()
