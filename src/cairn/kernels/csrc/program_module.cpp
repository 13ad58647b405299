#include "program_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "adapters_module.h"
#include "arrays.h"
#include "heads_module.h"
#include "latent_module.h"
#include "matrix.h"
#include "program.h"
#include "recurrent_module.h"
#include "streams_module.h"
#include "team.h"

namespace nb = nanobind;

namespace cairn {
namespace {

Norm norm_of(const ConstFloats& x, const ConstFloats& weight, double eps) {
    check(weight.ndim() == 1 && x.ndim() == 2 && x.shape(1) == weight.shape(0), "a norm has its input's width");
    return {weight.data(), static_cast<Index>(weight.shape(0)), static_cast<float>(eps)};
}

void fits(const ConstFloats& x, const Matrix& matrix, const Floats& out) {
    check(x.ndim() == 2 && static_cast<Index>(x.shape(1)) == matrix.view().inner, "an input has the matrix's width");
    check(out.ndim() == 2 && static_cast<Index>(out.shape(1)) == matrix.view().out, "an output has the matrix's width");
}

Pages pages_of(const Pool& kv, int layer) {
    check(kv.ndim() == 6 && kv.shape(2) == 2 && kv.shape(4) == BLOCK_TOKENS, "KV is [blocks, layers, 2, K, 16, D]");
    check(layer >= 0 && layer < static_cast<int>(kv.shape(1)), "the layer is in the KV");
    const Dtype dtype = pool_dtype(kv);
    const Index size = static_cast<Index>(kv.shape(5)) - (dtype == Dtype::q8 ? 4 : 0);
    check(size > 0 && size % 2 == 0 && size <= MAX_HEAD, "a head has an even size of at most 1024");
    check(dtype != Dtype::q8 || size % 4 == 0, "a head of int8 KV has a size that is a multiple of 4");
    return {static_cast<std::byte*>(kv.data()), dtype, static_cast<Index>(kv.shape(1)), layer,
            static_cast<Index>(kv.shape(3)), size};
}

// Of a query [M, Q, D].
template <class Query>
Index heads_of(const Query& query, const Pages& pages) {
    check(query.ndim() == 3 && static_cast<Index>(query.shape(2)) == pages.size, "a query is [M, Q, D]");
    check(pages.heads && static_cast<Index>(query.shape(1)) % pages.heads == 0,
          "query heads are a multiple of key-value heads");
    return static_cast<Index>(query.shape(1));
}

void embed(Program& program, const Weights& table, const std::string& dtype, const Ints& tokens,
           const Floats& hidden) {
    check(table.ndim() == 2 && hidden.ndim() == 2 && table.shape(1) == hidden.shape(1), "a table has hidden's width");
    check(table.itemsize() == (dtype_of(dtype) == Dtype::f32 ? 4u : 2u), "a table has the type it names");
    program.embed(table.data(), dtype_of(dtype), static_cast<Index>(table.shape(1)), tokens.data(), hidden.data());
}

void look_up(Program& program, const Matrix& table, const Ints& tokens, const Floats& hidden) {
    check(hidden.ndim() == 2 && static_cast<Index>(hidden.shape(1)) == table.view().inner, "a table has hidden's width");
    program.look_up(table.view(), tokens.data(), hidden.data());
}

void rope_angles(Program& program, const ConstFloats& frequencies, double factor, const Ints& positions,
                 const Floats& angles) {
    check(angles.ndim() == 3 && angles.shape(2) == frequencies.shape(0), "angles are [M, 2, D / 2]");
    program.rope_angles(frequencies.data(), factor, static_cast<Index>(frequencies.shape(0)), positions.data(),
                        angles.data());
}

void scale(Program& program, const Floats& hidden, double factor) {
    check(hidden.ndim() == 2, "a hidden state is [M, H]");
    program.scale(hidden.data(), static_cast<Index>(hidden.shape(1)), static_cast<float>(factor));
}

void norm(Program& program, const ConstFloats& x, const ConstFloats& weight, double eps, const Floats& out) {
    const Norm found = norm_of(x, weight, eps);
    check(out.ndim() == 2 && out.shape(1) == x.shape(1), "an output has its input's width");
    program.norm(x.data(), found, out.data());
}

void layer_norm(Program& program, const ConstFloats& x, const ConstFloats& weight,
                const std::optional<ConstFloats>& bias, double eps, const Floats& out) {
    const Norm found = norm_of(x, weight, eps);
    check(!bias || bias->size() == weight.size(), "a norm's bias has its weight's size");
    check(out.ndim() == 2 && out.shape(1) == x.shape(1), "an output has its input's width");
    program.layer_norm(x.data(), found, bias ? bias->data() : nullptr, out.data());
}

void project(Program& program, const ConstFloats& x, const Matrix& matrix, const Floats& out) {
    fits(x, matrix, out);
    program.project(x.data(), matrix.view(), out.data(), static_cast<Index>(x.shape(0)));
}

void activate(Program& program, const ConstFloats& x, const std::string& activation, const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && x.shape(1) == out.shape(1), "an output has its input's width");
    check(activation != "clamped_silu", "clamped_silu is a gate's");
    program.activate(x.data(), static_cast<Index>(x.shape(1)), activation_of(activation), out.data());
}

void gate(Program& program, const ConstFloats& gates, const std::string& activation, const Floats& out) {
    check(gates.ndim() == 2 && out.ndim() == 2 && gates.shape(1) == 2 * out.shape(1), "gates are [M, 2F], out [M, F]");
    program.gate(gates.data(), static_cast<Index>(out.shape(1)), activation_of(activation), out.data());
}

void add(Program& program, const ConstFloats& x, const Floats& hidden) {
    check(x.ndim() == 2 && hidden.ndim() == 2 && x.shape(1) == hidden.shape(1), "what is added has hidden's width");
    program.add(x.data(), static_cast<Index>(x.shape(1)), hidden.data());
}

void norm_add(Program& program, const ConstFloats& x, const ConstFloats& weight, double eps, const Floats& hidden) {
    const Norm found = norm_of(x, weight, eps);
    check(hidden.ndim() == 2 && hidden.shape(1) == x.shape(1), "what is added has hidden's width");
    program.norm_add(x.data(), found, hidden.data());
}

void norm_project(Program& program, const ConstFloats& hidden, const ConstFloats& norm, double eps,
                  const Matrix& matrix, const Floats& out) {
    fits(hidden, matrix, out);
    program.norm_project(hidden.data(), norm_of(hidden, norm, eps), matrix.view(), out.data(),
                         static_cast<Index>(hidden.shape(0)));
}

void rope_write(Program& program, const ConstFloats& qkv, const std::optional<ConstFloats>& angles,
                const std::optional<ConstFloats>& q_norm, const std::optional<ConstFloats>& k_norm, double eps,
                const Pool& kv, int layer, const Ints& slots, const Floats& query, bool late) {
    const Pages pages = pages_of(kv, layer);
    const Index heads = heads_of(query, pages);
    const bool gated = qkv.ndim() == 2 && static_cast<Index>(qkv.shape(1)) == 2 * (heads + pages.heads) * pages.size;
    check(gated || (qkv.ndim() == 2 && static_cast<Index>(qkv.shape(1)) == (heads + 2 * pages.heads) * pages.size),
          "qkv is [M, (Q + 2K) D], or [M, (2Q + 2K) D] with gates");
    check(!angles || (angles->ndim() == 3 && static_cast<Index>(angles->shape(2)) * 2 <= pages.size),
          "angles are [M, 2, D / 2] or less");
    const auto whole = [&](const std::optional<ConstFloats>& norm, Index count) {
        const Index size = norm ? static_cast<Index>(norm->size()) : pages.size;
        check(size == pages.size || size == count * pages.size, "a norm has the size of a head or of all heads");
        return size != pages.size;
    };
    check(!gated || !whole(q_norm, heads), "a norm of all heads together has no gates between them");
    program.rope_write({qkv.data(), angles ? angles->data() : nullptr, q_norm ? q_norm->data() : nullptr,
                        k_norm ? k_norm->data() : nullptr, static_cast<float>(eps), pages, slots.data(), query.data(),
                        heads, angles ? static_cast<Index>(angles->shape(2)) * 2 : 0, whole(q_norm, heads),
                        whole(k_norm, pages.heads), late, gated});
}

void attention(Program& program, const ConstFloats& query, const Pool& kv, int layer, const Ints& rows,
               const Ints& tables, int window, double scale, const Floats& out, double softcap, bool both,
               const std::optional<ConstFloats>& sinks) {
    const Pages pages = pages_of(kv, layer);
    const Index heads = heads_of(query, pages);
    check(rows.ndim() == 2 && rows.shape(1) == 3 && tables.ndim() == 2, "rows are [B, 3], tables [B, width]");
    check(out.size() == query.size(), "attention's output is [M, Q D]");
    check(!sinks || static_cast<Index>(sinks->size()) == heads, "there is a sink for each head");
    Attend job = {};
    job.query = query.data(), job.kv = pages, job.window = window, job.heads = heads, job.both = both;
    job.scale = static_cast<float>(scale), job.softcap = static_cast<float>(softcap), job.out = out.data();
    job.sinks = sinks ? sinks->data() : nullptr;
    program.attention(job, rows.data(), tables.data(), static_cast<Index>(tables.shape(1)),
                      static_cast<Index>(query.shape(0)));
}

void project_add(Program& program, const ConstFloats& x, const Matrix& matrix, const Floats& hidden) {
    fits(x, matrix, hidden);
    program.project_add(x.data(), matrix.view(), hidden.data(), static_cast<Index>(x.shape(0)));
}

void gated(Program& program, const ConstFloats& hidden, const ConstFloats& norm, double eps, const Matrix& gate_up,
           const std::string& activation, const Matrix& down, const Floats& out, bool added) {
    const MatrixView wide = gate_up.view(), back = down.view();
    check(hidden.ndim() == 2 && static_cast<Index>(hidden.shape(1)) == wide.inner && back.out == wide.inner &&
              wide.out == 2 * back.inner,
          "gate_up is [2F, H] and down [H, F]");
    check(out.ndim() == 2 && out.shape(1) == hidden.shape(1), "an output has hidden's width");
    program.gated_mlp(hidden.data(), norm_of(hidden, norm, eps), wide, activation_of(activation), back, out.data(),
                      added, static_cast<Index>(hidden.shape(0)));
}

void gated_project(Program& program, const ConstFloats& hidden, const ConstFloats& norm, double eps,
                   const Matrix& gate_up, const std::string& activation, const Matrix& down, const Floats& out) {
    gated(program, hidden, norm, eps, gate_up, activation, down, out, false);
}

void gated_mlp(Program& program, const Floats& hidden, const ConstFloats& norm, double eps, const Matrix& gate_up,
               const std::string& activation, const Matrix& down) {
    gated(program, ConstFloats(hidden), norm, eps, gate_up, activation, down, hidden, true);
}

void softcap(Program& program, const Floats& logits, double cap) {
    check(logits.ndim() == 2 && cap > 0, "logits are [R, V], and their cap is more than 0");
    program.softcap(logits.data(), static_cast<Index>(logits.shape(1)), static_cast<float>(cap));
}

void logits(Program& program, const ConstFloats& hidden, const Ints& wanted, const ConstFloats& norm, double eps,
            const Matrix& head, const Floats& out) {
    fits(hidden, head, out);
    program.logits(hidden.data(), wanted.data(), norm_of(hidden, norm, eps), head.view(), out.data(),
                   static_cast<Index>(out.shape(0)));
}

void layer_logits(Program& program, const ConstFloats& hidden, const Ints& wanted, const ConstFloats& norm,
                  const std::optional<ConstFloats>& bias, double eps, const Matrix& head, const Floats& out) {
    fits(hidden, head, out);
    check(!bias || bias->size() == norm.size(), "a norm's bias has its weight's size");
    program.layer_logits(hidden.data(), wanted.data(), norm_of(hidden, norm, eps), bias ? bias->data() : nullptr,
                         head.view(), out.data(), static_cast<Index>(out.shape(0)));
}

void scale_logits(Program& program, const Floats& logits, double factor) {
    check(logits.ndim() == 2, "logits are [R, V]");
    program.scale_logits(logits.data(), static_cast<Index>(logits.shape(1)), static_cast<float>(factor));
}

void scale_queries(Program& program, const Floats& query, const Ints& positions, double beta, double original,
                   int ahead) {
    check(query.ndim() == 3 && original > 0, "a query is [M, Q, D], and a context more than 0");
    program.scale_queries(query.data(), static_cast<Index>(query.shape(1) * query.shape(2)), positions.data(),
                          static_cast<float>(beta), static_cast<float>(original), ahead);
}

void route(Program& program, const ConstFloats& scores, const std::optional<ConstFloats>& bias, const std::string& kind,
           bool normed, double scale, int groups, int chosen_groups, const Choices& chosen, const Floats& shares) {
    check(scores.ndim() == 2 && chosen.ndim() == 2 && shares.ndim() == 2 && chosen.shape(1) == shares.shape(1),
          "scores are [M, E], what is chosen and its shares [M, T]");
    const auto experts = static_cast<Index>(scores.shape(1)), each = static_cast<Index>(chosen.shape(1));
    check(each > 0 && groups > 0 && experts % groups == 0 && chosen_groups > 0 && chosen_groups <= groups &&
              each <= experts / groups * chosen_groups,
          "as many experts are chosen as the chosen groups have, or fewer");
    check(!bias || static_cast<Index>(bias->size()) == experts, "a router's bias has a number for each expert");
    check(kind == "softmax" || kind == "sigmoid" || kind == "chosen", "scores are softmax, sigmoid or chosen");
    const Scores form = kind == "softmax" ? Scores::softmax : kind == "sigmoid" ? Scores::sigmoid : Scores::chosen;
    program.route(scores.data(), bias ? bias->data() : nullptr,
                  {form, normed, static_cast<float>(scale), experts, each, groups, chosen_groups}, chosen.data(),
                  shares.data());
}

std::vector<MatrixView> views(const std::vector<const Matrix*>& matrices, Index out, Index inner) {
    std::vector<MatrixView> found;
    for (const Matrix* one : matrices) {
        found.push_back(one->view());
        check(found.back().out == out && found.back().inner == inner, "gate_up are [2F, H] or [F, H] and down [H, F], all alike");
    }
    return found;
}

void experts(Program& program, const ConstFloats& x, const Ints& chosen, const ConstFloats& shares,
             const std::vector<const Matrix*>& gate_up, const std::string& activation,
             const std::vector<const Matrix*>& down, const Floats& out) {
    check(!gate_up.empty() && gate_up.size() == down.size(), "every expert has a gate_up and a down");
    check(x.ndim() == 2 && out.ndim() == 2 && x.shape(1) == out.shape(1), "an output has its input's width");
    check(chosen.ndim() == 2 && shares.ndim() == 2 && chosen.shape(1) == shares.shape(1), "a share for each choice");
    const auto size = static_cast<Index>(x.shape(1)), width = down[0]->view().inner;
    program.experts(x.data(), chosen.data(), shares.data(), static_cast<Index>(chosen.shape(1)),
                    views(gate_up, gate_up[0]->view().out == width ? width : 2 * width, size), activation_of(activation), views(down, size, width), out.data(),
                    static_cast<Index>(x.shape(0)));
}

void scale_shares(Program& program, const Floats& shares, const Choices& chosen, const ConstFloats& factors) {
    check(shares.ndim() == 2 && chosen.ndim() == 2 && shares.shape(1) == chosen.shape(1), "there is a share for each choice");
    check(factors.ndim() == 1, "there is a factor for each expert");
    program.scale_shares(shares.data(), chosen.data(), static_cast<Index>(shares.shape(1)), factors.data());
}

void scale_tokens(Program& program, const ConstFloats& x, const Floats& shares, const Floats& out) {
    check(x.ndim() == 2 && out.ndim() == 2 && x.shape(1) == out.shape(1), "an output has its input's width");
    check(shares.ndim() == 2 && shares.shape(1) == 1, "there is one share for each token");
    program.scale_tokens(x.data(), static_cast<Index>(x.shape(1)), shares.data(), out.data());
}

void add_gated(Program& program, const ConstFloats& x, const ConstFloats& gate, const Floats& hidden) {
    check(x.ndim() == 2 && hidden.ndim() == 2 && x.shape(1) == hidden.shape(1), "what is added has hidden's width");
    check(gate.ndim() == 2 && gate.shape(1) == 1, "a gate is [M, 1]");
    program.add_gated(x.data(), gate.data(), static_cast<Index>(x.shape(1)), hidden.data());
}

}  // namespace

void bind_program(nb::module_& module, const Variant& (*find)(const std::string& name)) {
    // A converted array would be a copy that dies while the program still points into it.
    const auto array = nb::arg().noconvert();
    const auto maybe = nb::arg().noconvert().none();
    nb::class_<Program> program(module, "Program");
    bind_adapters(program);
    bind_recurrent(program);
    bind_latent(program);
    bind_heads(program);
    bind_streams(program);
    program
        .def("__init__", [find](Program* self, const std::string& variant,
                            std::shared_ptr<Team> team) { new (self) Program(find(variant), std::move(team)); })
        .def("embed", &embed, array, nb::arg(), array, array)
        .def("embed", &look_up, nb::arg(), array, array)
        .def("rope_angles", &rope_angles, array, nb::arg(), array, array)
        .def("scale", &scale, array, nb::arg())
        .def("norm", &norm, array, array, nb::arg(), array)
        .def("layer_norm", &layer_norm, array, array, maybe, nb::arg(), array)
        .def("project", &project, array, nb::arg(), array)
        .def("activate", &activate, array, nb::arg(), array)
        .def("gate", &gate, array, nb::arg(), array)
        .def("add", &add, array, array)
        .def("norm_project", &norm_project, array, array, nb::arg(), nb::arg(), array)
        .def("rope_write", &rope_write, array, maybe, maybe, maybe, nb::arg(), array, nb::arg(), array, array,
             nb::arg() = false)
        .def("attention", &attention, array, array, nb::arg(), array, array, nb::arg(), nb::arg(), array,
             nb::arg() = 0.0, nb::arg() = false, maybe = nb::none())
        .def("project_add", &project_add, array, nb::arg(), array)
        .def("norm_add", &norm_add, array, array, nb::arg(), array)
        .def("gated_project", &gated_project, array, array, nb::arg(), nb::arg(), nb::arg(), nb::arg(), array)
        .def("gated_mlp", &gated_mlp, array, array, nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("logits", &logits, array, array, array, nb::arg(), nb::arg(), array)
        .def("layer_logits", &layer_logits, array, array, array, maybe, nb::arg(), nb::arg(), array)
        .def("softcap", &softcap, array, nb::arg())
        .def("scale_logits", &scale_logits, array, nb::arg())
        .def("scale_queries", &scale_queries, array, array, nb::arg(), nb::arg(), nb::arg("ahead") = 0)
        .def("route", &route, array, maybe, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), array, array)
        .def("experts", &experts, array, array, array, nb::arg(), nb::arg(), nb::arg(), array)
        .def("scale_shares", &scale_shares, array, array, array)
        .def("scale_tokens", &scale_tokens, array, array, array)
        .def("add_gated", &add_gated, array, array, array)
        .def("run", [](Program& self, Index tokens, Index rows, Index wanted) { self.run({tokens, rows, wanted}); },
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace cairn
