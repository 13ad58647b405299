"""One choice's tokens -> deltas: detokenizer, then splitter, then stop strings.

    tokens -> text (`detokenizer`) -> content | reasoning | tool calls (`output_parser`) -> content up to a stop string

Stop strings apply to content only: callers do not mean reasoning or the JSON of a tool call. Streams and whole answers
use the same steps, so both give the same text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from cairn.text.output.output_parser import all_markers, markers, splitter
from cairn.text.output.repetition import RepetitionWatch
from cairn.text.output.token_kinds import Run, TokenKinds
from cairn.text.output.tool_parser import Piece
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import Delta, FinishReason, TokenKind, ToolCallDelta, joined_calls
from cairn.types.request import Request


class StopScanner:
    """Cutter of a text stream at the stop string that is completed first; on a tie, at the one that began first.

    Text that could still become a stop string is held back, so the result does not depend on how the stream was split.
    At most one stop string's length is held and searched again per piece. Control tokens may be part of a stop string:
    their text is searched but never shown.
    """

    __slots__ = ("_held", "_hidden", "_stops", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """(start, end) of the control tokens in the held text."""
        self.hit = False
        """Whether a stop string was found; everything after it is dropped."""

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Add text and return what may be shown now; `hidden`: it is a control token's text, never shown."""
        if self.hit:
            return ""
        if hidden:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        if self._held:
            text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        self.hit = bool(found)
        keep = min(found)[1] if found else self._start_of_partial(text)
        self._held = "" if found else text[keep:]
        return self._shown(text, keep)

    def spelt_in(self, text: str) -> bool:
        """Return whether a text holds a stop string."""
        return any(stop in text for stop in self._stops)

    def release(self) -> str:
        """Return the held text: nothing follows it, or stop strings do not apply there."""
        held, self._held = self._held, ""
        return self._shown(held, len(held))

    def _shown(self, text: str, end: int) -> str:
        """Return the part of `text` before `end` without control tokens; the rest is held."""
        if not self._hidden:
            return text[:end]
        pieces, at = [], 0
        for start, stop in self._hidden:
            pieces.append(text[at : min(start, end)])
            at = min(stop, end)
        self._hidden = [(max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end]
        return "".join([*pieces, text[at:end]])

    def _start_of_partial(self, text: str) -> int:
        """Return where the longest suffix of `text` begins that starts a stop string; len(text) if there is none."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0), first)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, first)
            if start >= 0:
                first = start
        return first


_ORDER = {"reasoning": 0, "text": 1}


def hidden_controls(tokenizer: Tokenizer) -> dict[str, int]:
    """Return text -> id of the control tokens that are never shown; as a stop string each is a stop token too."""
    hidden, shown = tokenizer.special_ids | tokenizer.end_ids, all_markers(tokenizer.token_id)
    return {text: i for text, i in tokenizer.controls.ids.items() if i in hidden and text not in shown}


class TextStream:
    """The output stream of one request. Tokens in `request.generated` belong to its text but are not reported again."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        output = request.output
        formats = output.reasoning or output.tools
        spelt = {*markers(output), *(all_markers(tokenizer.token_id) if request.grammar else ())}
        kept = {i for tag in spelt if (i := tokenizer.token_id(tag)) is not None}
        ends = tokenizer.control_ids.intersection(request.sampling.stop_token_ids)
        skip = (tokenizer.special_ids | ends) - kept
        self._detokenizer = tokenizer.detokenizer(skip=skip, after=request.prompt if output.continues else ())
        self._splitter = splitter(output, request.id, request.choice) if formats else None
        self._stops = StopScanner(request.stop) if request.stop else None
        self._stop_tokens = {
            i: text
            for stop in request.stop
            for start, end in tokenizer.controls.find(stop)
            if (i := tokenizer.controls.ids[text := stop[start:end]]) in skip
        }
        """Id -> text of the hidden control tokens in stop strings."""
        self._reach = max(map(len, request.stop), default=0)
        self._recent = ""
        """The end of all text so far, control tokens included, long enough for a stop string."""
        self._in_content = not output.reasoning_open
        self._called = False
        """Whether a call, or the beginning of one, was passed on."""
        self._unstoppable = request.sampling.min_tokens
        self._watch = RepetitionWatch() if request.repetition_stop and request.grammar is None else None
        self._skip = skip
        self._scored = request.sampling.logprobs
        split = self._splitter is not None or self._stops is not None or self._watch is not None
        self._kinds = TokenKinds() if split and (output.reasoning or self._scored) else None
        """Classifier of tokens, if their kinds are reported."""
        self.tokens: list[int] = []
        """The tokens that count: those after a completed stop string do not."""
        self.before: list[Delta] = []
        """The deltas of `request.generated`."""
        if request.generated:
            self.before = self.push(request.generated)
            self._unstoppable -= len(self.tokens)
            self.tokens = []

    @property
    def stopped(self) -> bool:
        """Whether further tokens are ignored: a stop string was hit, the only call is complete, or the answer loops."""
        return self.looped or self._ended

    @property
    def looped(self) -> bool:
        """Whether the answer only repeats itself and is to end there."""
        return self._watch is not None and self._watch.looped

    @property
    def _ended(self) -> bool:
        """Whether a stop string or the last wanted call ended the answer."""
        return (self._stops is not None and self._stops.hit) or (self._splitter is not None and self._splitter.over)

    @property
    def unread_call(self) -> bool:
        """Whether text began like a tool call and could not be parsed: it is content or arguments, as written."""
        return self._splitter is not None and self._splitter.unread

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that count."""
        return len(self.tokens)

    @property
    def undecided(self) -> int:
        """Number of tokens whose kind is not reported yet."""
        return 0 if self._kinds is None else self._kinds.undecided

    def push(self, tokens: Sequence[int]) -> list[Delta]:
        """Add new tokens and return their deltas; at least one if any token counts.

        The first delta carries the tokens, even if their text is held back or dropped.
        """
        if self._splitter is None and self._stops is None and self._watch is None:
            self.tokens += tokens
            kinds = bytes(map(self._kind, tokens)) if self._scored else b""
            return [Delta(text=self._detokenizer.push(tokens), tokens=tuple(tokens), kinds=kinds)]
        pieces: list[Piece | bytes] = []
        counted = len(self.tokens)
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            control_text = self._stop_tokens.get(token, "") if len(self.tokens) > self._unstoppable else ""
            said = self._detokenizer.push((token,))
            said += self._detokenizer.flush() if control_text else ""
            split = self._split(said)
            visible = self._visible(split)
            if split:
                self._in_content = self._is_content(split)
            if control_text and not self.stopped:
                visible += self._search_control(control_text)
            pieces += visible
            self._note_calls(visible)
            if self._kinds is not None:
                self._kinds.add(len(said), hidden=token in self._skip)
                pieces.append(self._kinds.settle(self._runs(said), _content(visible), cut=self._ended))
            if self._watch is not None and not self._ended:
                self._look_for_loop(self._watch, token)
        counted = len(self.tokens) - counted
        return _deltas(pieces, tuple(tokens[:counted]))

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        """End the generation: return the text still held back and the finish reason for the caller.

        STOP becomes TOOL_CALLS if a tool call was completed and not dropped after a stop string. A stop string in the
        last text turns LENGTH into STOP.
        """
        pieces: list[Piece] = []
        rest = ""
        if not self._ended:
            pieces = self._split(rest := self._detokenizer.flush())
            if self._splitter is not None:
                pieces += self._splitter.finish(by_model=reason is FinishReason.STOP)
            pieces = self._visible(pieces)
            self._note_calls(pieces)
            if self._stops is not None and (held := self._stops.release()):
                pieces.append(("text", held))
        if self._ended and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        complete = 0 if self._splitter is None else self._splitter.complete_calls
        if reason is FinishReason.STOP and complete and self._called:
            reason = FinishReason.TOOL_CALLS
        kinds = b"" if self._kinds is None else self._kinds.finish(len(rest), self._runs(rest), _content(pieces))
        return _deltas([*pieces, kinds], ()), reason

    def _note_calls(self, passed_on: list[Piece]) -> None:
        self._called = self._called or any(isinstance(one, ToolCallDelta) for one in passed_on)

    def _kind(self, token: int) -> int:
        """Return the kind of a token when all text is content."""
        return TokenKind.HIDDEN if token in self._skip else TokenKind.CONTENT

    def _runs(self, said: str) -> Sequence[Run]:
        """Return the runs of characters decided since the last time; `said` is the new text."""
        if self._splitter is None:
            return [(TokenKind.CONTENT, len(said))] if said else []
        return self._splitter.decided()

    def _look_for_loop(self, watch: RepetitionWatch, token: int) -> None:
        """Add a token to the repetition watch, except within a call: rows of numbers there are not a loop."""
        if self._splitter is not None and self._splitter.may_call:
            watch.forget()
        else:
            watch.push(token)

    @staticmethod
    def _is_content(pieces: list[Piece]) -> bool:
        return not isinstance(pieces[-1], ToolCallDelta) and pieces[-1][0] == "text"

    def _split(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._stop_tokens:
            self._recent = (self._recent + text)[-self._reach :]
        return [("text", text)] if self._splitter is None else self._splitter.push(text)

    def _search_control(self, text: str) -> list[Piece]:
        """Look for stop strings that end in the text of a control token within content.

        All text before it takes part, held back or not. If the token completes a stop string, the answer ends here as
        if the model had ended it. If not, text that is held back because it may be a call stays held.
        """
        self._recent += text
        spelt = self._stops is not None and self._stops.spelt_in(self._recent)
        self._recent = self._recent[-self._reach :]
        if self._splitter is not None and self._splitter.may_call and not (spelt and self._splitter.may_stop):
            return []  # no stop string is complete or none applies, so the held text, which may be long, is not copied
        before = self._stops, self._splitter
        self._stops = copy.deepcopy(self._stops)
        split: list[Piece] = []
        if self._splitter is not None:
            self._splitter = self._splitter.copy()
            split = self._splitter.finish(by_model=True)
        pieces = self._visible(split)
        if self._stops is not None and (self._is_content(split) if split else self._in_content):
            pieces += self._hidden(text)
            if self.stopped:
                return pieces
        self._stops, self._splitter = before
        if not self._in_content or (self._splitter is not None and self._splitter.may_call):
            return []
        pieces = [] if self._splitter is None else self._visible(self._splitter.release())
        return pieces + self._hidden(text)

    def _hidden(self, text: str) -> list[Piece]:
        shown = "" if self._stops is None else self._stops.push(text, hidden=True)
        return [("text", shown)] if shown else []

    def _visible(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces after applying stop strings to content; everything after a stop string is dropped."""
        stops = self._stops
        if stops is None:
            return pieces
        seen: list[Piece] = []
        for piece in pieces:
            if stops.hit:
                break
            if isinstance(piece, ToolCallDelta) or piece[0] != "text":
                # A stop string does not span reasoning or calls.
                text, after = stops.release(), [piece]
            elif len(self.tokens) <= self._unstoppable:
                text, after = piece[1], []
            else:
                text, after = stops.push(piece[1]), []
            if text:
                seen.append(("text", text))
            seen += after
        return seen


def _content(pieces: list[Piece]) -> int:
    """Return the number of characters of content."""
    return sum(len(one[1]) for one in pieces if not isinstance(one, ToolCallDelta) and one[0] == "text")


def _deltas(pieces: Sequence[Piece | bytes], tokens: tuple[int, ...]) -> list[Delta]:
    """Group pieces into as few deltas as possible; each holds reasoning, then text, then tool calls.

    Token kinds go with the piece before them.
    """
    deltas: list[Delta] = []
    texts = ["", ""]
    calls: list[ToolCallDelta] = []
    kinds = b""
    highest = 0

    def close() -> None:
        nonlocal texts, calls, kinds, highest, tokens
        if any(texts) or calls or tokens or kinds:
            one = Delta(text=texts[1], reasoning=texts[0], tool_calls=joined_calls(calls), tokens=tokens, kinds=kinds)
            deltas.append(one)
        texts, calls, kinds, highest, tokens = ["", ""], [], b"", 0, ()

    for piece in pieces:
        if isinstance(piece, bytes):
            kinds += piece
            continue
        rank = 2 if isinstance(piece, ToolCallDelta) else _ORDER[piece[0]]
        if rank < highest:
            close()
        highest = rank
        if isinstance(piece, ToolCallDelta):
            calls.append(piece)
        else:
            texts[rank] += piece[1]
    close()
    return deltas
