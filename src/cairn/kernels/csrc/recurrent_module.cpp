#include "recurrent_module.h"

#include <nanobind/stl/optional.h>

#include "arrays.h"
#include "recurrent.h"

namespace nb = nanobind;

namespace cairn {
namespace {

States states_of(const Floats& states, int layer, const Ints& rows, const Ints& tables) {
    check(states.ndim() == 3, "states are [blocks, layers, N]");
    check(layer >= 0 && layer < static_cast<int>(states.shape(1)), "the layer is in the states");
    check(rows.ndim() == 2 && rows.shape(1) == 3 && tables.ndim() == 2, "rows are [B, 3], tables [B, width]");
    return {states.data(), static_cast<Index>(states.shape(1)), layer, static_cast<Index>(states.shape(2)), rows.data(),
            tables.data(), static_cast<Index>(tables.shape(1))};
}

void convolve(Program& program, const ConstFloats& x, int first, const ConstFloats& weight,
              const std::optional<ConstFloats>& bias, bool silu, bool gated, const Floats& states, int layer,
              const Ints& rows, const Ints& tables, const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && out.shape(1) > 0 && weight.size() % out.shape(1) == 0,
          "x is [M, W], a weight [reach C], out [M, C]");
    Convolution job = {};
    job.x = x.data(), job.width = static_cast<Index>(x.shape(1)), job.first = first;
    job.weight = weight.data(), job.bias = bias ? bias->data() : nullptr;
    job.channels = static_cast<Index>(out.shape(1)), job.reach = static_cast<Index>(weight.size()) / job.channels;
    job.silu = silu, job.gated = gated, job.states = states_of(states, layer, rows, tables), job.out = out.data();
    check(job.reach >= 2 && job.reach <= MOST_REACH, "a convolution sees from 2 to 16 tokens");
    check(!bias || static_cast<Index>(bias->size()) == job.channels, "a bias is [C]");
    check(gated ? job.width == 3 * job.channels : first >= 0 && first + job.channels <= job.width, "inputs are in x");
    check((job.reach - 1) * job.channels <= job.states.numbers, "a state has room for the window");
    program.convolve(job, static_cast<Index>(x.shape(0)));
}

// What both scans have; `each`: numbers of gates for a head.
Scan scan_of(const ConstFloats& x, const ConstFloats& gates, int first, const ConstFloats& decay,
             const ConstFloats& time_bias, int key_heads, Index each, const Floats& states, int layer, const Ints& rows,
             const Ints& tables, const Floats& out) {
    check(x.ndim() == 2 && gates.ndim() == 2 && out.ndim() == 2, "x and gates are [M, W], out [M, heads V]");
    check(decay.size() > 0 && out.shape(1) % decay.size() == 0, "heads share the numbers of out");
    Scan job = {};
    job.heads = static_cast<Index>(decay.size()), job.values = static_cast<Index>(out.shape(1)) / job.heads;
    job.key_heads = key_heads;
    check(key_heads > 0 && job.heads % key_heads == 0, "heads are a multiple of those with keys");
    const Index keys = static_cast<Index>(x.shape(1)) - job.heads * job.values;
    check(keys > 0 && keys % (2 * key_heads) == 0, "x has a key and a query of each head with keys, and all values");
    job.keys = keys / 2 / key_heads;
    check(job.keys <= MAX_HEAD, "a key has at most 1024 numbers");
    job.x = x.data(), job.gates = gates.data(), job.width = static_cast<Index>(gates.shape(1)), job.first = first;
    check(first >= 0 && first + each * job.heads <= job.width, "the heads' numbers are in gates");
    check(time_bias.size() == decay.size(), "a decay and a bias of its time for each head");
    job.decay = decay.data(), job.time_bias = time_bias.data();
    job.states = states_of(states, layer, rows, tables), job.out = out.data();
    check(job.heads * job.keys * job.values <= job.states.numbers, "a state has room for the matrices");
    return job;
}

void delta(Program& program, const ConstFloats& x, const ConstFloats& gates, int first, const ConstFloats& decay,
           const ConstFloats& time_bias, int key_heads, bool tiled, const Floats& states, int layer, const Ints& rows,
           const Ints& tables, const Floats& out) {
    Scan job = scan_of(x, gates, first, decay, time_bias, key_heads, 2, states, layer, rows, tables, out);
    job.tiled = tiled;
    program.scan(job);
}

void mamba2(Program& program, const ConstFloats& x, const ConstFloats& gates, int first, const ConstFloats& decay,
            const ConstFloats& time_bias, const ConstFloats& skip, double low, double high, int groups,
            const Floats& states, int layer, const Ints& rows, const Ints& tables, const Floats& out) {
    Scan job = scan_of(x, gates, first, decay, time_bias, groups, 1, states, layer, rows, tables, out);
    check(static_cast<Index>(skip.size()) == job.heads, "a skip for each head");
    job.skip = skip.data(), job.low = static_cast<float>(low), job.high = static_cast<float>(high);
    program.scan(job);
}

void gated_norm(Program& program, const ConstFloats& x, const ConstFloats& gates, int first, const ConstFloats& weight,
                int size, double eps, bool gate_first, const Floats& out) {
    check(x.ndim() == 2 && gates.ndim() == 2 && out.ndim() == 2 && out.shape(1) == x.shape(1),
          "x and out are [M, N], gates [M, W]");
    const Index numbers = static_cast<Index>(x.shape(1)), width = static_cast<Index>(gates.shape(1));
    check(size > 0 && numbers % size == 0, "a size divides the numbers");
    check(first >= 0 && first + numbers <= width, "the gate is in gates");
    const Index weights = static_cast<Index>(weight.size());
    check(weights == size || weights == numbers, "a weight has the size, or all numbers");
    program.gated_norm({x.data(), gates.data(), numbers, width, first, weight.data(), size, weights == numbers,
                        static_cast<float>(eps), gate_first, out.data()});
}

void gate_heads(Program& program, const Floats& x, const ConstFloats& qkv, int size) {
    check(x.ndim() == 2 && qkv.ndim() == 2 && size > 0 && x.shape(1) % static_cast<std::size_t>(size) == 0 &&
              2 * x.shape(1) <= qkv.shape(1),
          "x is [M, Q D], qkv [M, (2Q + 2K) D]");
    program.gate_heads(x.data(), qkv.data(), static_cast<Index>(qkv.shape(1)), static_cast<Index>(x.shape(1)), size);
}

}  // namespace

void bind_recurrent(nb::class_<Program>& program) {
    const auto array = nb::arg().noconvert();
    const auto maybe = nb::arg().noconvert().none();
    const auto plain = nb::arg();
    program.def("gate_heads", &gate_heads, array, array, plain)
        .def("convolve", &convolve, array, plain, array, maybe, plain, plain, array, plain, array, array, array)
        .def("delta", &delta, array, array, plain, array, array, plain, plain, array, plain, array, array, array)
        .def("mamba2", &mamba2, array, array, plain, array, array, array, plain, plain, plain, array, plain, array, array,
             array)
        .def("gated_norm", &gated_norm, array, array, plain, array, plain, plain, plain, array);
}

}  // namespace cairn
