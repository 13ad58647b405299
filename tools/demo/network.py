"""The demo network: the Qwen3 architecture, small, in torch, for training and for the training-side evaluation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Whether to multiply in bfloat16: a CPU without instructions for it is tens of times slower than in float32.
NARROW = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network, under the names that config.json uses."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 608
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def config(self, eos: int, bos: int) -> dict[str, object]:
        """config.json of the Hugging Face layout."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
        }


# The keys and values of one layer for one conversation; empty before the first call.
Cache = list[Tensor]
# What attention mixes over: the positions that each may see (batch, time, time), or a cache and all before.
Past = Tensor | Cache


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position: x is (batch, heads, time, head); cos and sin are (batch or 1, 1, time, head / 2)."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped keys and normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, head = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.head = shape.num_attention_heads, shape.num_key_value_heads, head
        self.q_proj = nn.Linear(size, self.heads * head, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, size, bias=False)
        self.q_norm = Norm(head, shape.rms_norm_eps)
        self.k_norm = Norm(head, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """Mix x (batch, time, size) over the past."""
        batch, time, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, time, self.heads, self.head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, time, self.kv_heads, self.head)).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.kv_heads, self.head).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = attend_cached(q, k, v, past) if isinstance(past, list) else attend(q, k, v, past)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, self.heads * self.head))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention written out: on a CPU, with short rows, faster than the fused kernel and its backward pass.

    q is (batch, heads, time, head), k and v have fewer heads; the queries of a group go through one product. Longer
    rows are cut into four spans of queries, so that most of the future, which is never seen, is not computed.
    """
    batch, heads, time, head = q.shape
    groups = q.view(batch, k.shape[1], -1, time, head)
    span = time // 4 if time >= 384 and time % 4 == 0 else time
    parts = [_attend_span(groups[:, :, :, at : at + span], k, v, seen, at) for at in range(0, time, span)]
    return torch.cat(parts, dim=3).view(batch, heads, time, head)


def _attend_span(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, start: int) -> Tensor:
    batch, kv_heads, group, span, head = q.shape
    end = start + span
    scores = q.reshape(batch, kv_heads, group * span, head) @ k[:, :, :end].mT
    scores = scores.float().view(batch, kv_heads, group, span, end) * head**-0.5
    hidden = ~seen[:, None, None, start:end, :end]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
    mixed = weights.view(batch, kv_heads, group * span, end) @ v[:, :, :end]
    return mixed.view(batch, kv_heads, group, span, head)


def visible(branches: Tensor) -> Tensor:
    """What each position may see (batch, time, time): itself and what came before in branch 0 or its own branch."""
    time = branches.shape[1]
    past = torch.ones(time, time, dtype=torch.bool, device=branches.device).tril()
    own = branches[:, :, None] == branches[:, None, :]
    return past & (own | (branches == 0)[:, None, :])


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
    """Attention of new queries over everything in the cache and themselves; the cache grows by the new keys."""
    if cache:
        k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
    cache[:] = [k, v]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1 and q.shape[2] == k.shape[2])


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """silu(gate) * up, projected back."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past) -> Tensor:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Embedding, layers, norm; the output weights are the embedding. Parameter names follow the HF layout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.run_layer: Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor] = _run_layer
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std * (scale if "o_proj" in name or "down_proj" in name else 1.0))

    def forward(self, ids: Tensor, branches: Tensor, positions: Tensor) -> Tensor:
        """The hidden states (batch, time, size) of token ids in branches, at positions (all (batch, time))."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        seen = visible(branches)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = self.run_layer(layer, x, cos, sin, seen)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary."""
        return F.linear(hidden, self.embed_tokens.weight)


def _run_layer(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
    out: Tensor = layer(x, cos, sin, seen)
    return out


@torch.no_grad()
def generate(network: Network, prompt: list[int], stop: int, limit: int) -> list[int]:
    """The greedy continuation of one prompt, the stop token included when it comes in time."""
    device = network.embed_tokens.weight.device
    caches: list[Cache] = [[] for _ in network.layers]
    ids, start, out = torch.tensor([prompt], device=device), 0, list[int]()
    limit = min(limit, network.shape.max_position_embeddings - len(prompt))
    while len(out) < limit:
        end = start + ids.shape[1]
        x = network.embed_tokens(ids)
        for layer, cache in zip(network.layers, caches, strict=True):
            x = layer(x, network.cos[start:end], network.sin[start:end], cache)
        token = int(network.logits(network.norm(x[:, -1])).argmax())
        out.append(token)
        if token == stop:
            break
        ids, start = torch.tensor([[token]], device=device), end
    return out
