"""Known spellings of tokens that end an answer, and of tokens for filling in the middle.

A model's files name one or two end tokens, often not the one that ends a turn: a fine-tuned chat model keeps the base
model's. So every token spelt like the end of a turn counts as one. The lists hold what llama.cpp takes for an end of
generation (https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

_BARS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|endofturn|>", "<|eos|>", "<turn|>"),
    "<|tool_response>",  # Gemma 4 writes it after its calls; the results follow
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end\u2581of\u2581sentence|>"),
    *("<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>"),
)
UNMISTAKABLE = frozenset((*_BARS, "<end_of_turn>", "<end_of_utterance>"))
"""End tokens that never occur as ordinary text, so they count even if a file does not mark them as control tokens."""
_AMBIGUOUS = frozenset(
    (
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|END_OF_TURN_TOKEN|>"),
        *("<fim-pad>", "<fim_pad>", "<fim-repo>", "<fim_repo>", "<REPO>", "<reponame>", "<repo_name>", "<file_sep>"),
    )
)
"""End tokens only if a file marks them as control tokens or names them; otherwise they may be pieces of HTML or
code."""

ENDS = UNMISTAKABLE | _AMBIGUOUS

FIM: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Texts of the prefix, suffix and middle tokens."""


class Middle(NamedTuple):
    """Ids of a model's tokens for filling in the middle."""

    prefix: int
    suffix: int
    middle: int


def known_ends(find: Callable[[str], int | None], is_control: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the ids spelt as end tokens.

    `find` maps a text to its id; `is_control` says whether the file marks an id as a control token.
    """
    found = {text: i for text in sorted(ENDS) if (i := find(text)) is not None}
    if "<|return|>" in found and "<|end|>" in found:
        del found["<|end|>"]  # these models end their reasoning with it and continue
    return tuple(sorted(i for text, i in found.items() if text in UNMISTAKABLE or is_control(i)))


def known_middle(controls: Mapping[str, int]) -> Middle | None:
    """Return the fill-in-the-middle tokens among `controls` (text -> id), or None."""
    for texts in FIM:
        if controls.keys() >= set(texts):
            return Middle(*(controls[text] for text in texts))
    return None


def is_spelt_as_control(text: str) -> bool:
    """Return whether a token's text is a word in brackets, such as `<|user|>`, `<s>` or `[INST]`."""
    bracketed = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return bracketed and len(text) > 2 and not any(character.isspace() for character in text)
