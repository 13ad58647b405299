"""Agents on a machine whose wall clock is set, or was wrong."""

from __future__ import annotations

import pytest

from cairn.agents.listing import list_agents
from cairn.agents.replay_records import KEEP_SECONDS
from cairn.types.errors import NotFound
from tests.agents.bare_agents import BareAgents, bare_agents

DAY = 86_400.0
STEPS = pytest.mark.parametrize("step", [200 * DAY, -200 * DAY])


async def begun(at: BareAgents) -> None:
    """Create an agent with a time to live of a day, an abandoned turn and a logged answer."""
    await at.make("ada", ttl=DAY)
    await at.say("ada")
    await at.say("ada")
    await at.book.move(at.agent("ada"), at.book.turn(at.agent("ada"), 1))
    await at.keep()
    await at.upkeep.tend()


async def weeks(at: BareAgents, until: float) -> None:
    """Let time pass while the agent is in use."""
    while at.clock.passed < until:
        at.clock.passed = min(until, at.clock.passed + DAY / 2)
        at.agent("ada").used = at.book.pending.now()
        await at.upkeep.tend()


@STEPS
async def test_nothing_ages_when_the_wall_clock_is_set(step: float) -> None:
    """This holds after a restart too, since the log then has the right times; what is due still expires."""
    async with bare_agents() as at:
        await begun(at)
        at.clock.step = step
        for restart in (False, True):
            if restart:
                await at.again()
            await at.upkeep.tend()
            assert at.ids == ["ada"] and at.numbers("ada") == [1, 2]
            assert abs(at.agent("ada").info().last_used - at.clock.wall) < 60
            assert restart or at.on_disk(b"because")
        at.clock.passed = DAY - 60
        await at.upkeep.tend()
        assert at.ids == ["ada"]
        at.clock.passed = DAY + 60
        await at.upkeep.tend()
        assert at.ids == []


@STEPS
async def test_records_of_a_week_expire_although_the_wall_clock_was_set(step: float) -> None:
    async with bare_agents() as at:
        await begun(at)
        at.clock.step = step
        await weeks(at, KEEP_SECONDS - 60)
        assert at.numbers("ada") == [1, 2] and at.on_disk(b"because")
        await weeks(at, KEEP_SECONDS + 3700)
        assert at.numbers("ada") == [1] and not at.on_disk(b"because")


@STEPS
async def test_a_turns_end_is_dated_by_the_clock_of_its_agents_age(step: float) -> None:
    """Also if the wall clock was set and nothing has noticed yet."""
    async with bare_agents() as at:
        await at.make("ada", ttl=DAY)
        running = await at.begin("ada")
        at.clock.step = step
        await running.close()
        await at.upkeep.tend()
        assert at.ids == ["ada"]
        assert abs(at.agent("ada").info().last_used - at.clock.wall) < 60
        at.clock.passed = DAY + 60
        await at.upkeep.tend()
        assert at.ids == []


async def test_an_orderly_end_right_after_the_wall_clock_was_set_leaves_the_right_times() -> None:
    async with bare_agents() as at:
        await at.make("ada", ttl=DAY)
        at.clock.step = 200 * DAY
        await at.again(clean=True)
        await at.upkeep.tend()
        assert at.ids == ["ada"]


async def test_records_dated_in_the_future_count_from_the_start() -> None:
    """The clock was ahead when the record was written; it must not be kept until that time comes."""
    async with bare_agents() as at:
        at.clock.step = 200 * DAY
        await at.again()
        await begun(at)
        await at.make("bob", ttl=DAY)
        await at.say("bob")
        at.clock.step = 0.0
        await at.again()
        await at.upkeep.tend()
        assert at.ids == ["ada", "bob"] and at.numbers("ada") == [1, 2] and at.on_disk(b"because")
        assert at.agent("bob").info().last_used <= at.clock.wall
        await weeks(at, KEEP_SECONDS - 60)
        assert at.ids == ["ada"] and at.numbers("ada") == [1, 2] and at.on_disk(b"because")
        await weeks(at, KEEP_SECONDS + 3700)
        assert at.numbers("ada") == [1] and not at.on_disk(b"because")


async def test_an_expired_agent_is_gone_at_once_and_its_id_is_free() -> None:
    """Expiry does not wait for the next upkeep."""
    async with bare_agents() as at:
        await at.make("ada", ttl=1)
        await at.say("ada")
        await at.make("bob")

        def listed() -> list[str]:
            registry = at.book.registry
            page = list_agents(registry.of("me"), registry, "me", 9, "", at.book.pending.now())
            return [agent.id for agent in page.agents]

        at.clock.passed = 1.0
        assert at.agent("ada").id == "ada" and listed() == ["ada", "bob"]
        at.clock.passed = 1.01
        with pytest.raises(NotFound):
            at.agent("ada")
        assert listed() == ["bob"]
        at.book.find("me", "ada", expired=True).open_requests += 1  # a request in its name still runs
        assert at.numbers("ada") == [1]
        at.agent("ada").open_requests -= 1
        await at.make("ada")
        assert at.numbers("ada") == []
