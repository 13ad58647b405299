"""A running round: the `Floor` of its topology, and the counting of votes.

Every step is written to the journal. After a crash the round runs again from its beginning: completed steps are read
back from the journal, without asking a model; the rest is generated with the same seeds and messages.
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

from cairn.agents.work_journals import Journal, JournalEntry, Journals
from cairn.frontend.request_options import SamplingOptions
from cairn.system.concurrency import Runner, in_step
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
    """A counted vote."""

    decision: str | None
    why: str
    counts: tuple[dict[str, float], ...]


def count(
    rule: Rule, options: Sequence[str], ballots: Mapping[str, Sequence[str]], weights: Mapping[str, float]
) -> Counted:
    """Count ballots (by voter, each one option or a ranking). `weights` by voter matter to the rule `weighted` only."""
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
    """Count rankings by instant-runoff; a ranking need not name every option."""
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
    """Return the option to eliminate: the one with fewest votes, ties broken by earlier counts, then by order."""
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
    """Round `number` of a team, or a vote outside a round."""

    def __init__(
        self, team: Team, journals: Journals, journal: Journal, voice: Voice, caller: Caller, number: int, emit: Emit
    ) -> None:
        self.team, self.number = team, number
        self._journals, self._journal, self._voice, self._caller, self._emit = journals, journal, voice, caller, emit
        self._steps = itertools.count(1)

    async def run(self, vote: Poll | None = None) -> str | None:
        """Run the round and the vote at its end; return the decision. A resumed round keeps the vote it began with."""
        began = next(iter(self._known(RoundBegan)), None)
        if began is None:
            self._journals.check_room(self._journal)
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
        """Hold a vote outside a round, or resume the same vote if it was cut off."""
        called = [one for one in self._known(VoteCalled) if one.vote == ask]
        counted = {one.step for one in self._known(Voted)}
        step = next((one.step for one in called if one.step not in counted), 0)
        if not step:
            taken = [getattr(entry.value, "step", 0) for entry in self._of_round()]
            step = 1 + max(taken, default=0)
            self._journals.check_room(self._journal)
            await self._journals.append(self._journal, VoteCalled(round=self.number, step=step, vote=ask))
        self._steps = itertools.count(step)
        await self.hold(ask)
        return next(one for one in self._known(Voted) if one.step == step)

    async def hold(self, ask: Poll) -> str | None:
        """Hold a vote; return the decision."""
        return await self.vote(ask.question, ask.options, rule=ask.rule, coordinator=ask.coordinator, voters=ask.voters)

    # --------------------------------------------------------------------------------------------------- the floor

    async def say(self, member: str, instruction: str, choices: Sequence[str] = ()) -> str:
        """Implement `Floor.say`."""
        return (await self.say_all([member], instruction, choices))[member]

    async def say_all(self, members: Sequence[str], instruction: str, choices: Sequence[str] = ()) -> Mapping[str, str]:
        """Implement `Floor.say_all`."""
        step, told = self._open()
        stated = await in_step([partial(self._state, step, told, name, instruction, choices) for name in members])
        said = [one for one in stated if one is not None]
        if len(said) < len(stated):
            raise ToolsWaitError
        return {one.member: one.content for one in said}

    async def choose(self, members: Sequence[str], about: str, question: str, options: Sequence[str]) -> Sequence[str]:
        """Implement `Floor.choose`."""
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
        """Implement `Floor.vote`; `voters` restricts who votes."""
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
        """Let one member speak; return None if it waits for the result of one of its tools."""
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
        """Let a member call tools before it speaks; return the lines about their results, None if it waits for one.

        `over`: it has spoken already, so that the calls are only read back.
        """
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
        """Ask a member which tool it calls, if any, and with which arguments; grammars enforce both answers."""
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
        """Ask a member a question; return its answer's value in `texts` (by allowed text).

        `more` seeds questions of the same step differently.
        """
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
        """Begin the next step; return its number and the number of the last entry that its members see."""
        step = next(self._steps)
        for one in self._known(StepOpened):
            if one.step == step:
                return step, one.told
        told = self._journal.complete_to
        self._journals.note(self._journal, StepOpened(round=self.number, step=step, told=told))
        return step, told

    def _message(
        self, name: str, told: int, instruction: str, choices: Sequence[str], calls: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        shown = ", ".join(choices) if len(choices) <= _SHOWN else f"the orders of these, as {choices[0]}"
        instruction = instruction.replace("{name}", name).replace("{choices}", shown)
        return prompts.message(self.team, name, self._journal.read(Item), told, instruction, calls)

    def _options(self, step: int, name: str, *, held: bool, more: str = "", most: int | None = None) -> SamplingOptions:
        """Return the sampling options of a member's answer, seeded by team, round, step and member.

        A `held` answer follows a grammar: it ends with it, or after `most` tokens, and has no reasoning.
        """
        given = {"max_tokens": STATEMENT_TOKENS, **self.team.member(name).sampling}
        if held:
            given = {"reasoning_budget": 0, **given, "max_tokens": most}
        mixed = f"{self.team.seed} {given.pop('seed', '')} {self.number} {step} {name}{more}"
        seed = int.from_bytes(hashlib.sha256(mixed.encode()).digest()[:7], "big")
        return SamplingOptions(**given, seed=seed)

    def _before(self, name: str, step: int) -> int:
        """Return the number of the member's last turn before `step` of this round."""
        return last_turn(self._journal.read(Item), name, before=(self.number, step))

    def _known(self, kind: type[T]) -> list[T]:
        """Return this round's entries of one kind."""
        return [entry.value for entry in self._of_round() if isinstance(entry.value, kind)]

    def _of_round(self) -> list[JournalEntry]:
        """Return this round's entries, in order."""
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
"""Most choices listed in a prompt; a ranked vote has more and shows one as an example."""


def ballot_papers(options: Sequence[str], *, ranked: bool) -> dict[str, Any]:
    """Return every possible ballot by the text that casts it."""
    if not ranked:
        return {option: option for option in options}
    return {" > ".join(order): order for order in permutations(options)}


def last_turn(entries: Sequence[JournalEntry], name: str, before: tuple[int, int] | None = None) -> int:
    """Return the number of a member's last turn, before (round, step) `before` if given; 0 for none."""
    for entry in reversed(entries):
        one = entry.value
        if isinstance(one, Stated) and one.member == name and (before is None or (one.round, one.step) < before):
            return one.turn
    return 0


def _wanted(choices: Sequence[str]) -> Wanted:
    """Return the grammar that allows exactly these texts; anything if there are none."""
    if not choices:
        return ANYTHING
    text = json.dumps(list(choices), ensure_ascii=False)
    return Wanted(structure=Structure(kind="choice", text=text, field="options"))


def _held_to(content: str, choices: Sequence[str]) -> str:
    """Return the content. Raise GenerationFailed if a token limit cut it before it was one of `choices`."""
    if choices and content not in choices:
        raise GenerationFailed("a member's answer was cut before it was one of its choices")
    return content


def _tokens(spoken: Spoken) -> dict[str, Any]:
    return {"prompt_tokens": spoken.prompt_tokens, "cached_tokens": spoken.cached_tokens}
