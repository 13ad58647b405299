"""Train the bundled demo model from nothing: ``python tools/train_demo.py --minutes 80 --out FOLDER``.

Text comes from demo_data.py, so nothing is downloaded. A run writes a checkpoint (safetensors and JSON) every few
minutes beside a usable Hugging Face folder, and goes on from it when started again with the same ``--out``.
"""

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from demo.batches import TEMPLATE, Batch, Batches, Renderer
from demo.grow import grown
from demo.muon import Muon
from demo.network import NARROW, Network, Shape
from demo.tokenizer import END_OF_TEXT, TURN_END, VOCABULARY, train_tokenizer
from demo_data import conversations

MATRIX_RATE, VECTOR_RATE = 0.016, 0.003
WARM_UP, DECAY = 60, 0.3
SAVE_EVERY = 240.0


@dataclass(slots=True)
class State:
    """How far training has come."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    counted: int = 0
    runs: int = 0


class Trainer:
    """The network, its two optimisers and the way to save and load them."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self.network, self.device, self.state = network.to(device), device, State()
        self.origin: dict[str, Tensor] = {}
        self.keep = 0.0
        named = dict(network.named_parameters())
        self.muon = Muon({n: p for n, p in named.items() if p.ndim == 2 and "embed" not in n})
        rest = [p for n, p in named.items() if n not in self.muon.parameters]
        self.adam = torch.optim.AdamW(rest, lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def loss(self, batch: Batch, others: float) -> tuple[Tensor, float]:
        """The losses of what the assistant says, and of what others say times `others`, as one sum; the former's alone.

        Where only the assistant counts, only its logits are computed.
        """
        count = None if others else batch.said
        places, targets = (tensor[:count].to(self.device) for tensor in (batch.places, batch.targets))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=NARROW):
            row = (batch.ids, batch.branches, batch.positions)
            hidden = self.network(*(tensor.to(self.device) for tensor in row)).flatten(0, 1)
            logits = self.network.logits(hidden[places])
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        said = losses[: batch.said].sum()
        return said + others * losses[batch.said :].sum(), float(said.detach())

    def step(self, batches: list[Batch], rate: float, others: float = 0.0) -> float:
        """One update over some micro-batches; returns the mean loss of what the assistant says in them."""
        total = sum(batch.said for batch in batches)
        value = 0.0
        for batch in batches:
            loss, said = self.loss(batch, others)
            (loss / total).backward()  # type: ignore[no-untyped-call]
            value += said / total
            self.state.tokens += batch.ids.numel()
        self.state.counted += total
        self.state.step += 1
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.muon.step(MATRIX_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = VECTOR_RATE * rate
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        return value

    def save(self, folder: Path) -> None:
        """Write the checkpoint; the JSON goes last: a run that is killed between them counts some steps twice."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{n}": p.detach() for n, p in self.network.named_parameters()}
        tensors |= {f"muon.{n}": b for n, b in self.muon.buffers.items()}
        for index, state in self.adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{key}": value for key, value in state.items()}
        partial = folder / "checkpoint.partial"
        save_file({n: t.contiguous() for n, t in tensors.items()}, partial)
        partial.replace(folder / "checkpoint.safetensors")
        progress = {f: getattr(self.state, f) for f in State.__slots__}  # type: ignore[attr-defined]
        (folder / "checkpoint.json").write_text(json.dumps(progress) + "\n")

    def start_from(self, weights: dict[str, Tensor], keep: float) -> None:
        """Remember the weights of an exported model, of this depth or a smaller one; `keep`: see `blended`."""
        named = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
        self.origin, self.keep = grown(named, self.network.shape), keep

    def blended(self) -> dict[str, Tensor]:
        """The weights, moved back by the share `keep` of the way to those that training started from.

        What was trained long ago comes back, and what was learnt since mostly stays (https://arxiv.org/abs/2109.01903).
        """
        named = {name: parameter.detach().cpu() for name, parameter in self.network.named_parameters()}
        return {
            name: tensor.lerp(self.origin[name], self.keep) if self.keep else tensor for name, tensor in named.items()
        }

    def load(self, folder: Path) -> bool:
        """Go on from the checkpoint in the folder, if there is one."""
        if not (folder / "checkpoint.json").exists():
            return False
        tensors = load_file(folder / "checkpoint.safetensors")
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
            for name, buffer in self.muon.buffers.items():
                buffer.copy_(tensors[f"muon.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = tensor
        self.adam.load_state_dict({"state": state, "param_groups": self.adam.state_dict()["param_groups"]})
        self.state = State(**json.loads((folder / "checkpoint.json").read_text()))
        return True


def rate_at(state: State, total_seconds: float, decay_seconds: float) -> float:
    """Share of the full learning rate: up in the first steps, down to nothing over the last part of the time."""
    left = max(0.0, total_seconds - state.seconds)
    return min(1.0, (state.step + 1) / WARM_UP, left / decay_seconds)


def export(trainer: Trainer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder: weights in bfloat16, configuration, tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    network = trainer.network
    weights = {f"model.{n}": p.to("cpu", torch.bfloat16).contiguous() for n, p in trainer.blended().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    end, pad = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    _write(folder / "config.json", network.shape.config(eos=end, bos=pad) | {"pad_token_id": pad})
    generation = {
        "do_sample": False,
        "eos_token_id": [end, pad],
        "pad_token_id": pad,
        "bos_token_id": pad,
    }
    _write(folder / "generation_config.json", generation | {"max_new_tokens": 512})
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": network.shape.max_position_embeddings,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.read_text("utf-8"),
    }
    _write(folder / "tokenizer_config.json", described)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def make_tokenizer(folder: Path, start: Path | None, seed: int) -> Tokenizer:
    """The tokenizer of a run: the saved one, that of its start, or one learnt from the seed's first conversations."""
    path = folder / "tokenizer.json"
    if not path.exists() and start:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(start / "tokenizer.json", path)
    if path.exists():
        return Tokenizer.from_file(str(path))
    render = Renderer()
    talks = itertools.islice(conversations(seed), 12000)
    tokenizer = train_tokenizer(render(talk.messages, talk.tools) for talk in talks)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def train(trainer: Trainer, source: Iterator[Batch], tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
    """Step until the time is used up, saving now and then."""
    state, total, out = trainer.state, arguments.minutes * 60.0, arguments.out
    decay = total * DECAY if arguments.decay is None else arguments.decay * 60.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    smooth, saved, logged = 0.0, state.seconds, state.seconds
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=total, completed=state.seconds)
        while state.seconds < total:
            began = time.perf_counter()
            rate = arguments.rate * rate_at(state, total, decay)
            others = arguments.others if total - state.seconds > decay else 0.0
            value = trainer.step([next(source) for _ in range(arguments.batches)], rate, others)
            state.seconds += time.perf_counter() - began
            smooth = value if not smooth else 0.97 * smooth + 0.03 * value
            speed = state.tokens / max(state.seconds, 1e-9)
            text = f"step {state.step}  loss {smooth:.4f}  {state.tokens / 1e6:.2f} M tokens  {speed:.0f} tokens/s"
            progress.update(bar, completed=state.seconds, description=text)
            if not console.is_terminal and state.seconds - logged > 30:
                logged = state.seconds
                console.print(f"{state.seconds / 60:.1f} min  {text}", soft_wrap=True)
            if state.seconds - saved > SAVE_EVERY:
                saved = state.seconds
                trainer.save(out)
                export(trainer, tokenizer, out)
    trainer.save(out)
    export(trainer, tokenizer, out)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80.0, help="training time in all, over every run (default 80)")
    parser.add_argument(
        "--decay", type=float, help="last minutes, in which the rate falls to nothing (default: 30 %% of all)"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="factor of both learning rates (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of text and weights (default 1)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and of the model")
    parser.add_argument("--start", type=Path, help="folder of a trained model to grow")
    parser.add_argument("--keep", type=float, default=0.0, help="share of its weights in what is exported (default 0)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the network (default 8)")
    parser.add_argument("--ffn", type=int, default=608, help="width of its feed-forward layers (default 608)")
    parser.add_argument("--batches", type=int, default=1, help="batches of some 4,096 tokens an update (default 1)")
    parser.add_argument(
        "--others", type=float, default=0.0, help="weight of a token that the assistant did not write, until the decay"
    )
    parser.add_argument("--copying", type=int, help="short copying texts to read first (default: 6000 from nothing)")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = make_tokenizer(arguments.out, arguments.start, arguments.seed)
    network = Network(Shape(num_hidden_layers=arguments.layers, intermediate_size=arguments.ffn))
    if not arguments.eager:
        network.run_layer = torch.compile(network.run_layer, dynamic=False)
        torch._dynamo.config.cache_size_limit = 64
    trainer = Trainer(network, device)
    resumed = trainer.load(arguments.out)
    if arguments.start:
        trainer.start_from(load_file(arguments.start / "model.safetensors"), arguments.keep)
        if not resumed:
            network.load_state_dict(trainer.origin)
    trainer.state.runs += 1
    copying = arguments.copying if arguments.copying is not None else 0 if resumed or arguments.start else 6000
    # Each run reads fresh conversations; only the tokenizer is learnt from those of the bare seed.
    seed = arguments.seed * 1000 + trainer.state.runs
    train(trainer, iter(Batches(conversations(seed, copying), tokenizer, seed)), tokenizer, arguments)


if __name__ == "__main__":
    main()
