"""POST /tokenize and /detokenize, by vLLM's field names and by llama-server's.

https://docs.vllm.ai (serving/openai_compatible_server, Tokenizer API): `prompt` or `messages`; a prompt is encoded as
/v1/completions does it. llama.cpp's tools/server/README.md: `content`, `add_special`, `parse_special`, `with_pieces`.
"""

from __future__ import annotations

from typing import Any

from cairn.api.chat.generation import check_length, check_messages, check_model, check_template_args
from cairn.api.chat.message_schemas import contents, plain_messages, plain_tools
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import DetokenizeBody, TokenizeBody
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.openai.chat import encode_text
from cairn.frontend.service import Service
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import InvalidRequest


class TokenRoutes:
    """The two routes of tokens."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/tokenize", self.tokenize, TokenizeBody, model="chat"),
            Route("POST", "/detokenize", self.detokenize, DetokenizeBody, model="chat"),
        ]

    async def tokenize(self, call: HTTPCall, service: Service) -> None:
        """Return the tokens of a text or a chat.

        With `with_pieces` each token is {"id", "piece"}; a piece that is no valid UTF-8 is a list of its bytes.
        """
        body = await read(TokenizeBody, call, self._config)
        check_model(body.model, service)
        if sum(given is not None for given in (body.prompt, body.content, body.messages)) != 1:
            raise InvalidRequest("give one of prompt, content and messages", field="prompt")
        if body.messages is None:
            for name in ("tools", "chat_template_kwargs", "enable_thinking", "reasoning_effort"):
                if getattr(body, name) is not None:
                    raise InvalidRequest(f"{name} goes with messages, not with a text", field=name)
        elif body.parse_special is not None:
            raise InvalidRequest("parse_special goes with a text, not with messages", field="parse_special")
        if body.content is None and body.add_special is not None:
            raise InvalidRequest("add_special goes with content", field="add_special")
        if body.content is not None and body.add_special_tokens is not None:
            raise InvalidRequest("add_special_tokens goes with prompt and messages", field="add_special_tokens")
        if body.content is not None:
            tokens = await self._content(call, service, body.content, body)
        elif body.prompt is not None and body.add_special_tokens is False:
            tokens = await self._content(call, service, body.prompt, body)
        elif body.prompt is not None:
            tokens = await encode_text(call, service, body.prompt, special=body.parse_special is not False)
        else:
            tokens = await self._chat(call, service, body)
        shown: list[Any] = await self._pieces(call, service, tokens) if body.with_pieces else tokens
        await call.json({"tokens": shown, "count": len(tokens), "max_model_len": service.info.context})

    async def _pieces(self, call: HTTPCall, service: Service, tokens: list[int]) -> list[dict[str, Any]]:
        def pieces() -> list[dict[str, Any]]:
            return [piece_of(service, token) for token in tokens]

        return pieces() if len(tokens) <= INLINE else await service.chat.long.run(call.share, pieces)

    async def _content(self, call: HTTPCall, service: Service, text: str, body: TokenizeBody) -> list[int]:
        """Return the ids of a text by itself.

        Nothing is added before it unless asked for; control tokens written in it are control tokens unless the body
        says no.
        """
        tokenizer, special = service.tokenizer, body.parse_special is not False
        encode = tokenizer.encode_prompt if body.add_special else tokenizer.encode
        if len(text) <= INLINE:
            return encode(text, special=special)
        await check_length(call, service, [text], "content" if body.prompt is None else "prompt")
        return await service.chat.long.run(call.share, encode, text, special=special)

    async def _chat(self, call: HTTPCall, service: Service, body: TokenizeBody) -> list[int]:
        messages = body.messages or []
        check_messages(messages, self._config)
        check_template_args(body.chat_template_kwargs)
        tools = plain_tools(body.tools)
        await check_length(call, service, contents(messages, tools), "messages")
        prompt = await service.chat.prompt(
            plain_messages(messages),
            tools,
            tenant=call.tenant,
            share=call.share,
            template_args=body.template_args(service.chat.knows),
        )
        return list(prompt.tokens)

    async def detokenize(self, call: HTTPCall, service: Service) -> None:
        """Return the text of tokens.

        Control tokens are included: as a raw prompt the text has these tokens.
        """
        body = parse(DetokenizeBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        vocab = service.spec.vocab
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"tokens holds {token}; ids go from 0 to {vocab - 1}", field="tokens")
        if len(body.tokens) <= INLINE:
            text = service.tokenizer.spell(body.tokens)
        else:
            text = await service.chat.long.run(call.share, service.tokenizer.spell, body.tokens)
        await call.json({"prompt": text, "content": text})


def piece_of(service: Service, token: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes if they are no whole characters."""
    data = service.tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
