"""llama.cpp's answers with a real Gemma 3, as test data: `python -m tools.make_gemma_figures http://localhost:8080`.

A `llama-server` with the model of `tests.real_models.gemma3` must answer there. The file has `texts`, each with its
tokens, and `answers`, each with the tokens of a prompt and llama.cpp's greedy continuation, with the log-probabilities
of the likeliest tokens at each place.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "tests" / "models" / "gemma_figures" / "gemma-3-270m.json"
TEXTS = (
    "The capital of France is",
    " Two spaces  and three   here,\n\n\nthen lines\tand tabs.",
    "Grüße aus Köln, 東京から, Привет 👩‍👩‍👧 \u200bzero",
    "def f(x):\n        return {'a': [x ** 2, 3.14159]}  # 12345678",
    "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n",
    "▁ is a piece, <0x0A> is not a byte, and <unused7> is a token",
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Question: What is the largest planet of the Solar System?\nAnswer:",
    "import os\n\ndef list_files(folder):\n    ",
    "Die Hauptstadt von Deutschland heißt",
    "1, 1, 2, 3, 5, 8, 13,",
    # More tokens than the 512 of the model's sliding window.
    "Count: " + ", ".join(str(number) for number in range(1, 211)) + ",",
)
GENERATED, TOP = 16, 10


def asked(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    url = parser.parse_args().url
    texts = [[text, asked(url, "/tokenize", content=text, parse_special=True)["tokens"]] for text in TEXTS]
    answers = []
    for text in PROMPTS:
        tokens = asked(url, "/tokenize", content=text, add_special=True)["tokens"]
        said = asked(
            url, "/completion", prompt=tokens, n_predict=GENERATED, temperature=0, n_probs=TOP, cache_prompt=False
        )
        places = said["completion_probabilities"]
        answers.append(
            {
                "prompt": tokens,
                "tokens": [place["id"] for place in places],
                "top": [
                    [[top_logprob["id"], round(top_logprob["logprob"], 4)] for top_logprob in place["top_logprobs"]]
                    for place in places
                ],
            }
        )
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"texts": texts, "answers": answers}, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
