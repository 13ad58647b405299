"""POST /api/embed and /api/embeddings, as Ollama has them. Shapes: github.com/ollama/ollama, docs/api.md."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from cairn.api.chat.generation import check_model
from cairn.api.chat.parse import parse
from cairn.api.http.call import HTTPCall
from cairn.api.http.json_body import read_plain
from cairn.api.ollama.chat import is_called
from cairn.api.ollama.schemas import OllamaEmbedBody, OllamaEmbeddingsBody
from cairn.api.openai.embeddings import Embeddings, floats
from cairn.config.config import Config
from cairn.frontend.embeddings import check_embeds
from cairn.frontend.service import Service

Endpoint = Callable[[HTTPCall, Service], Awaitable[None]]


class OllamaEmbeddings:
    """The routes of vectors."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._embeddings = Embeddings(config)

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Every route, by path and method."""
        return {"/api/embed": {"POST": self.embed}, "/api/embeddings": {"POST": self.embeddings}}

    async def embed(self, call: HTTPCall, service: Service) -> None:
        """POST /api/embed: of one text or several; all of length 1."""
        began = time.monotonic_ns()
        body = parse(OllamaEmbedBody, await read_plain(call, self._config), self._config, call)
        _check(body.model, service)
        load = int(call.load_seconds * 1e9)
        if not body.input:  # it asks for the model to be loaded, which it is
            check_embeds(service)
            costs = {"total_duration": load, "load_duration": load, "prompt_eval_count": 0}
            await call.json({"model": service.name, "embeddings": []} | costs)
            return
        asking = self._embeddings.asking(call, body.truncate is not False, "input")
        made, tokens = await self._embeddings.made(call, service, body.input, asking, body.dimensions, None)
        await call.json(
            {
                "model": service.name,
                "embeddings": [floats(one) for one in made],
                "total_duration": load + time.monotonic_ns() - began,
                "load_duration": load,
                "prompt_eval_count": tokens,
            }
        )

    async def embeddings(self, call: HTTPCall, service: Service) -> None:
        """POST /api/embeddings: of one text, of the length that the model gives it."""
        body = parse(OllamaEmbeddingsBody, await read_plain(call, self._config), self._config, call)
        _check(body.model, service)
        if not body.prompt:
            check_embeds(service)
            await call.json({"embedding": []})
            return
        asking = self._embeddings.asking(call, True, "prompt")
        made, _ = await self._embeddings.made(call, service, body.prompt, asking, None, False)
        await call.json({"embedding": floats(made[0])})


def _check(model: str | None, service: Service) -> None:
    check_model(None if model is None or is_called(service, model) else model, service)
