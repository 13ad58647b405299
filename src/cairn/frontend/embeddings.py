"""Texts to vectors and scores, through a service's requests: HTTP, Python and the CLI all come through here.

Each text is a request of its own, so texts of all callers share steps, without padding, and take their tenants' turns.
Of many texts so many are under way at once that the queue keeps room for others. numpy is imported with the first
text: a server that only answers chats does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.frontend.reranker_prompt import Question
from cairn.frontend.service import Service
from cairn.frontend.stream import merge
from cairn.text.tokens import length
from cairn.text.tokens.post_processor import WholeInput
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import ContextTooLong, GenerationFailed, InvalidRequest, Overloaded
from cairn.types.outputs import Done
from cairn.types.request import Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

Text = str | Sequence[int | str]
"""A text, or its token ids as they are to be computed; texts may stand between them."""
Encode = Callable[[], list[WholeInput]]

MAX_TEXTS = 2048
"""Texts of one call, as in the OpenAI API."""
MAX_TOKENS = 1 << 20
"""Tokens of all texts of one call, so that no call fills the memory with them."""
MAX_READ = 16 << 20
"""Characters of all pairs of one call that are read together with their query."""
CHARACTERS = 64
"""Characters for each token that a text may have, of one that is to be cut: what follows is not read."""
AT_ONCE = 256
"""Texts of one call that are under way at once, at most."""
_PAUSE = 0.05
_SAMPLING = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class Asking:
    """Whose texts they are, and what bounds them."""

    salt: bytes = b""
    share: str = ""
    timeout: float | None = None
    at_once: int = AT_ONCE
    truncate: bool = False
    """Whether a text that is too long is cut; otherwise it is refused."""
    field: str = "input"
    """What the caller calls the texts."""
    prompt_name: str | None = None
    """Which of the model's words stand before them; None: those that it puts before every text, if any."""
    instruction: str | None = None
    """What a decoder judges by; None: whether a document answers a query of a web search."""


def check_embeds(service: Service) -> None:
    """InvalidRequest for a model that makes no vectors."""
    if service.spec.kind == "rerank":
        raise InvalidRequest(
            f"{service.name} judges pairs of texts and makes no embeddings; it serves /v1/rerank and /v1/score",
            field="model",
        )


def check_scores(service: Service) -> None:
    """InvalidRequest for a judge whose answer is not one score."""
    encoder = service.spec.encoder
    if service.spec.kind == "rerank" and encoder is not None and encoder.labels != 1:
        raise InvalidRequest(
            f"{service.name} sorts texts into {encoder.labels} classes; a model that ranks has one score", field="model"
        )


def longest_text(service: Service) -> int:
    """Tokens of the longest text that this model takes."""
    return min(service.info.context, service.spec.longest_text)


async def vectors(service: Service, texts: Sequence[Text], asking: Asking) -> tuple[list[Vector], int]:
    """The vector of each text as the model gives it, and how many tokens they have together."""
    check_embeds(service)
    wholes = await _encoded(service, texts, asking)
    return await _computed(service, wholes, asking), sum(len(whole.tokens) for whole in wholes)


async def scores(
    service: Service, pairs: Sequence[tuple[str, str]], asking: Asking, *, raw: bool = False
) -> tuple[list[float], int]:
    """How well the texts of each pair go together, and how many tokens were read for it.

    Of a model that judges pairs its own score, 0 to 1, or with `raw` before the logistic function; of one that makes
    embeddings the cosine, for which each text is computed once.
    """
    check_scores(service)
    if asking.instruction is not None and service.spec.judge is None:
        raise InvalidRequest(f"{service.name} takes no instruction", field="instruction")
    if service.spec.kind == "rerank":
        wholes = await _encoded_pairs(service, pairs, asking)
        found = [float(one[0]) for one in await _computed(service, wholes, asking)]
        return found if raw else [_logistic(one) for one in found], sum(len(whole.tokens) for whole in wholes)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    made, tokens = await vectors(service, texts, asking)
    known = dict(zip(texts, finished(made), strict=True))
    return [float((known[one] * known[other]).sum()) for one, other in pairs], tokens


def _logistic(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score > 0 else math.exp(score) / (1 + math.exp(score))


def check_dimensions(service: Service, dimensions: int | None, *, normalize: bool = True) -> None:
    """InvalidRequest for a number of dimensions that this model's vectors cannot be cut to."""
    most = service.spec.width
    if dimensions is None or dimensions == most:
        return
    if not 1 <= dimensions <= most:
        raise InvalidRequest(
            f"dimensions must be from 1 to {most}, which the vectors of {service.name} have; it is {dimensions}",
            field="dimensions",
        )
    if not normalize:
        raise InvalidRequest("dimensions cuts vectors that are normalised again; normalize is false", field="normalize")


def finished(made: Sequence[Vector], dimensions: int | None = None, *, normalize: bool = True) -> list[Vector]:
    """Vectors cut to their first `dimensions` numbers, of length 1 where they are to be normalised."""
    import numpy as np

    done = []
    for one in made:
        cut = one[:dimensions]
        size = float(np.sqrt(np.square(cut, dtype=np.float64).sum()))
        done.append((cut / max(size, 1e-12)).astype(np.float32) if normalize else cut)
    return done


async def _encoded(service: Service, texts: Sequence[Text], asking: Asking) -> list[WholeInput]:
    if not texts:
        raise InvalidRequest(f"{asking.field} is empty; it must hold at least one text", field=asking.field)
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"{asking.field} holds {len(texts)} texts; the limit is {MAX_TEXTS}", field=asking.field)
    named = [asking.field if len(texts) == 1 else f"{asking.field}[{number}]" for number in range(len(texts))]
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
    """What of a text has to be encoded."""
    return [text] if isinstance(text, str) else [piece for piece in text if isinstance(piece, str)]


def _readable(text: str, cut: int | None) -> str:
    """What is read of a text of which `cut` tokens are left: encoding the rest would take memory for nothing."""
    return text if cut is None else text[: CHARACTERS * cut]


def _bounded(wholes: Iterable[WholeInput], field: str) -> list[WholeInput]:
    """The texts, unless they have too many tokens together."""
    found, tokens = list[WholeInput](), 0
    for whole in wholes:
        tokens += len(whole.tokens)
        if tokens > MAX_TOKENS:
            raise InvalidRequest(
                f"{field} has more than {MAX_TOKENS} tokens together, the limit of a call", field=field
            )
        found.append(whole)
    return found


def _words(service: Service, name: str | None) -> str:
    """What stands before a text. InvalidRequest for a name that the model does not have."""
    known = service.spec.embedding.prompts
    name = service.spec.embedding.prompt if name is None else name
    if name is None:
        return ""
    if name not in known:
        named = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise InvalidRequest(f"{service.name} has no prompt of the name {name[:80]!r}; {named}", field="prompt_name")
    return known[name]


async def _encoded_pairs(service: Service, pairs: Sequence[tuple[str, str]], asking: Asking) -> list[WholeInput]:
    if not pairs:
        raise InvalidRequest(f"{asking.field} is empty; it must hold at least one text", field=asking.field)
    tokenizer, limit = service.tokenizer, longest_text(service)
    cut = limit if asking.truncate else None
    read = sum(len(_readable(one, cut)) + len(_readable(other, cut)) for one, other in pairs)
    read += len(pairs) * len(asking.instruction or "")
    if service.spec.judge is not None and read > MAX_READ:  # a query is read again with each text
        raise InvalidRequest(
            f"{asking.field}, each with its query, have more than {MAX_READ} characters, the limit of a call",
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


async def _aside(service: Service, texts: Sequence[str], asking: Asking, encode: Encode) -> list[WholeInput]:
    """What `encode` makes of these texts, in a thread where they are long."""
    if sum(map(len, texts)) <= INLINE:
        return encode()
    long, limit = service.chat.long, longest_text(service)
    if not asking.truncate:
        for text in texts:
            await length.check_length(service.tokenizer.encode, [text], limit, asking.field, long, asking.share)
    return await long.run(asking.share, encode)


def _check(service: Service, whole: WholeInput, name: str, limit: int, asking: Asking) -> None:
    if not whole.tokens:
        raise InvalidRequest(f"{name} is empty: its tokenizer makes nothing of it", field=asking.field)
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


async def _computed(service: Service, wholes: Sequence[WholeInput], asking: Asking) -> list[Vector]:
    """The vectors of whole texts, in order. What a full queue refuses in the middle is asked for again."""
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


async def _together(service: Service, wholes: Sequence[WholeInput], asking: Asking) -> list[Vector]:
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

    found: dict[int, Vector] = {}
    async with contextlib.aclosing(merge(service.generate, requests)) as events:
        async for batch in events:
            for index, event in batch:
                if isinstance(event, Done):
                    found[index] = np.frombuffer(event.vector, np.float32)
    if not all(index in found and found[index].size for index in range(len(wholes))):
        raise GenerationFailed("the engine gave no vector")
    return [found[index] for index in range(len(wholes))]
