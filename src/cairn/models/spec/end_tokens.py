"""The texts of tokens that end an answer, and of those that fill in the middle, as models are known to spell them.

A model's files name one or two tokens that end an answer, and often not the one that ends a turn: a base model's name
is kept when it is tuned to chat. So whatever is spelt like an end of a turn is one. The lists hold what llama.cpp takes
for an end of generation (https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

_BARS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|endofturn|>", "<|eos|>", "<turn|>"),
    "<|tool_response>",  # which Gemma 4 writes behind its calls, for their results to follow
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end\u2581of\u2581sentence|>"),
    *("<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>"),
)
UNMISTAKABLE = frozenset((*_BARS, "<end_of_turn>", "<end_of_utterance>"))
"""Ends that nobody writes as ordinary text, so a file that calls such a token ordinary is mistaken."""
_AMBIGUOUS = frozenset(
    (
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|END_OF_TURN_TOKEN|>"),
        *("<fim-pad>", "<fim_pad>", "<fim-repo>", "<fim_repo>", "<REPO>", "<reponame>", "<repo_name>", "<file_sep>"),
    )
)
"""Ends where a file calls them control tokens or names them; else they may be pieces of HTML or of code."""

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
"""Texts of the tokens before what is there, before what follows, and before what is to be filled in."""


class Middle(NamedTuple):
    """The ids of a model's tokens for filling in the middle."""

    prefix: int
    suffix: int
    middle: int


def known_ends(find: Callable[[str], int | None], is_control: Callable[[int], bool]) -> tuple[int, ...]:
    """The ids that are spelt as ends are. `find`: text -> id; `is_control`: whether the file calls it no text."""
    found = {text: i for text in sorted(ENDS) if (i := find(text)) is not None}
    if "<|return|>" in found and "<|end|>" in found:
        del found["<|end|>"]  # these models end a thought with it, and go on
    return tuple(sorted(i for text, i in found.items() if text in UNMISTAKABLE or is_control(i)))


def known_middle(controls: Mapping[str, int]) -> Middle | None:
    """The tokens among `controls` (text -> id) that are spelt as those for filling in the middle are."""
    for texts in FIM:
        if controls.keys() >= set(texts):
            return Middle(*(controls[text] for text in texts))
    return None


def is_spelt_as_control(text: str) -> bool:
    """Whether a token's text is a word in brackets, as `<|user|>`, `<s>` or `[INST]`."""
    bracketed = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return bracketed and len(text) > 2 and not any(character.isspace() for character in text)
