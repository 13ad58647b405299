"""A tiny GGUF model that says exactly a given list of token pieces, whatever the prompt, on any real engine.

So text handling (control tokens, reasoning, calls, split characters) is tested end to end, over real arithmetic.

    hidden   [own code + 1 | codes of the HEADS tokens before | code of the next token], WIDTH numbers each
    layer    head j attends to the token j places back and brings its code;
             a neuron for each place of the script fires if the last tokens are those before that place
    head     the token whose code is in the last part; if no neuron fires, the first piece

Of several answers each begins behind a control token of its own, `<|answer_0|>` and so on, which a template writes
where that answer is to come.

A code is the token's id in bits of +1 and -1. Any piece of the script that is not in a prompt is a token of its own, so
a prompt never matches the script by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cairn.text.tokens.detokenizer import _BYTES
from cairn.text.tokens.gguf import CONTROL
from tests.gguf_files import PLAIN, put

HEADS, HEAD_DIM, WIDTH, BITS = 6, 64, 16, 13
HIDDEN = WIDTH * (HEADS + 2)
ONE = WIDTH - 1
"""Index in a token's hidden state that always holds a 1."""
OUT = WIDTH * (HEADS + 1)
BASE = 10000.0
SHARP = 30.0
"""How sharply a neuron fires: silu of it is itself, silu of its negative is nothing."""
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPELT = {byte: char for char, byte in _BYTES.items()}


def write_scripted(
    path: Path,
    pieces: Sequence[str | bytes],
    *,
    end: str | None = "<|im_end|>",
    template: str | None = CHATML,
    kinds: Mapping[str, int] | None = None,
    context: int = 4096,
    extra: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    answers: Sequence[Sequence[str | bytes]] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the model that says `pieces` and then `end`; without `end` it begins again.

    A piece is a control token (a key of `kinds`, or one of CONTROLS) or text, or bytes of it; each is sampled as one
    token. `kinds`: further tokens by their text, with their kind in the file, or CONTROLS with another. `extra` are
    metadata of the file, `without` keys left out. `answers`: what it says behind each `<|answer_N|>`. `merges`: pairs
    that its tokenizer merges, in the spelling of the byte alphabet.
    """
    keys = [f"<|answer_{number}|>" for number in range(len(answers))]
    named = dict.fromkeys((*CONTROLS, *keys), CONTROL) | dict(kinds or {})
    pairs = [*merges, (SPELT[0], SPELT[0])]  # a file has at least one
    said = [[_spelt(piece, named) for piece in one] for one in (pieces, *answers)]
    own = [piece for one in said for piece in one if piece not in named]
    tokens = list(dict.fromkeys([*SPELT.values(), *map("".join, pairs), *own, *named]))
    numbers = {token: number for number, token in enumerate(tokens)}
    last = [] if end is None else [numbers[end]]
    script, *more = [[numbers[piece] for piece in one] + last for one in said]
    scripts = [script, *([numbers[key], *one] for key, one in zip(keys, more, strict=True))]
    fields: dict[str, Any] = {
        "qwen2.block_count": 1,
        "qwen2.context_length": context,
        "qwen2.embedding_length": HIDDEN,
        "qwen2.feed_forward_length": (ffn := -(-max(sum(map(len, scripts)), 1) // 32) * 32),
        "qwen2.attention.head_count": HEADS,
        "qwen2.attention.head_count_kv": HEADS,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.attention.key_length": HEAD_DIM,
        "qwen2.attention.value_length": HEAD_DIM,
        "qwen2.rope.freq_base": BASE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [named.get(token, PLAIN) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.eos_token_id": numbers["<|im_end|>"],
    }
    if template is not None:
        fields["tokenizer.chat_template"] = template
    writer = gguf.GGUFWriter(path, "qwen2")
    put(writer, {key: value for key, value in (fields | dict(extra or {})).items() if key not in without})
    for name, array in _weights(len(tokens), scripts, ffn).items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _spelt(piece: str | bytes, named: Mapping[str, int]) -> str:
    if isinstance(piece, str) and piece in named:
        return piece
    return "".join(SPELT[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))


def _weights(vocab: int, scripts: Sequence[Sequence[int]], ffn: int) -> dict[str, np.ndarray]:
    codes = np.where(np.arange(vocab)[:, None] >> np.arange(BITS) & 1, 1.0, -1.0)
    embedding, head = np.zeros((vocab, HIDDEN)), np.zeros((vocab, HIDDEN))
    embedding[:, :BITS], embedding[:, ONE] = codes, 1
    head[:, OUT : OUT + BITS] = 20 * codes
    gate, up, down = np.zeros((ffn, HIDDEN)), np.zeros((ffn, HIDDEN)), np.zeros((HIDDEN, ffn))
    seen: dict[tuple[int, ...], int] = {}
    windows = [
        (tuple(script[max(0, place - HEADS - 1) : place][::-1]), script[place])
        for script in scripts
        for place in range(1, len(script))
    ]
    for place, (before, token) in enumerate(windows):
        if before in seen and seen[before] == token:
            continue  # the neuron exists
        if seen.setdefault(before, token) != token:
            raise ValueError(
                f"the {len(before)} tokens before place {place + 1} of the script were followed by another one"
            )
        for slot, token_before in enumerate(before):
            gate[place, slot * WIDTH : slot * WIDTH + BITS] = SHARP * codes[token_before]
        gate[place, ONE] = -SHARP * (len(before) * BITS - 1)
        up[place, ONE] = 1
        # A match of more tokens outweighs all matches of fewer.
        down[OUT : OUT + BITS, place] = 4.0 ** len(before) * codes[token]
    default = scripts[0][0] if scripts[0] else 0
    embedding[:, OUT : OUT + BITS] = codes[default]
    size = BITS + 1 + BITS  # squared length of a token's own part and the default
    return {
        "token_embd.weight": embedding,
        "output.weight": head,
        "output_norm.weight": np.ones(HIDDEN),
        "blk.0.attn_norm.weight": np.full(HIDDEN, math.sqrt(size / HIDDEN)),
        "blk.0.ffn_norm.weight": np.full(HIDDEN, math.sqrt((size + BITS * HEADS) / HIDDEN)),
        "blk.0.ffn_gate.weight": gate,
        "blk.0.ffn_up.weight": up,
        "blk.0.ffn_down.weight": down,
        **_attention(),
    }


def _attention() -> dict[str, np.ndarray]:
    """Return an attention layer whose head j looks j + 1 places back.

    Key biases point to angle 0, query biases to that many steps before it.
    """
    angles = BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    strong = math.sqrt(100 * math.sqrt(HEAD_DIM))
    key = np.tile(np.concatenate([np.ones(HEAD_DIM // 2), np.zeros(HEAD_DIM // 2)]), HEADS)
    query = np.concatenate([np.concatenate([np.cos(j * angles), -np.sin(j * angles)]) for j in range(1, HEADS + 1)])
    value, out = np.zeros((HEADS * HEAD_DIM, HIDDEN)), np.zeros((HIDDEN, HEADS * HEAD_DIM))
    for j in range(HEADS):
        for bit in range(BITS):
            value[j * HEAD_DIM + bit, bit] = 1
            out[(j + 1) * WIDTH + bit, j * HEAD_DIM + bit] = 1
    nothing = np.zeros((HEADS * HEAD_DIM, HIDDEN))
    return {
        "blk.0.attn_q.weight": nothing,
        "blk.0.attn_q.bias": strong * query,
        "blk.0.attn_k.weight": nothing,
        "blk.0.attn_k.bias": strong * key,
        "blk.0.attn_v.weight": value,
        "blk.0.attn_v.bias": np.zeros(HEADS * HEAD_DIM),
        "blk.0.attn_output.weight": out,
    }
