"""Passes saved by forced tokens: the tokens of some typical answers, and how many of them the grammar forces.

    .venv/bin/python benchmarks/forced_tokens.py [MODEL]

Forced tokens are appended without being sampled. MODEL is a model's folder or file, of which only the vocabulary is
used; by default it is the bundled model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cairn.models.hub.hub import locate
from cairn.text.chat.templates import load_text
from cairn.text.grammar.grammar import Shape, Structure, grammar_text
from cairn.text.grammar.vocabulary import Vocabulary
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.request import Grammar
from cairn.worker.grammar_matcher import CompiledGrammar, GrammarMatcher, Masks
from cairn.worker.grammars import read_vocabulary
from mask_cost import called

TEXT = {"type": "string"}
COUNTRIES = ["Germany", "France", "Switzerland"]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ADDRESS = closed(street=TEXT, city=TEXT, postal_code=TEXT, country={"enum": COUNTRIES})
PERSON = closed(
    first_name=TEXT,
    last_name=TEXT,
    age={"type": "integer"},
    email=TEXT,
    is_subscribed={"type": "boolean"},
    address=ADDRESS,
)
FOUND = closed(
    sentiment={"enum": ["positive", "neutral", "negative"]},
    confidence={"type": "number"},
    topics={"type": "array", "items": TEXT},
    summary=TEXT,
)
ADA = {
    "first_name": "Ada",
    "last_name": "Lovelace",
    "age": 36,
    "email": "ada@example.org",
    "is_subscribed": True,
    "address": {"street": "12 St James's Square", "city": "London", "postal_code": "SW1Y", "country": "Switzerland"},
}
PARCEL = {
    "sentiment": "negative",
    "confidence": 0.87,
    "topics": ["delivery", "customer service"],
    "summary": "The parcel came late and nobody answered the phone.",
}
EDIT = {"path": "src/main.py", "old": "x = 1", "new": "x = 2"}
HERMES = f"<tool_call>\n{json.dumps({'name': 'tool_17', 'arguments': EDIT})}\n</tool_call>"
PARAMETERS = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in EDIT.items())
XML = f"<tool_call>\n<function=tool_17>\n{PARAMETERS}</function>\n</tool_call>"


def held(kind: Any, text: Any) -> str:
    return grammar_text(Shape(structure=Structure(kind=kind, text=json.dumps(text))))


def answers() -> dict[str, tuple[str, str]]:
    """Return the grammar and the text of each answer."""
    return {
        "an object of ten keys": (held("json", PERSON), json.dumps(ADA)),
        "an extraction of four keys": (held("json", FOUND), json.dumps(PARCEL)),
        "a call of one of 60 tools (Hermes)": (called("hermes", 60, required=True), HERMES),
        "the same in XML tags": (called("qwen_xml", 60, required=True), XML),
        "one of three choices": (held("choice", ["positive", "negative", "undecided"]), "undecided"),
    }


def next_token(mask: bytes, tokenizer: Tokenizer, rest: bytes) -> int:
    """Return the token that continues a text: the tokenizer's own, or the longest allowed one."""

    def may(token: int) -> bool:
        return bool(mask[token >> 3] >> (token & 7) & 1)

    first = tokenizer.encode(rest.decode())[0]
    if may(first):
        return first
    fits = [n for n in range(tokenizer.largest_id + 1) if may(n) and rest.startswith(tokenizer.token_bytes(n))]
    return max(fits, key=lambda one: len(tokenizer.token_bytes(one)))


def counted(vocabulary: Vocabulary, tokenizer: Tokenizer, masks: Masks, grammar: str, text: str) -> tuple[int, int]:
    """Return the number of tokens in an answer, and of those that are forced."""
    ends = sorted(vocabulary.tokenizer.eos_tokens)
    matcher = GrammarMatcher(CompiledGrammar(vocabulary, Grammar(text=grammar)), ends, masks)
    rest, count, forced = text.encode(), 0, 0
    while rest and not matcher.over:
        token = matcher.forced()
        forced += token is not None
        if token is None:
            token = next_token(matcher.mask().wait(), tokenizer, rest)
        said = vocabulary.tokenizer.decode_bytes([token])
        assert rest.startswith(said), f"{said!r} is no part of the answer"
        rest, count = rest[len(said) :], count + 1
        matcher.consume(token)
    return count, forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    folder = Path(locate(parser.parse_args().model))
    tokenizer, _ = load_text(folder, None)
    vocabulary = read_vocabulary(folder, None, tokenizer.largest_id + 1, sorted(tokenizer.end_ids))
    masks = Masks()
    for name, (grammar, text) in answers().items():
        count, forced = counted(vocabulary, tokenizer, masks, grammar, text)
        print(f"{name:36} {count:4} tokens, {forced:3} forced ({100 * forced / count:.0f} %)")
    masks.close()


if __name__ == "__main__":
    main()
