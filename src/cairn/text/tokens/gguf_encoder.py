"""What a GGUF file says of an encoder's tokenizer: its pieces of words, and what stands around texts.

Files hold the pieces without the signs of their own: "▁" stands before one that begins a word, and nothing before one
that goes on with it. Whether letters are made small is not said, so it is read off the vocabulary: one that was made
of small letters has no capital ones.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing

from cairn.models.gguf.encoder import check_tokens
from cairn.models.gguf.reader import Gguf
from cairn.models.gguf.spec import named_ids
from cairn.types.errors import ModelFileError

BEGINS = "\u2581"
_GOES_ON = "##"


def spelt(token: str, control: bool) -> str:
    """A token as the tokenizer's own files have it."""
    if control or not token:
        return token
    return token[1:] if token.startswith(BEGINS) and len(token) > 1 else _GOES_ON + token


def wordpiece(gguf: Gguf, tokens: list[str], vocab: dict[str, int]) -> tuple[WordPiece, dict[str, Any]]:
    """The model of `tokens` as they are spelt, and what a tokenizer.json has around it."""
    unknown = [tokens[i] for i in named_ids(gguf, "unknown", len(tokens), absent=True)]
    unknown += [token for token in ("[UNK]", "<unk>") if token in vocab]
    if not unknown:
        raise ModelFileError(f"{gguf.paths[0]}: does not name the token of what is unknown")
    small = not any(one.isupper() for token in tokens if not token.startswith("[") for one in token)
    return WordPiece(vocab, unk_token=unknown[0], max_input_chars_per_word=100), {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": small,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _GOES_ON, "cleanup": True},
    }


def surround(library: Tokenizer, gguf: Gguf, tokens: list[str]) -> None:
    """Give a tokenizer the template of its encoder: a token before a text, one behind each; BERT's second texts are of
    a kind of their own."""
    begin, end = check_tokens(gguf)
    kind = int(gguf.metadata["general.architecture"] == "bert")
    library.post_processor = TemplateProcessing(
        single=f"{tokens[begin]} $A {tokens[end]}",
        pair=f"{tokens[begin]} $A {tokens[end]} $B:{kind} {tokens[end]}:{kind}",
        special_tokens=[(tokens[begin], begin), (tokens[end], end)],
    )
