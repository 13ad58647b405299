"""llama-server's own routes: POST /completion and /infill, and others that its clients use.

Shapes: github.com/ggml-org/llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.generation import chat_prompt, check_length, check_model, text_exchange
from cairn.api.chat.openai_chunks import cache_object, token_scores
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody
from cairn.api.chat.state import ServerState
from cairn.api.chat.timings import AnswerTimes
from cairn.api.http.body import read_json
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.http.sse import HEARTBEAT, error_event, json_event
from cairn.api.llamacpp.schemas import InfillBody, LlamaBody, LlamaCompletionBody, plain, prompts_of
from cairn.frontend.request_options import checked_prompt
from cairn.frontend.service import Service
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import CairnError, InvalidRequest, Unavailable
from cairn.types.outputs import Delta, Done, FinishReason, TokenLogprob

NAMES = {
    "top_logprobs": "n_probs",
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}
"""These routes' names for the fields of a request."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""Put before each file beside the one to be filled in, for models without tokens for that."""


class Llama:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._exchanges = state.exchanges
        self._attribution = state.attribution

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/completion", self.completion, LlamaCompletionBody, model="chat"),
            Route("POST", "/infill", self.infill, InfillBody, model="chat"),
            Route("POST", "/apply-template", self.apply_template, ChatBody, model="chat"),
            Route("POST", "/v1/chat/completions/input_tokens", self.input_tokens, ChatBody, model="chat"),
            Route("GET", "/slots", self.slots, model="url"),
        ]

    async def completion(self, call: HTTPCall, service: Service) -> None:
        """Generate what follows a text, in llama-server's form."""
        given = plain(await read_json(call, self._config))
        body = parse(LlamaCompletionBody, given, self._config, call)
        check_model(body.model, service)
        service.check_generates()
        special = body.parse_special is not False
        prompts = [
            await _encoded(call, service, pieces, special=special)
            for pieces in prompts_of(body.prompt, self._config.max_prompts)
        ]
        await self._run(call, service, body, prompts)

    async def infill(self, call: HTTPCall, service: Service) -> None:
        """Fill in the text between `input_prefix` and `input_suffix`; it begins with `prompt`."""
        given = plain(await read_json(call, self._config))
        body = parse(InfillBody, given, self._config, call)
        check_model(body.model, service)
        service.check_generates()
        middle = service.tokenizer.middle
        if middle is None:
            raise InvalidRequest("this model has no tokens for filling in the middle", field="input_suffix")
        extra = "".join(SNIPPET + one.text for one in body.input_extra or ())
        texts = [extra, body.input_prefix, body.input_suffix, body.prompt or ""]
        await check_length(call, service, texts, "input_prefix")
        encode = service.tokenizer.encode

        def tokens() -> list[int]:
            before = service.tokenizer.encode_prompt(extra, special=False)
            hole = [middle.prefix, *encode(texts[1]), middle.suffix, *encode(texts[2]), middle.middle]
            return [*before, *hole, *encode(texts[3])]

        inline = sum(map(len, texts)) <= INLINE
        await self._run(call, service, body, [tokens() if inline else await service.chat.long.run(call.share, tokens)])

    async def _run(self, call: HTTPCall, service: Service, body: LlamaBody, prompts: Sequence[Sequence[int]]) -> None:
        options = body.options(logprobs=bool(body.n_probs), top_logprobs=body.n_probs or None)

        for prompt in prompts:
            if prompt:
                checked_prompt(prompt, service.spec)  # before ids are spelled that no token has

        def spelled() -> list[str]:
            return [service.tokenizer.spell(prompt) for prompt in prompts]

        inline = sum(map(len, prompts)) <= INLINE
        texts = spelled() if inline else await service.chat.long.run(call.share, spelled)
        exchange = await text_exchange(
            call,
            service,
            self._config,
            self._attribution,
            body,
            prompts,
            options,
            lambda choices: LlamaAnswer(service, choices, body, texts),
            NAMES,
            allow_empty=True,
        )
        await self._exchanges.run(call, exchange, stream=bool(body.stream))

    async def apply_template(self, call: HTTPCall, service: Service) -> None:
        """Return the prompt of a chat as a text. As a raw prompt the text has the same tokens."""
        prompt = await self._prompt(call, service)
        spell = partial(service.tokenizer.spell, prompt)
        text = spell() if len(prompt) <= INLINE else await service.chat.long.run(call.share, spell)
        await call.json({"prompt": text})

    async def input_tokens(self, call: HTTPCall, service: Service) -> None:
        """Count the tokens of a chat's prompt."""
        prompt = await self._prompt(call, service)
        await call.json({"object": "response.input_tokens", "input_tokens": len(prompt)})

    async def _prompt(self, call: HTTPCall, service: Service) -> Sequence[int]:
        body = await read(ChatBody, call, self._config)
        return (await chat_prompt(call, service, self._config, body)).tokens

    async def slots(self, call: HTTPCall, service: Service) -> None:
        """List the slots: as many as requests can run at once. Nothing of the requests is shown."""
        slots, running = min(self._config.max_running, service.info.max_rows), service.stats().running
        if b"fail_on_no_slot=1" in call.scope.get("query_string", b"") and running >= slots:
            raise Unavailable("no slot available", retry_after=1.0)
        one = {"id_task": -1, "n_ctx": service.info.context, "speculative": False}
        await call.json([{"id": id, "is_processing": id < running} | one for id in range(slots)])


class LlamaAnswer:
    """Formats completions. A stream ends with the object of a whole answer, without the text."""

    def __init__(
        self, service: Service, choices: Sequence[ChoiceStream], body: LlamaBody, prompts: Sequence[str]
    ) -> None:
        """Format the choices of each of the `prompts`, which are spelled as texts."""
        self._service = service
        self._prompts = prompts
        self._choices = choices
        self._body = body
        self._pace = AnswerTimes(choices, timings=body.timings_per_token, progress=body.return_progress)

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events of one delta."""
        choice = self._choices[index]
        none = {"content": "", "tokens": []}
        data = b"".join(json_event(self._piece(index) | none | told) for told in self._pace.heard(index, delta))
        if not (delta.text or delta.tokens):
            return data
        piece = self._piece(index) | {"content": delta.text, "tokens": list(delta.tokens)}
        piece |= {"tokens_predicted": len(choice.tokens), "tokens_evaluated": len(choice.request.prompt)}
        piece |= self._probabilities(delta.logprobs)
        if self._pace.timings:
            piece["timings"] = self._pace.so_far(index)
        return data + json_event(piece)

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return the last piece of a choice."""
        return json_event(self._end(index) | {"content": "", "tokens": []})

    def end(self) -> bytes:
        """Return nothing: the last pieces say that they are the last."""
        return b""

    def error(self, error: CairnError) -> bytes:
        """Return the event of a failure."""
        return error_event(error)

    def heartbeat(self) -> bytes:
        """Return a comment."""
        return HEARTBEAT

    def whole(self) -> Any:
        """Return the complete answer; of several choices a list."""
        found = [self._end(index) | self._probabilities(choice.logprobs) for index, choice in enumerate(self._choices)]
        shown = [self._chosen(one) for one in found]
        return shown[0] if len(shown) == 1 else shown

    def _piece(self, index: int) -> dict[str, Any]:
        return {"index": index, "stop": False, "id_slot": -1}

    def _probabilities(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not found:
            return {}
        shown = token_scores(found, self._service.tokenizer)
        for entry, one in zip(found, shown, strict=True):
            one["id"] = entry.token
            for (token, _), other in zip(entry.top, one["top_logprobs"], strict=True):
                other["id"] = token
        return {"completion_probabilities": shown}

    def _end(self, index: int) -> dict[str, Any]:
        choice, service = self._choices[index], self._service
        done, prompt = choice.done, choice.request.prompt
        assert done is not None
        word = choice.stop_text(service.tokenizer.decode)
        kind = "limit" if done.reason is FinishReason.LENGTH else "eos" if word is None else "word"
        return {
            "index": index,
            "content": choice.said.text,
            "tokens": choice.tokens if self._body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": service.name,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(prompt),
            "generation_settings": self._settings(choice),
            "prompt": self._prompts[index * len(self._prompts) // len(self._choices)],
            "has_new_line": "\n" in choice.said.text,
            "truncated": kind == "limit" and len(prompt) + len(choice.tokens) >= service.info.context,
            "stop_type": kind,
            "stopping_word": word or "",
            "tokens_cached": done.usage.cached_tokens,
            "timings": self._pace.whole(index, done),
            "cairn": cache_object(done.cache),
        }

    def _settings(self, choice: ChoiceStream) -> dict[str, Any]:
        """Return the sampling options that applied."""
        params = choice.request.sampling
        asked = -1 if self._body.max_tokens is None else self._body.max_tokens
        return {
            "n_predict": asked,
            "max_tokens": asked,
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(choice.request.stop),
            "ignore_eos": bool(self._body.ignore_eos),
            "stream": bool(self._body.stream),
            "n_probs": self._body.n_probs or 0,
            "n_ctx": self._service.info.context,
            "timings_per_token": bool(self._body.timings_per_token),
        }

    def _chosen(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the `response_fields`, nested ones by their paths. Fields that are absent are left out."""
        if not self._body.response_fields:
            return whole
        found = {}
        for path in self._body.response_fields:
            value: Any = whole
            for name in path.split("/", DEEPEST):
                value = value[name] if isinstance(value, Mapping) and name in value else _MISSING
            if value is not _MISSING:
                found[path] = value
        return found


_MISSING = object()
DEEPEST = 8
"""Objects within each other in an answer, and more than there are."""


async def _encoded(call: HTTPCall, service: Service, pieces: Sequence[str | int], *, special: bool) -> list[int]:
    """Encode the pieces; add what begins a text, such as BOS, unless the first piece is already a token id."""
    tokenizer = service.tokenizer
    texts = [piece for piece in pieces if isinstance(piece, str)]

    def tokens() -> list[int]:
        found: list[int] = []
        for at, piece in enumerate(pieces):
            if isinstance(piece, int):
                found.append(piece)
            elif at:
                found += tokenizer.encode(piece, special=special)
            else:
                found += tokenizer.encode_raw(piece, "", special=special)
        return found

    if sum(map(len, texts)) <= INLINE:
        return tokens()
    await check_length(call, service, texts, "prompt", special=special)
    return await service.chat.long.run(call.share, tokens)
