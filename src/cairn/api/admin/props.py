"""GET /props: what is served, and the defaults of requests, by llama-server's names."""

from __future__ import annotations

from typing import Any

from cairn import __version__
from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.frontend.request_options import sampling_params
from cairn.frontend.sampling_defaults import sampling_defaults
from cairn.frontend.sampling_extras import ORDERS
from cairn.frontend.service import Service


class Props:
    """The route of `/props`.

    Names: llama.cpp's tools/server/README.md, "GET /props". What has no meaning here is left out. Nothing is changed by
    this route, so there is no POST.
    """

    def __init__(self, state: ServerState) -> None:
        self._config = state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/props", self.show, model="url"),
        ]

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return what is served, and what applies if a request gives no option."""
        spec, tokenizer, context = service.spec, service.tokenizer, service.info.context
        defaults = sampling_defaults(spec, thinking=service.chat.thinks)
        ends = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in spec.eos_ids]
        await call.json(
            {
                "default_generation_settings": {
                    "n_ctx": context,
                    "params": self._defaults(service),
                    "sources": {name: one.source for name, one in defaults.items()},
                },
                "total_slots": min(self._config.max_running, service.info.max_rows),
                "model_path": self._config.model,
                "model_alias": service.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": service.chat.template,
                "bos_token": tokenizer.special_tokens.get("bos_token", ""),
                "eos_token": ends[0] if ends else tokenizer.special_tokens.get("eos_token", ""),
                "eos_tokens": ends,
                "build_info": f"cairn {__version__}",
            }
        )

    def _defaults(self, service: Service) -> dict[str, Any]:
        """Return what a request without options gets, by the function that completes requests."""
        order = self._config.sampler_order
        params = sampling_params(
            service.spec,
            prompt_tokens=1,
            context=service.info.context,
            thinking=service.chat.thinks,
            sampler_order=order,
        )
        return {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "samplers": list(ORDERS[order]),
            "n_predict": -1,
            "max_tokens": -1,
            "stop": [],
            "stream": False,
        }
