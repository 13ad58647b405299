"""Talk with a model in this process, answer by answer, as a stream.

    python examples/chat.py [MODEL]

MODEL is a folder, a .gguf file, a model that was pulled, or 'demo', which is bundled and knows little.
"""

from __future__ import annotations

import sys
from typing import Any

from cairn import LLM

QUESTIONS = ("My name is Ada. Hello!", "What is my name?")


def main() -> None:
    """Ask two questions; the second needs the first, whose KV is not computed again."""
    conversation: list[dict[str, Any]] = []
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for question in QUESTIONS:
            print(f"> {question}")
            conversation.append({"role": "user", "content": question})
            stream = llm.chat(conversation, stream=True, temperature=0, max_tokens=100)
            for piece in stream:
                print(piece.text, end="", flush=True)
            answer = stream.answer
            conversation.append(answer.message)
            assert answer.usage and answer.cache
            print(f"\n({answer.usage.prompt_tokens} tokens in the prompt, {answer.cache.computed} computed)\n")


if __name__ == "__main__":
    main()
