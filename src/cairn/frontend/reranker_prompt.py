"""The prompt by which Qwen3-Reranker is asked whether a document answers a query, as its makers trained it.

The texts between are encoded as any user's text is: a control token that is written in one is ordinary text.
"""

from __future__ import annotations

from cairn.text.tokens.post_processor import WholeInput
from cairn.text.tokens.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What is judged where nothing else is said."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Question:
    """The prompts of one instruction."""

    def __init__(self, tokenizer: Tokenizer, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._instruction = INSTRUCTION if instruction is None else instruction
        self._before = tokenizer.encode(_BEFORE, special=True)
        self._behind = tokenizer.encode(_BEHIND, special=True)

    def pair(self, query: str, document: str, limit: int | None = None) -> WholeInput:
        """The prompt of a pair, of which at most `limit` tokens are left: the document ends early."""
        text = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = self._tokenizer.encode(text)
        room = len(ids) if limit is None else max(0, limit - len(self._before) - len(self._behind))
        return WholeInput((*self._before, *ids[:room], *self._behind))
