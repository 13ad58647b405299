// One translation unit a variant: the same kernels for the instruction set that the compiler's flags name.
#include "attention.h"
#include "probe.h"
#include "product.h"
#include "rows.h"

#define CAIRN_NAME_OF(x) #x
#define CAIRN_NAME(x) CAIRN_NAME_OF(x)

namespace cairn::CAIRN_VARIANT {
namespace {

void any_product(const Product& job, Index first_panel, Index last_panel) {
    switch (job.matrix.dtype) {
        case Dtype::f32: return product<F32>(job, first_panel, last_panel);
        case Dtype::f16: return product<F16>(job, first_panel, last_panel);
        case Dtype::bf16: return product<Bf16>(job, first_panel, last_panel);
    }
}

}  // namespace

extern const Variant variant;
const Variant variant = {CAIRN_NAME(CAIRN_VARIANT), any_product, norm, gate, embed, rope_write, attend,
                         read_all, multiply_add, CHAINS};

}  // namespace cairn::CAIRN_VARIANT
