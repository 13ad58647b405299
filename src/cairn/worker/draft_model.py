"""Loading the small model whose guesses the large one checks."""

from __future__ import annotations

from pathlib import Path

from cairn.config.config import Config, draft_options
from cairn.engine.load_engine import load_engine
from cairn.scheduler.drafts.draft_model import DraftModel
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError


def load_draft_model(config: Config, folder: Path, tokenizer: Path) -> DraftModel:
    """Load the model in `folder` to guess for the one whose tokenizer is at `tokenizer`.

    Raise ModelError if it cannot be loaded, has other tokens or keeps recurrent states.
    """
    where = f"draft_model {config.draft_model}"
    if difference := token_difference(Tokenizer.load(tokenizer), Tokenizer.load(folder)):
        raise ModelError(f"{where}: {difference}; a draft model needs the tokens of the model that it guesses for")
    try:
        _, engine = load_engine(draft_options(config), folder)
    except ModelError as error:
        raise ModelError(f"{where}: {str(error).replace('kv_gb', 'draft_kv_gb')}") from None
    if not engine.info.generates or any(group.kind == "state" for group in engine.info.groups):
        engine.close()
        why = "guesses would change its recurrent states" if engine.info.generates else "it generates no text"
        raise ModelError(f"{where}: {why}; take a model with attention alone, or none")
    return DraftModel(engine)


def token_difference(one: Tokenizer, other: Tokenizer) -> str:
    """Return a sentence about the first token that two tokenizers do not share; empty if there is none.

    A larger vocabulary is none: what only one of them has is never guessed or never right.
    """
    for token in range(min(one.vocab_size, other.vocab_size)):
        if one.token_bytes(token) != other.token_bytes(token):
            return f"token {token} is {other.token_bytes(token)!r} there and {one.token_bytes(token)!r} here"
    return ""
