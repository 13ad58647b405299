"""Embeddings, scores and reranking of texts through a service's requests, for HTTP, Python and the CLI.

Each text is a request of its own, so the texts of all callers share steps, without padding, and take their tenants'
turns. The number of one call's texts in flight is bounded, so that the queue keeps room for others. numpy is imported
with the first text: a server that only answers chats does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.frontend.service import Service
from cairn.frontend.stream import merge
from cairn.text.tokens import length
from cairn.text.tokens.post_processor import WholeInput
from cairn.text.tokens.tokenizer import INLINE, Tokenizer
from cairn.types.errors import ContextTooLong, GenerationFailed, InvalidRequest, Overloaded
from cairn.types.outputs import Done
from cairn.types.request import Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]


INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction for reranking if the caller gives none."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Question:
    """The prompts of a reranker for one instruction."""

    def __init__(self, tokenizer: Tokenizer, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._instruction = INSTRUCTION if instruction is None else instruction
        self._before = tokenizer.encode(_BEFORE, special=True)
        self._behind = tokenizer.encode(_BEHIND, special=True)

    def pair(self, query: str, document: str, limit: int | None = None) -> WholeInput:
        """Return the prompt of a pair, cut to `limit` tokens at the end of the document."""
        text = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = self._tokenizer.encode(text)
        room = len(ids) if limit is None else max(0, limit - len(self._before) - len(self._behind))
        return WholeInput((*self._before, *ids[:room], *self._behind))


Text = str | Sequence[int | str]
"""A text, or its token ids as they are to be computed; texts may stand between the ids."""
Encode = Callable[[], list[WholeInput]]

MAX_TEXTS = 2048
"""Most texts of one call, as in the OpenAI API."""
MAX_TOKENS = 1 << 20
"""Most tokens of all texts of one call, which bounds the memory that a call takes."""
MAX_READ = 16 << 20
"""Most characters of all pairs of one call that are read together with their query."""
CHARACTERS = 64
"""Characters that are read for each token that remains of a text to be cut; the rest is ignored."""
AT_ONCE = 256
"""Most texts of one call that are in flight at once."""
_PAUSE = 0.05
_SAMPLING = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """The tenant, limits and options of one call for vectors or scores."""

    salt: bytes = b""
    share: str = ""
    timeout: float | None = None
    at_once: int = AT_ONCE
    truncate: bool = False
    """Whether a text that is too long is cut; otherwise it is refused."""
    field: str = "input"
    """The name of the field that holds the texts, for errors."""
    prompt_name: str | None = None
    """Name of the model's prompt to put before the texts; None for the one that it puts before every text, if any."""
    instruction: str | None = None
    """The criterion for a decoder's judgement; None for whether a document answers the query of a web search."""


def check_embeds(service: Service) -> None:
    """Raise InvalidRequest for a model that makes no vectors."""
    if service.spec.kind == "rerank":
        raise InvalidRequest(
            f"{service.name} judges pairs of texts and makes no embeddings; it serves /v1/rerank and /v1/score",
            field="model",
        )


def check_scores(service: Service) -> None:
    """Raise InvalidRequest for a reranker whose answer is not one score."""
    encoder = service.spec.encoder
    if service.spec.kind == "rerank" and encoder is not None and encoder.labels != 1:
        raise InvalidRequest(
            f"{service.name} sorts texts into {encoder.labels} classes; a model that ranks has one score", field="model"
        )


def longest_text(service: Service) -> int:
    """Return the tokens of the longest text that this model takes."""
    return min(service.info.context, service.spec.longest_text)


async def vectors(service: Service, texts: Sequence[Text], asking: EmbeddingCall) -> tuple[list[Vector], int]:
    """Return the vector of each text as the model gives it, and the tokens of all texts together."""
    check_embeds(service)
    if not texts:
        raise InvalidRequest(f"{asking.field} is empty; it must hold at least one text", field=asking.field)
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"{asking.field} holds {len(texts)} texts; the limit is {MAX_TEXTS}", field=asking.field)
    named = [asking.field if len(texts) == 1 else f"{asking.field}[{number}]" for number in range(len(texts))]
    wholes = await _encoded(service, texts, named, asking)
    return await _computed(service, wholes, asking), _tokens(wholes)


async def scores(
    service: Service, pairs: Sequence[tuple[str, str]], asking: EmbeddingCall, *, raw: bool = False
) -> tuple[list[float], int]:
    """Return how well the texts of each pair match, and the number of tokens read.

    For a reranker it is the model's score, 0 to 1, or with `raw` before the logistic function; for an embedding model
    the cosine, for which each text is computed once.
    """
    check_scores(service)
    if not pairs:
        raise InvalidRequest(f"{asking.field} is empty; it must hold at least one text", field=asking.field)
    if asking.instruction is not None and service.spec.judge is None:
        raise InvalidRequest(f"{service.name} takes no instruction", field="instruction")
    if service.spec.kind == "rerank":
        wholes = await _encoded_pairs(service, pairs, asking)
        scored = [float(one[0]) for one in await _computed(service, wholes, asking)]
        return scored if raw else [_logistic(one) for one in scored], _tokens(wholes)
    named: dict[Text, str] = {}
    for number, (one, other) in enumerate(pairs):
        named.setdefault(other, f"{asking.field}[{number}]")
        named.setdefault(one, f"the query of {asking.field}[{number}]")
    wholes = await _encoded(service, list(named), list(named.values()), asking)
    known = dict(zip(named, finished(await _computed(service, wholes, asking)), strict=True))
    return [float((known[one] * known[other]).sum()) for one, other in pairs], _tokens(wholes)


def _logistic(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score > 0 else math.exp(score) / (1 + math.exp(score))


def check_dimensions(service: Service, dimensions: int | None, *, normalize: bool = True) -> None:
    """Raise InvalidRequest if vectors cannot be cut to so many numbers."""
    most = service.spec.width
    if dimensions is None or dimensions == most:
        return
    if not 1 <= dimensions <= most:
        raise InvalidRequest(
            f"dimensions must be from 1 to {most}, which the vectors of {service.name} have; it is {dimensions}",
            field="dimensions",
        )
    if not normalize:
        raise InvalidRequest("dimensions needs normalize to be true: cut vectors are scaled again", field="normalize")


def finished(vectors: Sequence[Vector], dimensions: int | None = None, *, normalize: bool = True) -> list[Vector]:
    """Return the vectors cut to `dimensions` numbers, and scaled to length 1 if `normalize`."""
    import numpy as np

    done = []
    for vector in vectors:
        cut = vector[:dimensions]
        size = float(np.sqrt(np.square(cut, dtype=np.float64).sum()))
        done.append((cut / max(size, 1e-12)).astype(np.float32) if normalize else cut)
    return done


def _tokens(wholes: Sequence[WholeInput]) -> int:
    return sum(len(whole.tokens) for whole in wholes)


async def _encoded(
    service: Service, texts: Sequence[Text], named: Sequence[str], asking: EmbeddingCall
) -> list[WholeInput]:
    """Return the texts as tokens, checked. `named`: how errors call each of them."""
    for name, text in zip(named, texts, strict=True):
        if not text and not isinstance(text, str):
            raise InvalidRequest(f"{name} is empty", field=asking.field)
    tokenizer, limit = service.tokenizer, longest_text(service)
    cut, words = limit if asking.truncate else None, _words(service, asking.prompt_name)

    def one(text: Text) -> WholeInput:
        if isinstance(text, str):
            return tokenizer.affixes.whole(tokenizer.encode(_readable(words + text, cut)), cut)
        ids: list[int] = []
        for piece in text:
            ids += [piece] if isinstance(piece, int) else tokenizer.encode(_readable(piece, cut))
        return WholeInput(tuple(ids[:cut]))

    def encode() -> list[WholeInput]:
        return _bounded((one(text) for text in texts), asking.field)

    wholes = await _aside(service, [piece for text in texts for piece in _pieces(text)], asking, encode)
    for name, whole in zip(named, wholes, strict=True):
        _check(service, whole, name, limit, asking)
    return wholes


def _pieces(text: Text) -> list[str]:
    """Return the texts that have to be encoded."""
    return [text] if isinstance(text, str) else [piece for piece in text if isinstance(piece, str)]


def _readable(text: str, cut: int | None) -> str:
    """Return the beginning of a text that can matter if `cut` tokens of it remain: encoding the rest wastes memory."""
    return text if cut is None else text[: CHARACTERS * cut]


def _bounded(wholes: Iterable[WholeInput], field: str) -> list[WholeInput]:
    """Return the texts as a list. Raise InvalidRequest if they have too many tokens together."""
    texts, tokens = list[WholeInput](), 0
    for whole in wholes:
        tokens += len(whole.tokens)
        if tokens > MAX_TOKENS:
            raise InvalidRequest(
                f"{field} has more than {MAX_TOKENS} tokens together, the limit of a call", field=field
            )
        texts.append(whole)
    return texts


def _words(service: Service, name: str | None) -> str:
    """Return the words to put before a text. Raise InvalidRequest for a prompt name that the model does not have."""
    known = service.spec.embedding.prompts
    name = service.spec.embedding.prompt if name is None else name
    if name is None:
        return ""
    if name not in known:
        named = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise InvalidRequest(f"{service.name} has no prompt of the name {name[:80]!r}; {named}", field="prompt_name")
    return known[name]


async def _encoded_pairs(service: Service, pairs: Sequence[tuple[str, str]], asking: EmbeddingCall) -> list[WholeInput]:
    tokenizer, limit = service.tokenizer, longest_text(service)
    cut = limit if asking.truncate else None
    read = sum(len(_readable(one, cut)) + len(_readable(other, cut)) for one, other in pairs)
    read += len(pairs) * len(asking.instruction or "")
    if service.spec.judge is not None and read > MAX_READ:  # the query is read again with each text
        raise InvalidRequest(
            f"{asking.field}, each with its query, has more than {MAX_READ} characters, the limit of a call",
            field=asking.field,
        )

    def encode() -> list[WholeInput]:
        if service.spec.judge is not None:
            question = Question(tokenizer, asking.instruction)
            judged = (question.pair(_readable(one, cut), _readable(other, cut), cut) for one, other in pairs)
            return _bounded(judged, asking.field)
        known = {text: tokenizer.encode(_readable(text, cut)) for pair in pairs for text in pair}
        return _bounded((tokenizer.affixes.both(known[one], known[other], cut) for one, other in pairs), asking.field)

    wholes = await _aside(service, [text for pair in pairs for text in pair], asking, encode)
    for number, whole in enumerate(wholes):
        _check(service, whole, f"{asking.field}[{number}] with its query", limit, asking)
    return wholes


async def _aside(service: Service, texts: Sequence[str], asking: EmbeddingCall, encode: Encode) -> list[WholeInput]:
    """Run `encode`, in a thread if the texts are long."""
    if sum(map(len, texts)) <= INLINE:
        return encode()
    long, limit = service.chat.long, longest_text(service)
    if not asking.truncate:
        for text in texts:
            await length.check_length(service.tokenizer.encode, [text], limit, asking.field, long, asking.share)
    return await long.run(asking.share, encode)


def _check(service: Service, whole: WholeInput, name: str, limit: int, asking: EmbeddingCall) -> None:
    if not whole.tokens:
        raise InvalidRequest(f"{name} is empty: it has no tokens", field=asking.field)
    if len(whole.tokens) > limit:
        raise ContextTooLong(
            f"{name} has {len(whole.tokens)} tokens, which is too large: {service.name} takes at most {limit} "
            "(truncate cuts longer ones)",
            field=asking.field,
            prompt_tokens=len(whole.tokens),
            context=limit,
        )
    low, high = min(whole.tokens), max(whole.tokens)
    if low < 0 or high >= service.spec.vocab:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{name} holds token id {wrong}; ids go from 0 to {service.spec.vocab - 1}", field=asking.field
        )


async def _computed(service: Service, wholes: Sequence[WholeInput], asking: EmbeddingCall) -> list[Vector]:
    """Return the vectors of whole texts, in order. Retry requests that a full queue refuses after the first batch."""
    done: list[Vector] = []
    while len(done) < len(wholes):
        some = wholes[len(done) : len(done) + asking.at_once]
        try:
            done += await _together(service, some, asking)
        except Overloaded:
            if not done:
                raise
            await asyncio.sleep(_PAUSE)
    return done


async def _together(service: Service, wholes: Sequence[WholeInput], asking: EmbeddingCall) -> list[Vector]:
    requests = [
        Request(
            id=service.next_id(),
            prompt=whole.tokens,
            sampling=_SAMPLING,
            salt=asking.salt,
            share=asking.share,
            timeout=asking.timeout,
            stored=False,
            want="hidden",
            second=whole.second,
        )
        for whole in wholes
    ]
    import numpy as np

    vectors: dict[int, Vector] = {}
    async with contextlib.aclosing(merge(service.generate, requests)) as events:
        async for batch in events:
            for index, event in batch:
                if isinstance(event, Done):
                    vectors[index] = np.frombuffer(event.vector, np.float32)
    if not all(index in vectors and vectors[index].size for index in range(len(wholes))):
        raise GenerationFailed("the engine gave no vector")
    return [vectors[index] for index in range(len(wholes))]
