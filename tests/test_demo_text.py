"""The text that the demo model is trained on: every tool can be asked for, and a seed gives the same text."""

import random
import re
import sys
from itertools import islice
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from demo import toolbox  # noqa: E402
from demo.values import Values  # noqa: E402
from demo_data import conversations  # noqa: E402

FILES = sorted(toolbox.CATALOGUE.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_tool_of_the_catalogue_can_be_asked_for(path: Path) -> None:
    """Slots and arguments agree, kinds exist, and each request gives every required argument."""
    values = Values(random.Random(1))
    for block in f"\n{path.read_text('utf-8')}".split("\n# ")[1:]:
        tool = toolbox._parse(block)
        assert tool.requests, f"{tool.name} has no requests"
        slots = {param.slot for param in tool.params}
        needed = {param.slot for param in tool.params if param.required}
        for param in tool.params:
            assert param.type in toolbox.TYPES, f"{tool.name}: type {param.type}"
            if param.type != "b":
                drawn = toolbox.drawn(param, values)
                if param.type in "in":
                    assert isinstance(drawn.data, int | float), f"{tool.name}: {param.slot} {drawn}"
        for request in tool.requests:
            template, _, fixed = request.partition(" :: ")
            used = re.findall(r"\{(\w+)\}", template)
            given = set(used) | ({fixed.split("=")[0]} if fixed else set())
            assert set(used) <= slots, f"{tool.name}: {set(used) - slots} in {request!r}"
            assert needed <= given, f"{tool.name}: {needed - given} missing in {request!r}"
            assert len(used) == len(set(used)), f"{tool.name}: twice in {request!r}"
        for _, kind in tool.returns:
            values.draw(kind)
        for _ in range(40):
            text, arguments = tool.request(values)
            assert needed <= {p.slot for p in tool.params if p.name in arguments}, text


def test_a_seed_gives_the_same_conversations() -> None:
    """Training can be repeated."""
    one, two = ([talk.messages for talk in islice(conversations(5), 50)] for _ in range(2))
    assert one == two
