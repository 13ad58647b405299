"""Answer many prompts at once: they share the steps of the model, so all take little longer than one.

    python examples/batch.py [MODEL]

In a terminal a bar shows how far it is, with tokens a second.
"""

from __future__ import annotations

import sys

from cairn import LLM

ANIMALS = ("cat", "dog", "horse", "crow", "salmon", "bee", "snail", "mole")


def main() -> None:
    """Ask of eight animals, as eight conversations."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", max_running=8) as llm:
        answers = llm.chat([f"Where does a {animal} live?" for animal in ANIMALS], temperature=0, max_tokens=24)
    for animal, answer in zip(ANIMALS, answers, strict=True):
        print(f"{animal}: {' '.join(answer.text.split())}")


if __name__ == "__main__":
    main()
