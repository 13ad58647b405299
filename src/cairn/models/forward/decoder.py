"""The forward pass, written once over kernels with opaque arrays, and recorded once into a program.

    tokens -> embed -> scale -> layers:
        norm -> project to q, k, v -> rope and KV write -> attention -> gate -> project -> norm -> add
        norm -> project to gates -> gate -> project -> norm -> add  (of the hidden state before attention, if parallel)
    hidden[wanted] -> norm and head -> softcap -> logits

Families differ only by data: which weights exist (a norm without a weight is skipped), which cache group a layer
belongs to, the positions of a group, and which layers are recurrent (`forward.recurrent`). Kernels fuse neighbouring
calls when the list is recorded (`kernels.fusion`). `body` and `head` may not branch on values, because every step
replays what was recorded at load. Programs have three symbolic sizes: M tokens, B rows and R logits rows of a step;
every buffer is allocated once at its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cairn.kernels.base import Array, Kernels, LowRank, Matrix, Rope
from cairn.kernels.program import KernelCall, Program
from cairn.models.families.tensor_names import XIELU
from cairn.models.forward.buffers import Buffers, with_slots
from cairn.models.forward.gemma3n import (
    StreamBuffers,
    StreamEnds,
    StreamLayer,
    build_ends,
    build_streams,
    run_correct,
    run_end,
    run_joined,
    run_predict,
    run_start,
)
from cairn.models.forward.gemma3n import run_beside as run_beside_attention
from cairn.models.forward.gemma4 import (
    GroupAttention,
    Inputs,
    LayerInput,
    build_attention,
    build_input,
    build_inputs,
    run_attention,
    run_input,
    run_inputs,
)
from cairn.models.forward.latent import LatentAttention, build_latent, run_latent
from cairn.models.forward.moe import Beside, Mixture, build_beside, build_mixture, is_expert, run_beside, run_mixture
from cairn.models.forward.mtp_head import Join, build_join, run_join
from cairn.models.forward.norms import (
    HeadNorm,
    Norm,
    build_head_norms,
    build_norm,
    run_head_norms,
    run_logits,
    run_norm,
)
from cairn.models.forward.recorder import Recorder
from cairn.models.forward.recurrent import Recurrent, build_recurrent, run_recurrent
from cairn.types.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Mlp:
    """A layer's dense MLP."""

    gate_up: Matrix
    """Only up if the MLP is not gated: its output goes through the activation."""
    down: Matrix
    wide: bool = False
    """Whether it is wider than the others and has separate buffers."""
    xielu: tuple[Array, Array] | None = None
    """The two parameters of xIELU."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's attention."""

    window: int
    turned: bool
    """Whether it has rotary positions."""
    plain_norm: bool
    """Whether queries and keys are normed without a weight."""
    qkv: Matrix
    """With an output gate, each query head is followed by its gate."""
    q_norm: Array | None
    k_norm: Array | None
    """Root-mean-square norms of queries and keys."""
    head_norms: tuple[HeadNorm, ...]
    """Layer norms of them."""
    out: Matrix
    sinks: Array | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's packed weights, and the place of its KV or state."""

    group: int
    index: int
    """Its index among the layers of its group."""
    attention_norm: Norm | None
    attention: Attention | LatentAttention | GroupAttention | Recurrent | None
    """None if the layer is only an MLP."""
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    """None if the MLP reads the input of attention, or a state that is not normed."""
    mlp: Mlp | Mixture | None
    """None if the layer is only a mixer."""
    beside: Beside | None
    """Experts beside the MLP."""
    mlp_post_norm: Norm | None
    input: LayerInput | None
    """Its per-layer input, if the model has them."""
    scalar: Array | None
    """Factor of its output."""
    streams: StreamLayer | None
    """Its stream weights, if the hidden state is kept in several streams."""


@dataclass(frozen=True, slots=True)
class NamedMatrix:
    """A packed matrix of a layer, and the tensors whose outputs it has in that order."""

    matrix: Matrix
    names: tuple[str, ...]
    """Without `.weight`."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and the constants of its forward pass."""

    embedding: Array
    embedding_scale: float
    ropes: tuple[Rope, ...]
    """One for each group; groups with the same positions share one."""
    layers: tuple[Layer, ...]
    parallel: bool
    """Whether attention and MLP read the same hidden state."""
    norm: Norm
    head: Matrix
    eps: float
    scale: float
    softcap: float
    activation: str
    logit_softcap: float
    logit_scale: float
    residual_scale: float
    query_scaling: tuple[float, float] | None
    unturned_scaling: tuple[float, float] | None
    heads: tuple[int, int]
    """Number of query and key heads together, and the head size."""
    late_norms: bool
    inputs: Inputs | None
    streams: StreamEnds | None
    join: Join | None
    """Set for the head that predicts further tokens."""
    both: bool
    """Whether attention is bidirectional."""
    mlp_gated: bool
    gated: int
    """Head size if attention outputs go through a gate; 0 without."""
    matrices: tuple[NamedMatrix, ...]
    """The layers' matrices, for adapters."""


class Ends(NamedTuple):
    """The packed embedding and output of a model."""

    embedding: Array
    head: Matrix


def build(
    kernels: Kernels,
    spec: ModelSpec,
    weights: Mapping[str, Any],
    experts: Callable[[int], Kernels] | None = None,
    ends: Ends | None = None,
) -> Decoder:
    """Pack checked weights (names and shapes of `weights.expected_tensors`) for the kernels.

    `experts`: returns the kernels that a layer's routed experts are packed for; None: the same as all else.

    The head, the largest matrix, is packed first, while the least memory is in use. A tied embedding is the head
    itself. `ends`: those of the model whose head for further tokens this is.
    """
    if ends is None:
        name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
        head = kernels.matrix([weights[name]], [weights["lm_head.bias"] if spec.head_bias else None])
        ends = Ends(head if spec.tied else kernels.table(weights["model.embed_tokens.weight"]), head)
    ropes = [spec.rope(group) for group in range(len(spec.groups))]
    turns = [(rope, spec.turned_in(group)) for group, rope in enumerate(ropes)]
    named: list[NamedMatrix] = []
    made = {(rope, size): kernels.rope(size, rope.theta, rope.scaling) for rope, size in dict.fromkeys(turns)}
    return Decoder(
        embedding=ends.embedding,
        embedding_scale=spec.embedding_scale,
        ropes=tuple(made[turn] for turn in turns),
        layers=tuple(
            _layer(kernels, kernels if experts is None else experts(layer), spec, weights, layer, named)
            for layer in range(spec.layers)
        ),
        parallel=bool(spec.parallel),
        norm=build_norm(kernels, spec, weights, "model.norm"),
        head=ends.head,
        eps=spec.norm_eps,
        scale=1 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale,
        softcap=spec.attention_softcap,
        activation=spec.activation,
        logit_softcap=spec.logit_softcap,
        logit_scale=spec.logit_scale,
        residual_scale=spec.residual_scale,
        query_scaling=spec.query_scaling,
        unturned_scaling=spec.unturned_scaling,
        heads=(spec.heads + spec.kv_heads, spec.head_dim),
        late_norms=spec.late_norms,
        inputs=build_inputs(kernels, spec, weights),
        streams=build_ends(kernels, spec, weights),
        join=build_join(kernels, spec, weights),
        both=spec.both,
        mlp_gated=spec.mlp_gated,
        gated=spec.head_dim if spec.output_gate else 0,
        matrices=tuple(named),
    )


def _layer(
    kernels: Kernels,
    experts: Kernels,
    spec: ModelSpec,
    weights: Mapping[str, Any],
    layer: int,
    named: list[NamedMatrix],
) -> Layer:
    """Pack one layer's weights, its routed experts for the kernels `experts`, and add the matrices to `named`."""
    prefix = f"model.layers.{layer}."
    group = spec.group_of(layer)

    def matrix(*names: str) -> Matrix:
        found = [weights[f"{prefix}{name}.weight"] for name in names]
        own = experts if is_expert(f"{prefix}{names[0]}") else kernels
        made = own.matrix(found, [weights.get(f"{prefix}{name}.bias") for name in names])
        named.append(NamedMatrix(made, tuple(f"{prefix}{name}" for name in names)))
        return made

    def norm(name: str, wanted: bool = True) -> Norm | None:
        there = wanted and f"{prefix}{name}.weight" in weights
        return build_norm(kernels, spec, weights, f"{prefix}{name}") if there else None

    def vector(name: str) -> Array:
        return kernels.vector(weights[f"{prefix}{name}"])

    def mlp() -> Mlp | Mixture | None:
        if not spec.has_mlp(layer):
            return None
        if spec.experts is not None and layer in spec.experts.layers and not spec.experts.beside:
            return build_mixture(matrix, vector, spec.experts)
        gate_up = matrix("mlp.gate_proj", "mlp.up_proj") if spec.mlp_gated else matrix("mlp.up_proj")
        wide = spec.uneven is not None and layer in spec.uneven.wide
        own = spec.activation == "xielu"
        xielu = (vector(f"{XIELU}.alpha_p"), vector(f"{XIELU}.alpha_n")) if own else None
        return Mlp(gate_up=gate_up, down=matrix("mlp.down_proj"), wide=wide, xielu=xielu)

    def attention() -> Attention | LatentAttention | GroupAttention | Recurrent | None:
        if group < 0:
            return None
        if spec.recurrence is not None and spec.keeps_state(layer):
            return build_recurrent(matrix, vector, spec.recurrence)
        if spec.uneven is not None:
            return build_attention(matrix, norm, spec, layer)
        if spec.latent is not None:
            return build_latent(matrix, vector, spec, spec.latent)
        return Attention(
            window=spec.groups[group].sight,
            turned=layer not in spec.unturned,
            plain_norm=spec.plain_norm and layer not in spec.unturned,
            qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=norm("self_attn.q_norm", not spec.layer_norms),
            k_norm=norm("self_attn.k_norm", not spec.layer_norms),
            head_norms=build_head_norms(kernels, spec, weights, prefix),
            out=matrix("self_attn.o_proj"),
            sinks=vector("self_attn.sinks") if spec.sinks else None,
        )

    pre, post = spec.pre_norms, spec.post_norms
    before = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return Layer(
        group=group,
        index=spec.groups[group].layers.index(spec.kv_layer(layer)) if group >= 0 else 0,
        attention_norm=norm("input_layernorm"),
        attention=attention(),
        attention_post_norm=norm("post_attention_layernorm", post),
        mlp_norm=norm("input_layernorm" if spec.mlp_layers is not None else before, pre),
        mlp=mlp(),
        beside=build_beside(matrix, vector, spec.experts, spec.hidden),
        mlp_post_norm=norm("post_feedforward_layernorm", post),
        input=build_input(matrix, vector, spec.uneven, layer),
        scalar=vector("layer_scalar") if spec.uneven is not None and spec.uneven.streams is None else None,
        streams=build_streams(matrix, vector, spec, layer),
    )


def body(k: Kernels, decoder: Decoder, kv: Sequence[Array], b: Buffers) -> None:
    """Run every layer over the step's tokens: write their KV and leave their last hidden state in `b.hidden`."""
    k.embed(decoder.embedding, b.tokens, b.hidden)
    if decoder.embedding_scale != 1:
        k.scale(b.hidden, decoder.embedding_scale)
    for rope, angles in {
        id(angles): (rope, angles) for rope, angles in zip(decoder.ropes, b.angles, strict=True)
    }.values():
        k.rope_angles(rope, b.positions, angles)
    if decoder.join is not None:
        run_join(k, decoder.join, decoder.eps, b.hidden, b.join, b.normed)
    if decoder.inputs is not None:
        run_inputs(k, decoder.inputs, b.hidden, decoder.eps, b.uneven)
    if decoder.streams is not None:
        _body_of_streams(k, decoder, decoder.streams, kv, b)
        return
    for layer in decoder.layers:
        if decoder.parallel:
            _run_parallel(k, decoder, layer, kv, b)
            continue
        if layer.attention is not None:
            _mix(k, decoder, layer, layer.attention, kv, b)
        if layer.mlp is not None:
            _transform(k, decoder, layer, layer.mlp, b)
        if layer.input is not None:
            run_input(k, layer.input, decoder.activation, decoder.eps, b.hidden, b.uneven, b.normed, b.projected)
        if layer.scalar is not None:
            k.scale_by(b.hidden, layer.scalar)


def _run_parallel(k: Kernels, decoder: Decoder, layer: Layer, kv: Sequence[Array], b: Buffers) -> None:
    """Run a layer whose attention and MLP read the same hidden state: attention is added first, then the MLP."""
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp) and layer.attention_norm is not None
    _attend(k, decoder, layer, layer.attention, kv, _normed(k, decoder, layer.attention_norm, b), b)
    if layer.mlp_norm is not None:  # before the hidden state changes
        run_norm(k, layer.mlp_norm, decoder.eps, b.hidden, b.normed)
    k.add(b.projected, b.hidden)
    _run_mlp(k, decoder, layer, layer.mlp, b.normed, b)
    k.add(b.projected, b.hidden)


def _body_of_streams(k: Kernels, decoder: Decoder, own: StreamEnds, kv: Sequence[Array], b: Buffers) -> None:
    """Run every layer of a model that keeps its hidden state in several streams."""
    streams = b.streams
    run_start(k, own, b.hidden, streams, b.projected)
    for layer in decoder.layers:
        assert layer.streams is not None and layer.attention is not None and layer.mlp is not None and layer.input
        run_predict(k, layer.streams, b.hidden, decoder.eps, streams, b.normed)
        _mix(k, decoder, layer, layer.attention, kv, b, streams)
        run_joined(k, b.hidden, streams)
        _transform(k, decoder, layer, layer.mlp, b)
        inputs = (b.uneven.inputs, b.uneven.gate)
        how = (decoder.activation, decoder.eps, b.hidden, inputs, streams, b.normed, b.projected)
        run_correct(k, layer.streams, layer.input, *how)
        streams = replace(streams, here=streams.there, there=streams.here)
    run_end(k, own, b.hidden, streams, b.projected)


def _mix(
    k: Kernels,
    decoder: Decoder,
    layer: Layer,
    own: Attention | LatentAttention | GroupAttention | Recurrent,
    kv: Sequence[Array],
    b: Buffers,
    streams: StreamBuffers | None = None,
) -> None:
    """Run the attention or recurrent half of a layer."""
    g = layer.group
    x = _normed(k, decoder, layer.attention_norm, b)
    if layer.streams is not None and streams is not None:
        run_beside_attention(k, layer.streams, x, decoder.eps, streams)
    if isinstance(own, Recurrent):
        states = (kv[g], layer.index, b.rows, b.tables[g])
        run_recurrent(k, own, x, decoder.eps, states, b.members, b.recurrent, b.projected)
    elif isinstance(own, LatentAttention):
        places = (b.angles[g], kv[g], layer.index, b.slots[g], b.rows, b.tables[g], b.members)
        scaling = None if decoder.query_scaling is None else (b.positions, *decoder.query_scaling)
        run_latent(k, own, x, *places, decoder.scale, scaling, b.latent, b.projected)
    elif isinstance(own, GroupAttention):
        where = (b.angles[g], kv[g], b.slots[g], b.rows, b.tables[g], b.members)
        run_attention(k, own, x, g, layer.index, where, (decoder.eps, decoder.scale), b.uneven, b.projected)
    else:
        _attend(k, decoder, layer, own, kv, x, b)
    _add(k, decoder, layer.attention_post_norm, b)


def _transform(k: Kernels, decoder: Decoder, layer: Layer, own: Mlp | Mixture, b: Buffers) -> None:
    """Run the MLP half of a layer."""
    x = _normed(k, decoder, layer.mlp_norm, b)
    if isinstance(own, Mixture):
        run_mixture(k, own, decoder.activation, x, b.mixture, b.projected)
    else:
        _run_mlp(k, decoder, layer, own, x, b)
    if layer.beside is not None:
        run_beside(k, layer.beside, decoder.activation, decoder.eps, b.hidden, b.mixture, b.normed, b.projected)
    _add(k, decoder, layer.mlp_post_norm, b)


def _run_mlp(k: Kernels, decoder: Decoder, layer: Layer, own: Mlp, x: Any, b: Buffers) -> None:
    """Run a dense MLP over x, into `b.projected`."""
    if decoder.mlp_gated:
        gates, gated = (b.uneven.gates, b.uneven.gated) if own.wide else (b.gates, b.gated)
        k.project(x, own.gate_up, gates)
        if layer.streams is not None and layer.streams.sparsity is not None:
            k.sparsify(gates, layer.streams.sparsity)
        k.gate(gates, decoder.activation, gated)
        k.project(gated, own.down, b.projected)
    else:
        k.project(x, own.gate_up, b.gated)
        if own.xielu is not None:
            k.xielu(b.gated, *own.xielu, b.gated)
        else:
            k.activate(b.gated, decoder.activation, b.gated)
        k.project(b.gated, own.down, b.projected)


def _attend(
    k: Kernels, decoder: Decoder, layer: Layer, own: Attention, kv: Sequence[Array], x: Any, b: Buffers
) -> None:
    """Run a layer's attention over x, into `b.projected`."""
    g = layer.group
    k.project(x, own.qkv, b.qkv)
    if own.plain_norm:  # may precede the rotation, which preserves length
        k.norm_heads(b.qkv, 0, *decoder.heads, None, decoder.eps)
    run_head_norms(k, own.head_norms, decoder.eps, b.qkv)
    angles = b.angles[g] if own.turned else None
    norms = (own.q_norm, own.k_norm, decoder.eps)
    k.rope_write(b.qkv, angles, *norms, kv[g], layer.index, b.slots[g], b.query, decoder.late_norms)
    if decoder.query_scaling is not None:
        k.scale_queries(b.query, b.positions, *decoder.query_scaling)
    if decoder.unturned_scaling is not None and not own.turned:
        k.scale_queries(b.query, b.positions, *decoder.unturned_scaling, 1)
    places = (kv[g], layer.index, b.rows, b.tables[g], own.window)
    how = (decoder.softcap, decoder.both, own.sinks, b.members)
    k.attention(b.query, *places, decoder.scale, b.attended, *how)
    if decoder.gated:
        k.gate_heads(b.attended, b.qkv, decoder.gated)
    k.project(b.attended, own.out, b.projected)


def _normed(k: Kernels, decoder: Decoder, norm: Norm | None, b: Buffers) -> Any:
    """Return the input of a half of a layer: the hidden state, normed if there is a weight."""
    if norm is None:
        return b.hidden
    run_norm(k, norm, decoder.eps, b.hidden, b.normed)
    return b.normed


def _add(k: Kernels, decoder: Decoder, norm: Norm | None, b: Buffers) -> None:
    """Add the output of a half of a layer to the hidden state, normed if there is a weight."""
    if norm is not None:
        run_norm(k, norm, decoder.eps, b.projected, b.normed)
    output = b.projected if norm is None else b.normed
    if decoder.residual_scale != 1:
        k.scale(output, decoder.residual_scale)
    k.add(output, b.hidden)


def head(k: Kernels, decoder: Decoder, b: Buffers) -> None:
    """Compute the logits of the wanted tokens, after `body`."""
    run_logits(k, decoder.norm, decoder.eps, decoder.head, b.hidden, b.wanted, b.logits)
    if decoder.logit_scale != 1:
        k.scale_logits(b.logits, decoder.logit_scale)
    if decoder.logit_softcap:
        k.softcap(b.logits, decoder.logit_softcap)


def states(k: Kernels, decoder: Decoder, kv: Sequence[Array], b: Buffers) -> None:
    """Run `body`, then apply the model's last norm to every token's hidden state."""
    body(k, decoder, kv, b)
    run_norm(k, decoder.norm, decoder.eps, b.hidden, b.hidden)


def record(kernels: Kernels, decoder: Decoder, kv: Sequence[Array], buffers: Buffers) -> tuple[Program, Program]:
    """Return the programs of `body` and `head` over these buffers and this KV pool."""
    symbols = with_slots(buffers)
    layers: Any = Recorder()
    body(layers, decoder, kv, symbols)
    last: Any = Recorder()
    head(last, decoder, symbols)
    return kernels.program(layers.calls), kernels.program(last.calls)


def record_adapted(
    kernels: Kernels,
    decoder: Decoder,
    kv: Sequence[Array],
    buffers: Buffers,
    adapters: Mapping[int, tuple[LowRank, ...]],
) -> Program:
    """Return the program of `body` in which rows go through their adapters, too.

    `adapters`: the side paths of each matrix that has any, by its place in `decoder.matrices`. Calls for rows without
    adapters are those of `record`, only fused less, so their bits are the same.
    """
    symbols = with_slots(buffers)
    layers: Any = Recorder()
    body(layers, decoder, kv, symbols)
    beside = {id(one.matrix): adapters.get(place, ()) for place, one in enumerate(decoder.matrices)}
    calls: list[KernelCall] = []
    for call in layers.calls:
        calls.append(call)
        if call.kernel == "project" and (own := beside.get(id(call.arguments[1]))):
            x, _, out = call.arguments
            rows = (symbols.rows, symbols.adapters, symbols.scales)
            calls.append(KernelCall("adapt", (x, *rows, own, out)))
    return kernels.program(calls)


def projected(kernels: Kernels, decoder: Decoder, kv: Sequence[Array], buffers: Buffers) -> frozenset[int]:
    """Return the places in `decoder.matrices` that `body` multiplies by plain projections: those may be adapted."""
    layers: Any = Recorder()
    body(layers, decoder, kv, with_slots(buffers))
    used = {id(call.arguments[1]) for call in layers.calls if call.kernel == "project"}
    return frozenset(place for place, one in enumerate(decoder.matrices) if id(one.matrix) in used)


def record_states(kernels: Kernels, decoder: Decoder, kv: Sequence[Array], buffers: Buffers) -> Program:
    """Return the program of `states` over these buffers and this KV pool."""
    recorder: Any = Recorder()
    states(recorder, decoder, kv, with_slots(buffers))
    return kernels.program(recorder.calls)
