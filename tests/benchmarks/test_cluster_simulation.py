"""The simulation of a cluster: its parts, and its results at a small size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cluster_simulation import RULES, Fleet, Found, Load, Servers, Simulation, limits, mixed, picture, table

FLEET = replace(Fleet(), replicas=8, regions=2, lifetime=20_000.0, outage=(0.5, 120.0), load_across=4e9)
LOAD = replace(Load(), agents=400, seconds=900.0)


@pytest.fixture(scope="module")
def runs() -> dict[str, Found]:
    return {rule.title: Simulation(FLEET, LOAD, rule, seed=3).run() for rule in RULES}


def test_names_compute_least_and_the_store_moves_what_they_keep(runs: dict[str, Found]) -> None:
    shares = {title: value.computed / value.prompt for title, value in runs.items()}
    cairn = runs["Cairn: names, load and store"]
    assert min(shares, key=shares.__getitem__) == "Cairn: names, load and store"
    assert shares["round robin, no store"] > 3 * shares["Cairn: names, load and store"]
    assert cairn.loaded < 0.2 * runs["round robin, shared store"].loaded
    assert runs["rendezvous alone"].puts == runs["rendezvous alone"].loaded == 0
    assert cairn.across > 0, "while a region is away, its agents' KV comes from there"
    assert 1 - shares["Cairn: names, load and store"] > 0.85
    for run in runs.values():
        assert 0 < run.computed <= run.prompt and run.turns > 1000 and 0 < run.first(0.5) <= run.first(0.99)
        assert run.computed + run.loaded <= run.prompt + 1e6, "nothing is loaded twice except after a death"


def test_the_same_seed_gives_the_same_figures(runs: dict[str, Found]) -> None:
    again = Simulation(FLEET, LOAD, RULES[-1], seed=3).run()
    assert (again.computed, again.turns) == (runs[RULES[-1].title].computed, runs[RULES[-1].title].turns)
    assert Simulation(FLEET, LOAD, RULES[-1], seed=4).run().computed != again.computed


def test_a_name_stays_with_its_server_and_moves_when_it_is_down_or_crowded() -> None:
    servers = Servers(replace(FLEET, regions=1))
    names, zeros = np.arange(4000), np.zeros(4000, np.int64)
    first = servers.choose("names", names, zeros, 0.0)
    assert np.bincount(first, minlength=8).min() > 400
    servers.up_at[2] = 100.0
    moved = servers.choose("names", names, zeros, 0.0)
    assert (moved[first != 2] == first[first != 2]).all() and 2 not in moved
    servers.busy[:] = 10
    servers.busy[5] = 1000
    assert 5 in servers.choose("names", names, zeros, 0.0)
    assert 5 not in servers.choose("cairn", names, zeros, 0.0)
    least = servers.choose("load", names[:70], zeros[:70], 0.0)
    assert set(least) == {0, 1, 3, 4, 6, 7} and np.bincount(least).max() <= 12


def test_overwritten_kv_is_gone() -> None:
    run = Simulation(FLEET, LOAD, RULES[0])
    who, where = np.array([7]), np.array([3])
    run.agents.visit(who, where, np.array([500]), run.servers)
    assert run.agents.had(who, where, run.servers) == 500
    assert run.agents.had(who, np.array([4]), run.servers) == 0
    run.servers.written[3] += FLEET.pool + 1
    assert run.agents.had(who, where, run.servers) == 0


def test_the_output_has_every_rule_and_what_breaks(runs: dict[str, Found]) -> None:
    made = [(rule, runs[rule.title]) for rule in RULES]
    assert len(table(FLEET, made)) == 2 + len(RULES)
    assert picture(made).count("<rect") == 1 + len(RULES)
    assert [line[0].partition(":")[0] for line in limits(2.3, 1000)] == ["leases", "the index", "the router"]
    assert len(set(mixed(np.arange(10_000), 1))) == 10_000
