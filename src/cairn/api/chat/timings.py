"""Timings of an answer in llama-server's form, for clients that ask for them.

Shapes: github.com/ggml-org/llama.cpp, tools/server/README.md (`timings`, `prompt_progress`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cairn.api.chat.exchange import ChoiceStream
from cairn.types.outputs import Delta, Done
from cairn.types.stats import CacheReport


def cache_of(choice: ChoiceStream) -> CacheReport | None:
    """Return where the KV of a choice's prompt came from; None until that is computed."""
    return None if choice.stream is None else choice.stream.cache


class AnswerTimes:
    """The times of one answer's choices, measured from the construction of this object."""

    def __init__(
        self,
        choices: Sequence[ChoiceStream],
        *,
        timings: bool | None,
        progress: bool | None,
        cache: Callable[[ChoiceStream], CacheReport | None] = cache_of,
    ) -> None:
        """Begin to measure. `timings`: report times with each piece and at the end; `progress`: also of the prompt."""
        self.timings, self.progress = bool(timings), bool(progress)
        self._choices, self._cache = choices, cache
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        """The time of each choice's first token."""
        self._told: dict[int, int] = {}
        """Prompt tokens in the last report of each choice."""

    def heard(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Record a delta of a choice; return the reports of prompt progress to send before it.

        The first report has the cached tokens, the last the whole prompt, each in `prompt_progress` and `timings`.
        """
        if index in self._first and not delta.progress:
            return []
        places = [place for one in delta.progress for place in (one.cached, one.processed)]
        cached = delta.progress[0].cached if delta.progress else 0
        if index not in self._first and (delta.tokens or delta.text or delta.reasoning):
            self._first[index] = time.monotonic()
            cached = self._cached(index)
            places += [cached, len(self._choices[index].request.prompt)]
        if not self.progress:
            return []
        told = []
        for at in places:
            if at > self._told.get(index, -1):
                self._told[index] = at
                told.append(self._progress(index, cached, at))
        return told

    def so_far(self, index: int) -> dict[str, Any]:
        """Return the timings of a choice that is still generated."""
        choice, first, cached = self._choices[index], self._first.get(index, self._began), self._cached(index)
        said = time.monotonic() - first
        return timings(cached, len(choice.request.prompt) - cached, first - self._began, len(choice.tokens), said)

    def whole(self, index: int, done: Done) -> dict[str, Any]:
        """Return the timings of a choice that has ended."""
        choice, cached = self._choices[index], done.usage.cached_tokens
        computed = len(choice.request.prompt) - cached
        return timings(cached, computed, done.timing.prefill, len(choice.tokens), done.timing.decode)

    def _cached(self, index: int) -> int:
        report = self._cache(self._choices[index])
        return 0 if report is None else report.cached

    def _progress(self, index: int, cached: int, processed: int) -> dict[str, Any]:
        passed = time.monotonic() - self._began
        total = len(self._choices[index].request.prompt)
        progress = {"total": total, "cache": cached, "processed": processed, "time_ms": int(1000 * passed)}
        return {"prompt_progress": progress, "timings": timings(cached, processed - cached, passed, 0, 0.0)}


def timings(cached: int, computed: int, prompt: float, said: int, saying: float) -> dict[str, Any]:
    """Return llama.cpp's `timings` object: tokens and milliseconds of a prompt and of an answer."""
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": 1000 * prompt,
        "prompt_per_token_ms": 1000 * prompt / max(computed, 1),
        "prompt_per_second": computed / prompt if prompt > 0 else 0.0,
        "predicted_n": said,
        "predicted_ms": 1000 * saying,
        "predicted_per_token_ms": 1000 * saying / max(said, 1),
        "predicted_per_second": said / saying if saying > 0 else 0.0,
    }
