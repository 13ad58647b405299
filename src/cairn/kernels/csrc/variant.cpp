// The kernels of a variant, for the instruction set that the compiler's flags name; quantized_products.cpp has the rest.
#include "attention.h"
#include "codebook.h"
#include "latent.h"
#include "logit_passes.h"
#include "prepare.h"
#include "probe.h"
#include "product.h"
#include "quantized_products.h"
#include "rows.h"
#include "states.h"

#define CAIRN_NAME_OF(x) #x
#define CAIRN_NAME(x) CAIRN_NAME_OF(x)

namespace cairn::CAIRN_VARIANT {
namespace {

#if defined(__AVX512BF16__)
using SixteenBits = Pairs;
#else
using SixteenBits = Bf16;
#endif

void one_part(const Product& job, const Segment& part, Index first, Index last) {
    switch (part.form) {
        case Form::f32: return product<F32>(job, part, first, last);
        case Form::f16: return product<F16>(job, part, first, last);
        case Form::bf16: return product<SixteenBits>(job, part, first, last);
        default: return quantised_part(job, part, first, last);
    }
}

void all_parts(const Product& job, Index first, Index last) {
    for (Index i = 0; i < job.matrix.count; i++) {
        const Segment& part = job.matrix.parts[i];
        const Index panels = part.panel_count(), low = first > 0 ? first : 0, high = last < panels ? last : panels;
        if (low < high) one_part(job, part, low, high);
        first -= panels, last -= panels;
    }
}

}  // namespace

extern const Variant variant;
const Variant variant = {CAIRN_NAME(CAIRN_VARIANT), all_parts, SixteenBits::PREPARED ? pair_rows : nullptr, GROUP_ROWS,
                         prepare, norm, layer_norm, activate_row, gate, softcap, embed, decode_block, rope_write, attend, convolve, scan,
                         gated_norm, gate_row, latent_write, turn_pairs, latent_attend, read_all, multiply_add, CHAINS,
                         multiply_bytes, BYTE_PRODUCTS, multiply_pairs, PAIR_PRODUCTS,
                         &PASSES};

}  // namespace cairn::CAIRN_VARIANT
