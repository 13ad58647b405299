"""The text that the demo model is trained on: every tool can be asked for, and a seed gives the same text."""

import random
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from demo import toolbox  # noqa: E402
from demo.batches import Batches  # noqa: E402
from demo.grow import grown  # noqa: E402
from demo.network import Network, Shape  # noqa: E402
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


SMALL = Shape(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
              intermediate_size=48)  # fmt: skip


def test_requests_that_share_their_tools_are_trained_as_if_each_were_alone() -> None:
    """A branch sees what all share and itself, at the positions that it would have by itself."""
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(TOOLS.parent / "src" / "cairn" / "demo" / "tokenizer.json"))
    network, batches = Network(SMALL), Batches(iter(()), tokenizer, 1)
    row = next(row for row in map(batches.row, conversations(3)) if max(row.branches) > 2)
    batch = batches._batch([row], len(row.ids) + 7)
    together = network(batch.ids, batch.branches, batch.positions)[0]
    for branch in range(1, max(row.branches) + 1):
        mine = [spot for spot, other in enumerate(row.branches[:-1]) if other in (0, branch)]
        ids = torch.tensor([[row.ids[spot] for spot in mine]])
        alone = network(ids, torch.zeros_like(ids), torch.arange(len(mine))[None])[0]
        torch.testing.assert_close(together[mine], alone, rtol=1e-4, atol=1e-4)


def test_a_network_grows_without_saying_anything_else() -> None:
    """Added layers are silent at first, and the neurons that go were the weakest."""
    torch.manual_seed(1)
    network, deeper = Network(SMALL), Network(replace(SMALL, num_hidden_layers=3, intermediate_size=40))
    for layer in network.layers:
        layer.mlp.down_proj.weight.data[:, 5:13] = 0
    deeper.load_state_dict(grown(network.state_dict(), deeper.shape))
    ids = torch.randint(0, SMALL.vocab_size, (2, 20))
    row = ids, torch.zeros_like(ids), torch.arange(20).repeat(2, 1)
    torch.testing.assert_close(deeper(*row), network(*row))
