"""A Metal kernel for the scan of gated delta nets and Mamba 2. `kernels.mlx.recurrent.scan` is its meaning.

No test runs it on Metal: none has an Apple GPU. Its body is compiled as C++ and compared with the plain operations
(`tests/kernels/mlx/test_mlx_metal.py`). It is off unless `--kernels metal` asks for it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

Array = Any

INPUTS = ("key", "query", "value", "decay", "share", "state")
OUTPUTS = ("made", "after")
SOURCE = """
    // One thread for each column of a head's state [KEYS, values]; it goes through the tokens in order.
    const uint column = thread_position_in_grid.x;
    const uint head = thread_position_in_grid.y;
    const uint row = thread_position_in_grid.z;
    const uint tokens = value_shape[1], heads = value_shape[2], values = value_shape[3];
    const uint place = (row * heads + head) * KEYS * values + column;
    float own[KEYS];
    for (uint k = 0; k < KEYS; ++k) own[k] = state[place + k * values];
    for (uint token = 0; token < tokens; ++token) {
        const uint at = (row * tokens + token) * heads + head;
        float read = 0;
        for (uint k = 0; k < KEYS; ++k) {
            own[k] *= decay[at];
            if (CORRECTED) read += own[k] * key[at * KEYS + k];
        }
        const float change = share[at] * (value[at * values + column] - read);
        float sum = 0;
        for (uint k = 0; k < KEYS; ++k) {
            own[k] += key[at * KEYS + k] * change;
            sum += own[k] * query[at * KEYS + k];
        }
        made[at * values + column] = sum;
    }
    for (uint k = 0; k < KEYS; ++k) after[place + k * values] = own[k];
"""
_GROUP = 32
"""Threads that share an instruction on Apple's GPUs."""


def scan(
    key: Array, query: Array, value: Array, decay: Array, share: Array, state: Array, corrected: bool
) -> tuple[Array, Array]:
    """Return what `kernels.mlx.recurrent.scan` returns."""
    kernel = mx.fast.metal_kernel("cairn_scan", list(INPUTS), list(OUTPUTS), SOURCE)
    rows, heads, keys, values = state.shape
    made, after = kernel(
        inputs=[key, query, value, decay, share, state],
        template=[("KEYS", keys), ("CORRECTED", corrected)],
        grid=(values, heads, rows),
        threadgroup=(min(values, _GROUP), 1, 1),
        output_shapes=[value.shape, state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return made, after
