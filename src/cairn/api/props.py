"""GET /props: what is served and what applies where a request says nothing, by llama-server's names.

Names: llama.cpp's tools/server/README.md, "GET /props". What has no meaning here is left out. Nothing is changed by
this route, so there is no POST.
"""

from __future__ import annotations

from typing import Any

from cairn import __version__
from cairn.api.reply import Call
from cairn.config import Config
from cairn.service.requests import sampling_params
from cairn.service.sampler_order import ORDERS
from cairn.service.sampling_defaults import sampling_defaults
from cairn.service.service import Service


class Props:
    """The route of one server."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def show(self, call: Call, service: Service) -> None:
        """GET /props."""
        spec, tokenizer, context = service.spec, service.tokenizer, service.info.context
        ends = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in spec.eos_ids]
        await call.json(
            {
                "default_generation_settings": {
                    "n_ctx": context,
                    "params": self._defaults(service),
                    "sources": {name: applied.source for name, applied in sampling_defaults(spec).items()},
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
        """What a request gets that gives no option: the same function that completes requests says so."""
        order = self._config.sampler_order
        params = sampling_params(service.spec, prompt_tokens=1, context=service.info.context, sampler_order=order)
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
