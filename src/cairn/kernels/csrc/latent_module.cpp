#include "latent_module.h"

#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "matrix.h"

namespace nb = nanobind;

namespace cairn {
namespace {

Pages rows_of(const Pool& kv, int layer) {
    check(kv.ndim() == 6 && kv.shape(2) == 1 && kv.shape(3) == 1 && kv.shape(4) == BLOCK_TOKENS,
          "latents are [blocks, layers, 1, 1, 16, L + r]");
    check(layer >= 0 && layer < static_cast<int>(kv.shape(1)), "the layer is in the KV");
    const Dtype dtype = pool_dtype(kv);
    const Index size = static_cast<Index>(kv.shape(5)) - (dtype == Dtype::q8 ? 8 : 0);
    check(size > 0 && size <= MAX_HEAD, "a latent and what is turned have at most 1024 numbers");
    return {static_cast<std::byte*>(kv.data()), dtype, static_cast<Index>(kv.shape(1)), layer, 1, size};
}

Index turned_of(const ConstFloats& angles, Index size) {
    const Index turned = static_cast<Index>(angles.shape(2)) * 2;
    check(angles.ndim() == 3 && turned < size, "angles are [M, 2, r / 2]");
    return turned;
}

std::vector<MatrixView> heads_of(const std::vector<const Matrix*>& matrices, Index inner, Index out) {
    std::vector<MatrixView> found;
    for (const Matrix* one : matrices) {
        found.push_back(one->view());
        check(found.back().inner == inner && found.back().out == out, "heads' matrices fit what goes through them");
    }
    return found;
}

void latent_write(Program& program, const ConstFloats& x, const ConstFloats& angles, bool neighbours,
                  const ConstFloats& norm, double eps, const Pool& kv, int layer, const Ints& slots) {
    const Pages pages = rows_of(kv, layer);
    const Index turned = turned_of(angles, pages.size);
    check(x.ndim() == 2 && static_cast<Index>(x.shape(1)) == pages.size, "a latent is [M, L + r]");
    check(static_cast<Index>(norm.size()) + turned == pages.size, "the norm has the size of what is not turned");
    program.latent_write({x.data(), angles.data(), norm.data(), static_cast<float>(eps), pages, slots.data(), turned,
                          neighbours});
}

void latent_queries(Program& program, const ConstFloats& x, const std::vector<const Matrix*>& keys,
                    const ConstFloats& angles, bool neighbours, const Floats& query) {
    const auto heads = static_cast<Index>(keys.size());
    check(heads > 0 && x.ndim() == 2 && static_cast<Index>(x.shape(1)) % heads == 0, "queries are [M, Q (N + r)]");
    check(query.ndim() == 3 && static_cast<Index>(query.shape(1)) == heads, "a query is [M, Q, L + r]");
    const Index wide = static_cast<Index>(x.shape(1)) / heads, kept = static_cast<Index>(query.shape(2));
    const Index turned = turned_of(angles, std::min(wide, kept));
    program.latent_queries(x.data(), wide, heads_of(keys, wide - turned, kept - turned), angles.data(), turned,
                           neighbours, query.data(), kept, static_cast<Index>(x.shape(0)));
}

void latent_attention(Program& program, const ConstFloats& query, const Pool& kv, int layer, const Ints& rows,
                      const Ints& tables, double scale, const Floats& out) {
    const Pages pages = rows_of(kv, layer);
    check(query.ndim() == 3 && static_cast<Index>(query.shape(2)) == pages.size, "a query is [M, Q, L + r]");
    check(out.ndim() == 3 && out.shape(1) == query.shape(1) && out.shape(2) <= query.shape(2), "out is [M, Q, L]");
    check(rows.ndim() == 2 && rows.shape(1) == 3 && tables.ndim() == 2, "rows are [B, 3], tables [B, width]");
    LatentAttend job = {};
    job.attend.query = query.data(), job.attend.kv = pages, job.attend.heads = static_cast<Index>(query.shape(1));
    job.attend.scale = static_cast<float>(scale), job.attend.out = out.data();
    job.rank = static_cast<Index>(out.shape(2));
    program.latent_attention(job, rows.data(), tables.data(), static_cast<Index>(tables.shape(1)),
                             static_cast<Index>(query.shape(0)));
}

void latent_values(Program& program, const ConstFloats& x, const std::vector<const Matrix*>& values, const Floats& out) {
    const auto heads = static_cast<Index>(values.size());
    check(heads > 0 && x.ndim() == 3 && static_cast<Index>(x.shape(1)) == heads, "what is mixed is [M, Q, L]");
    check(out.ndim() == 2 && static_cast<Index>(out.shape(1)) % heads == 0, "attention's output is [M, Q V]");
    const Index rank = static_cast<Index>(x.shape(2)), wide = static_cast<Index>(out.shape(1)) / heads;
    program.heads_product(x.data(), rank, heads_of(values, rank, wide), out.data(), wide, static_cast<Index>(x.shape(0)));
}

}  // namespace

void bind_latent(nb::class_<Program>& program) {
    const auto array = nb::arg().noconvert();
    program.def("latent_write", &latent_write, array, array, nb::arg(), array, nb::arg(), array, nb::arg(), array)
        .def("latent_queries", &latent_queries, array, nb::arg(), array, nb::arg(), array)
        .def("latent_attention", &latent_attention, array, array, nb::arg(), array, array, nb::arg(), array)
        .def("latent_values", &latent_values, array, nb::arg(), array);
}

}  // namespace cairn
