"""A round as it runs: the floor that its topology stands on.

Every step is in the journal, so a round that was cut off is run again from its beginning: what is in the journal is
given back, and told again, without asking anybody; what is not is done, with the same seeds and the same messages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

import msgspec

from cairn.agents.at_once import Runner, in_step
from cairn.agents.journals import Journal, JournalEntry, Journals
from cairn.frontend.requests import SamplingOptions
from cairn.teams import prompts
from cairn.teams.definition import SPEAKS, STATEMENT_TOKENS, Rule, Team
from cairn.teams.entries import (
    Ballot,
    Chose,
    Item,
    Poll,
    RoundBegan,
    RoundDone,
    Stated,
    StepOpened,
    ToolCalled,
    VoteCalled,
    Voted,
)
from cairn.teams.tool_calls import ARGUMENT_TOKENS, CALL, WITH, ToolCalls, ToolsWaitError, whole_json
from cairn.teams.topologies import CHOOSE, TOPOLOGIES
from cairn.teams.voice import Caller, Spoken, Voice
from cairn.text.grammar.grammar import ANYTHING, Structure, Wanted
from cairn.types.errors import GenerationFailed
from cairn.types.outputs import Delta


class Counted(NamedTuple):
    """The result of a vote."""

    decision: str | None
    why: str
    counts: tuple[dict[str, float], ...]


def count(
    rule: Rule, options: Sequence[str], ballots: Mapping[str, Sequence[str]], weights: Mapping[str, float]
) -> Counted:
    """Count ballots, each an option or a ranking, by voter. `weights` by voter, for the rule `weighted` alone."""
    if rule == "ranked":
        return instant_runoff(options, list(ballots.values()))
    weigh = weights if rule == "weighted" else dict.fromkeys(ballots, 1.0)
    tally = dict.fromkeys(options, 0.0)
    for voter, ballot in ballots.items():
        tally[ballot[0]] += weigh[voter]
    total = sum(weigh[voter] for voter in ballots)
    best = max(options, key=lambda option: tally[option])
    if rule == "unanimous":
        agreed = len(ballots) > 0 and tally[best] == total
        return Counted(best if agreed else None, "all agree" if agreed else "not all agree", (tally,))
    if rule == "coordinator":
        return Counted(best if total else None, "the coordinator decides", (tally,))
    if 2 * tally[best] > total:
        return Counted(best, f"{tally[best]:g} of {total:g} votes", (tally,))
    return Counted(None, f"no option has more than half of {total:g} votes", (tally,))


def instant_runoff(options: Sequence[str], rankings: Sequence[Sequence[str]]) -> Counted:
    """Count rankings, which need not name every option."""
    left = list(options)
    counts: list[dict[str, float]] = []
    while True:
        tally = dict.fromkeys(left, 0.0)
        for ranking in rankings:
            first = next((option for option in ranking if option in tally), None)
            if first is not None:
                tally[first] += 1
        counts.append(tally)
        total = sum(tally.values())
        if not total:
            return Counted(None, "no ballot counts", tuple(counts))
        best = max(left, key=lambda option: tally[option])
        if 2 * tally[best] > total:
            return Counted(best, f"{tally[best]:g} of {total:g} ballots in count {len(counts)}", tuple(counts))
        left.remove(_last(left, counts))


def _last(left: Sequence[str], counts: Sequence[Mapping[str, float]]) -> str:
    """The option that is taken off."""
    fewest = list(left)
    for tally in reversed(counts):
        least = min(tally[option] for option in fewest)
        fewest = [option for option in fewest if tally[option] == least]
        if len(fewest) == 1:
            break
    return fewest[-1]


Emit = Callable[[dict[str, Any]], object]
T = TypeVar("T")
I = TypeVar("I", bound=Stated | Chose | Ballot)  # noqa: E741


class TeamRound:
    """One round, or a vote outside of one. `number` is the round's."""

    def __init__(
        self, team: Team, journals: Journals, journal: Journal, voice: Voice, caller: Caller, number: int, emit: Emit
    ) -> None:
        self.team, self.number = team, number
        self._journals, self._journal, self._voice, self._caller, self._emit = journals, journal, voice, caller, emit
        self._steps = itertools.count(1)

    async def run(self, vote: Poll | None = None) -> str | None:
        """The whole round, with a vote at its end; what it decided. One that was cut off has the vote it began with."""
        began = next(iter(self._known(RoundBegan)), None)
        if began is None:
            await self._journals.append(self._journal, RoundBegan(round=self.number, vote=vote))
        else:
            vote = began.vote
        self._tell("round.started", topology=self.team.topology.kind, resumed=began is not None)
        decision = await TOPOLOGIES[self.team.topology.kind](self)
        if vote is not None:
            decision = await self.hold(vote)
        await self._journals.append(self._journal, RoundDone(round=self.number, decision=decision))
        self._tell("round.done", decision=decision)
        return decision

    async def hold_beside(self, ask: Poll) -> Voted:
        """A vote beside the rounds. The same that was cut off goes on."""
        called = [one for one in self._known(VoteCalled) if one.vote == ask]
        counted = {one.step for one in self._known(Voted)}
        step = next((one.step for one in called if one.step not in counted), 0)
        if not step:
            taken = [getattr(entry.value, "step", 0) for entry in self._of_round()]
            step = 1 + max(taken, default=0)
            await self._journals.append(self._journal, VoteCalled(round=self.number, step=step, vote=ask))
        self._steps = itertools.count(step)
        await self.hold(ask)
        return next(one for one in self._known(Voted) if one.step == step)

    async def hold(self, ask: Poll) -> str | None:
        """A vote, as it is asked for."""
        return await self.vote(ask.question, ask.options, rule=ask.rule, coordinator=ask.coordinator, voters=ask.voters)

    # --------------------------------------------------------------------------------------------------- the floor

    async def say(self, member: str, instruction: str, choices: Sequence[str] = ()) -> str:
        """As `Floor.say`."""
        return (await self.say_all([member], instruction, choices))[member]

    async def say_all(self, members: Sequence[str], instruction: str, choices: Sequence[str] = ()) -> Mapping[str, str]:
        """As `Floor.say_all`."""
        step, told = self._open()
        stated = await in_step([partial(self._state, step, told, name, instruction, choices) for name in members])
        said = [one for one in stated if one is not None]
        if len(said) < len(stated):
            raise ToolsWaitError
        return {one.member: one.content for one in said}

    async def choose(self, members: Sequence[str], about: str, question: str, options: Sequence[str]) -> Sequence[str]:
        """As `Floor.choose`."""
        step, told = self._open()

        async def choose(name: str, runner: Runner) -> Chose:
            if (known := self._step(Chose, step, name)) is None:
                texts = {option: option for option in options}
                spoken, choice = await self._ask(step, told, name, question, texts, runner)
                known = Chose(round=self.number, step=step, member=name, about=about, choice=choice, **_tokens(spoken))
                await self._journals.append(self._journal, known)
            self._tell("choice", step=step, member=name, about=about, choice=known.choice)
            return known

        return [one.choice for one in await in_step([partial(choose, name) for name in members])]

    async def vote(
        self,
        question: str,
        options: Sequence[str],
        *,
        rule: Rule = "majority",
        coordinator: str = "",
        voters: Sequence[str] = (),
    ) -> str | None:
        """As `Floor.vote`; `voters`: who votes, all unless some are named."""
        step, told = self._open()
        names = [coordinator] if rule == "coordinator" else list(voters or self.team.names)
        self._tell("vote.started", step=step, question=question, options=list(options), rule=rule, voters=names)
        texts = ballot_papers(options, ranked=rule == "ranked")

        async def cast(name: str, runner: Runner) -> Ballot:
            if (known := self._step(Ballot, step, name)) is None:
                spoken, paper = await self._ask(step, told, name, question, texts, runner)
                ranking = (paper,) if isinstance(paper, str) else tuple(paper)
                known = Ballot(round=self.number, step=step, member=name, ranking=ranking, **_tokens(spoken))
                await self._journals.append(self._journal, known)
            self._tell("vote.ballot", step=step, member=name, ballot=list(known.ranking))
            return known

        ballots = {one.member: one.ranking for one in await in_step([partial(cast, name) for name in names])}
        weights = {member.name: member.weight for member in self.team.members}
        counted = count(rule, options, ballots, weights)
        vote = Voted(
            round=self.number,
            step=step,
            question=question,
            options=tuple(options),
            rule=rule,
            ballots=ballots,
            decision=counted.decision,
            why=counted.why,
            counts=counted.counts,
        )
        if not any(one.step == step for one in self._known(Voted)):
            await self._journals.append(self._journal, vote)
        self._emit({**msgspec.to_builtins(vote), "type": "vote.decided"})
        return counted.decision

    # ------------------------------------------------------------------------------------------------------ a step

    async def _state(
        self, step: int, told: int, name: str, instruction: str, choices: Sequence[str], runner: Runner
    ) -> Stated | None:
        """One member speaks; None where it waits for what a tool of its own returns."""
        known = self._step(Stated, step, name)
        agent = self.team.agent(name)
        self._tell("turn.started", step=step, member=name, agent=agent)
        calls = await self._calls(step, told, name, runner, known is not None)
        if calls is None:
            return None
        if known is None:
            spoken = await self._voice.speak(
                self._caller,
                agent,
                self._before(name, step),
                self._message(name, told, instruction, choices, calls),
                self._options(step, name, held=bool(choices)),
                _wanted(choices),
                runner.ready,
                lambda delta: self._delta(step, name, delta),
            )
            known = Stated(
                round=self.number,
                step=step,
                member=name,
                turn=spoken.turn,
                content=_held_to(spoken.content, choices),
                finish_reason=spoken.finish_reason,
                completion_tokens=spoken.completion_tokens,
                **_tokens(spoken),
            )
            await self._journals.append(self._journal, known)
        else:
            self._delta(step, name, Delta(text=known.content))
        self._emit({**msgspec.to_builtins(known), "type": "turn.done", "agent": agent})
        return known

    async def _calls(self, step: int, told: int, name: str, runner: Runner, over: bool) -> list[str] | None:
        """What a member is told of the tools that it calls before it speaks; None where it waits for one. `over`: it
        has spoken already."""
        tools = ToolCalls(self.team.member(name), self._of_round(), step)
        for call, result in tools.known:
            self._tell_call(call)
            if result is not None:
                self._emit({**msgspec.to_builtins(result), "type": "tool.result", "call_id": call.id})
        while not (over or tools.waits or tools.enough):
            call = await self._call(step, told, name, runner, tools)
            await self._journals.append(self._journal, call)
            tools.add(call)
            self._tell_call(call)
        return None if tools.waits else prompts.called(tools.answered)

    async def _call(self, step: int, told: int, name: str, runner: Runner, tools: ToolCalls) -> ToolCalled:
        """Which tool a member calls, if any, and with what: both are held to by grammar."""
        before = prompts.called(tools.answered)
        texts = {option: option for option in tools.options}
        spoken, tool = await self._ask(step, told, name, CALL, texts, runner, before, f"tool {tools.number}")
        arguments, asked = "", [spoken]
        if tool != SPEAKS:
            spoken = await self._voice.ask(
                self._caller,
                self.team.agent(name),
                self._before(name, step),
                self._message(name, told, WITH.format(tool=tool), (), before),
                self._options(step, name, held=True, more=f"arguments {tools.number}", most=ARGUMENT_TOKENS),
                tools.wanted(tool),
                runner.ready,
            )
            arguments = whole_json(spoken.content)
            asked.append(spoken)
        return ToolCalled(
            round=self.number,
            step=step,
            member=name,
            number=tools.number,
            tool=tool if arguments else "",
            arguments=arguments,
            prompt_tokens=sum(one.prompt_tokens for one in asked),
            cached_tokens=sum(one.cached_tokens for one in asked),
        )

    def _tell_call(self, call: ToolCalled) -> None:
        if call.tool:
            self._emit({**msgspec.to_builtins(call), "type": "tool.call", "call_id": call.id})

    async def _ask(
        self,
        step: int,
        told: int,
        name: str,
        question: str,
        texts: Mapping[str, T],
        runner: Runner,
        calls: Sequence[str] = (),
        more: str = "",
    ) -> tuple[Spoken, T]:
        """One of the answers that `texts` has, by their text; `more` tells questions of one step apart."""
        allowed = list(texts)
        spoken = await self._voice.ask(
            self._caller,
            self.team.agent(name),
            self._before(name, step),
            self._message(name, told, f"{question} {CHOOSE}", allowed, calls),
            self._options(step, name, held=True, more=more),
            _wanted(allowed),
            runner.ready,
        )
        return spoken, texts[_held_to(spoken.content, allowed)]

    def _open(self) -> tuple[int, int]:
        """The next step's number, and the last entry that it takes notice of."""
        step = next(self._steps)
        for one in self._known(StepOpened):
            if one.step == step:
                return step, one.told
        told = self._journal.told
        self._journals.note(self._journal, StepOpened(round=self.number, step=step, told=told))
        return step, told

    def _message(
        self, name: str, told: int, instruction: str, choices: Sequence[str], calls: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        shown = ", ".join(choices) if len(choices) <= _SHOWN else f"the orders of these, as {choices[0]}"
        instruction = instruction.replace("{name}", name).replace("{choices}", shown)
        return prompts.message(self.team, name, self._journal.read(Item), told, instruction, calls)

    def _options(self, step: int, name: str, *, held: bool, more: str = "", most: int | None = None) -> SamplingOptions:
        """What a member's answer is sampled with; one that is `held` to a form ends with that, and not before, or after
        `most` tokens."""
        given = {"max_tokens": STATEMENT_TOKENS, **self.team.member(name).sampling}
        if held:
            given = {"reasoning_budget": 0, **given, "max_tokens": most}
        mixed = f"{self.team.seed} {given.pop('seed', '')} {self.number} {step} {name}{more}"
        seed = int.from_bytes(hashlib.sha256(mixed.encode()).digest()[:7], "big")
        return SamplingOptions(**given, seed=seed)

    def _before(self, name: str, step: int) -> int:
        """The number of the member's last turn before a step of this round."""
        return last_turn(self._journal.read(Item), name, before=(self.number, step))

    def _known(self, kind: type[T]) -> list[T]:
        """What the journal has of this round, of one kind."""
        return [entry.value for entry in self._of_round() if isinstance(entry.value, kind)]

    def _of_round(self) -> list[JournalEntry]:
        """The round's entries: none stands before the end of the round before it."""
        found = []
        for entry in reversed(self._journal.read(Item)):
            if isinstance(entry.value, RoundDone) and entry.value.round < self.number:
                break
            if entry.value.round == self.number:
                found.append(entry)
        return found[::-1]

    def _step(self, kind: type[I], step: int, name: str) -> I | None:
        return next((one for one in self._known(kind) if (one.step, one.member) == (step, name)), None)

    def _delta(self, step: int, name: str, delta: Delta) -> None:
        if delta.reasoning:
            self._tell("turn.delta", step=step, member=name, reasoning=delta.reasoning)
        if delta.text:
            self._tell("turn.delta", step=step, member=name, content=delta.text)

    def _tell(self, type: str, **more: Any) -> None:
        self._emit({"type": type, "round": self.number, **more})


_SHOWN = 32
"""Choices that are all shown; the orders of a ranked vote are more."""


def ballot_papers(options: Sequence[str], *, ranked: bool) -> dict[str, Any]:
    """Every ballot that can be cast, by the text that casts it."""
    if not ranked:
        return {option: option for option in options}
    return {" > ".join(order): order for order in permutations(options)}


def last_turn(entries: Sequence[JournalEntry], name: str, before: tuple[int, int] | None = None) -> int:
    """The number of a member's last turn in the journal, 0 for none; `before` a step of a round, if one is named."""
    for entry in reversed(entries):
        one = entry.value
        if isinstance(one, Stated) and one.member == name and (before is None or (one.round, one.step) < before):
            return one.turn
    return 0


def _wanted(choices: Sequence[str]) -> Wanted:
    """One of these, held to by grammar."""
    if not choices:
        return ANYTHING
    text = json.dumps(list(choices), ensure_ascii=False)
    return Wanted(structure=Structure(kind="choice", text=text, field="options"))


def _held_to(content: str, choices: Sequence[str]) -> str:
    """An answer that is one of `choices`. GenerationFailed where a limit cut it."""
    if choices and content not in choices:
        raise GenerationFailed("a member's answer was cut before it was one of its choices")
    return content


def _tokens(spoken: Spoken) -> dict[str, Any]:
    return {"prompt_tokens": spoken.prompt_tokens, "cached_tokens": spoken.cached_tokens}
