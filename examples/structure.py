"""Get an answer as an object of a class: the model can write nothing else.

python examples/structure.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

from cairn import LLM


class Review(BaseModel):
    """What a review says of a film."""

    mood: Literal["good", "bad", "mixed"]
    stars: Literal[1, 2, 3, 4, 5]
    recommended: bool


TEXT = "A slow first half, but the last hour is the best thing I saw all year."


def main() -> None:
    """Read a review into a `Review`."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        question = f'The mood, the stars from 1 to 5, and whether it is recommended, as JSON: "{TEXT}"'
        review: Review = llm.chat(question, response_format=Review, temperature=0, max_tokens=200).parsed
    print(f"mood {review.mood}, {review.stars} stars, {'recommended' if review.recommended else 'not recommended'}")


if __name__ == "__main__":
    main()
