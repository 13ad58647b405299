"""The stream simulator: from a worker's outputs to what a consumer reads, from one seed.

Random tokens (characters cut anywhere, invalid bytes, stop strings, an end token) travel as the worker packs them,
through the front's record of a request and its text, to a consumer that reads at random times. Workers die in between.
What the consumer has read is always the beginning of the one right answer, and in the end all of it.
"""

from __future__ import annotations

import codecs
import random
import sys
from functools import cache

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from cairn.frontend.request_state import RequestState
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import Delta, Done, FinishReason, Output, Timing, TokenLogprob
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport
from cairn.worker.worker import _columns
from tests.laws.simulator import Broken, law

ALPHABET = "aab bnEND.é你😀\n"
MERGES = [("a", "b"), ("ab", "a"), ("E", "N"), ("Ġ", "b")]


@cache
def tokenizer() -> Tokenizer:
    """Return byte-level BPE over all bytes, with a few merges and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(first + second for first, second in MERGES)]
    library = Library(models.BPE({word: index for index, word in enumerate(words)}, MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return Tokenizer(library, decoder, {})


def plain(tokens: list[int]) -> str:
    """Decode tokens from their bytes alone."""
    return b"".join(tokenizer().token_bytes(token) for token in tokens).decode("utf-8", "replace")


def cut(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the text before the stop string that completes first, or None."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


class Answer:
    """The right answer to one request."""

    def __init__(self, chance: random.Random) -> None:
        words = tokenizer()
        text = "".join(chance.choice(ALPHABET) for _ in range(chance.randint(0, 40)))
        tokens = words.encode(text)
        if chance.random() < 0.4:
            tokens.insert(chance.randint(0, len(tokens)), chance.randrange(256))
        tokens = tokens[: chance.randint(1, max(1, len(tokens)))] or [chance.randrange(256)]
        end = words.token_id("<end>")
        assert end is not None
        self.ended = chance.random() < 0.5
        self.sent = [*tokens, end] if self.ended else tokens
        bits = [text[at : at + chance.randint(1, 4)] for at in range(0, len(text), 5)]
        pool = [*bits, "END", "ab", "aab", "😀", "zz"]
        self.stops = tuple(chance.sample(pool, min(len(pool), chance.choice((0, 0, 1, 2)))))
        self.stops = tuple(stop for stop in self.stops if stop)
        self.scores = tuple(TokenLogprob(token, -1.0) for token in range(chance.choice((0, 0, 7))))
        self.known = self.sent[: chance.randint(0, len(self.sent) - 1)] if not self.stops and not self.scores else []
        self.known = self.known if chance.random() < 0.3 else []
        whole = plain(tokens)
        visible = cut(whole, self.stops)
        self.stopped = visible is not None
        self.text = whole if visible is None else visible
        self.counted = list(self.sent)
        if visible is not None:
            self.counted = next(
                self.sent[:count]
                for count in range(1, len(tokens) + 1)
                if cut(certain(tokens[:count], count == len(tokens)), self.stops) is not None
            )
        self.shown_before = certain(self.known, False)
        ends_well = self.stopped or self.ended
        self.reason = FinishReason.STOP if ends_well else FinishReason.LENGTH


def certain(tokens: list[int], last: bool) -> str:
    """Decode tokens, without a trailing character that the next token may still complete."""
    data = b"".join(tokenizer().token_bytes(token) for token in tokens)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=last)


class World:
    """One stream: a worker's outputs, the front's record and a consumer."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.answer = Answer(self.chance)
        answer = self.answer
        sampling = SamplingParams(
            max_tokens=len(answer.sent),
            logprobs=self.chance.random() < 0.4,
            prompt_logprobs=bool(answer.scores),
            stop_token_ids=(tokenizer().token_id("<end>") or 0,),
        )
        self.request = Request(
            id=7, prompt=(1, 2), sampling=sampling, stop=answer.stops, generated=tuple(answer.known), timeout=50.0
        )
        self.flight = RequestState(self.request, TextStream(tokenizer(), self.request), 0.0)
        self.time = 0.0
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[TokenLogprob] = []
        self.done: Done | None = None
        self.deaths = self.chance.choice((0, 0, 1, 2))

    def run(self) -> None:
        chance = self.chance
        outputs = self.outputs(self.answer.scores, self.answer.sent[len(self.answer.known) :])
        while outputs:
            self.time += 1
            if self.deaths and chance.random() < 0.2:
                self.deaths -= 1
                outputs = self.die()
            self.deliver(outputs.pop(0))
            if self.flight.done:
                break
            while chance.random() < 0.4:
                self.read()
        law(self.flight.done, "the stream never ended")
        self.read()
        self.read()
        self.at_end()

    def outputs(self, scores: tuple[TokenLogprob, ...], tokens: list[int]) -> list[Output]:
        """Return a worker's outputs for these tokens."""
        made = []
        while scores and self.chance.random() < 0.7:
            part, scores = scores[:3], scores[3:]
            made.append(Output(id=7, prompt_logprobs=part))
        first = True
        while tokens:
            count = self.chance.choice((1, 1, 1, 2, 3))
            part, tokens = tokens[:count], tokens[count:]
            reason = FinishReason.STOP if self.answer.ended else FinishReason.LENGTH
            made.append(
                Output(
                    id=7,
                    tokens=tuple(part),
                    logprobs=tuple(TokenLogprob(t, -2.0) for t in part) if self.request.sampling.logprobs else (),
                    prompt_logprobs=scores if first else (),
                    cache=CacheReport(computed=2) if first else None,
                    finish=None if tokens else reason,
                    timing=None if tokens else Timing(),
                )
            )
            first = False
        return made

    def die(self) -> list[Output]:
        """Let the worker die; the next one goes on from what the front has."""
        again = self.flight.resume(self.time)
        got = self.answer.sent[: len(again.generated)]
        law(list(again.generated) == got, "a worker is told of other tokens than were sent")
        law(again.timeout == 50.0 - self.time, "a new worker starts the clock again")
        law(again.prompt == self.request.prompt and again.stop == self.request.stop, "another request goes on")
        law(not (again.generated and again.sampling.prompt_logprobs), "a prompt is scored again")
        return self.outputs(self.answer.scores if again.sampling.prompt_logprobs else (), self.answer.sent[len(got) :])

    def deliver(self, output: Output) -> None:
        """Deliver one frame as the service does."""
        ids, tokens, others = _columns([output])
        flight = self.flight
        law(len(ids) + len(others) == 1, "an output travels more than once, or not at all")
        for token in tokens:
            flight.accept_token(token)
        for other in others:
            flight.accept(other)
        if flight.eager:
            flight.read()
            if flight.text.stopped and not output.finish:
                flight.end(FinishReason.STOP, None, None)
        if not flight.done and others and others[0].finish is not None:
            flight.end(others[0].finish, None, others[0].timing)

    def read(self) -> None:
        """Read what the stream has; all of it must be the beginning of the answer."""
        law(self.flight.idle is False or not self.flight.take(), "an idle stream says something")
        for event in self.flight.take() if self.done is None else []:
            law(self.done is None, "something came after the end")
            if isinstance(event, Delta):
                self.text += event.text
                self.tokens += event.tokens
                self.logprobs += event.logprobs
                self.scores += event.prompt_logprobs
                law(
                    not event.tokens or not self.scores or len(self.scores) == 7,
                    "a token comes before the prompt's scores",
                )
            else:
                self.done = event
        answer = self.answer
        law(answer.text.startswith(answer.shown_before + self.text), "text that is not the answer's was shown")
        due = answer.counted[len(answer.known) :]
        law(self.tokens == due[: len(self.tokens)], "tokens that are not the answer's were shown")
        law(tuple(self.scores) == answer.scores[: len(self.scores)], "prompt logprobs twice, or out of order")
        law(self.logprobs == self.scored[: len(self.logprobs)], "logprobs of other tokens")

    @property
    def scored(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens read so far; they come with their text, which may be held back."""
        return [TokenLogprob(token, -2.0) for token in self.tokens] if self.request.sampling.logprobs else []

    def at_end(self) -> None:
        answer = self.answer
        law(self.done is not None, "the stream has no end")
        law(answer.shown_before + self.text == answer.text, "text is missing")
        law(self.tokens == answer.counted[len(answer.known) :], "tokens are missing")
        law(self.logprobs == self.scored, "logprobs are missing")
        law(tuple(self.scores) == answer.scores, "prompt logprobs are missing")
        if self.done is not None:
            law(self.done.reason is answer.reason, "ended for another reason")
            law(self.done.usage.completion_tokens == len(self.tokens), "tokens are counted wrongly")
            law(self.flight.status().completion_tokens == len(answer.counted), "the status counts other tokens")
            law(self.flight.status().text == answer.text, "the status shows another text")


def run(seed: int) -> World:
    """Run one stream; raise `Broken` with the seed in the message."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
    return world


def run_many(first: int, count: int) -> int:
    """Run `count` streams from seed `first` on; return how many tokens they carried."""
    return sum(len(run(seed).tokens) for seed in range(first, first + count))


if __name__ == "__main__":
    first, count = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 5000)
    print(run_many(first, count))
