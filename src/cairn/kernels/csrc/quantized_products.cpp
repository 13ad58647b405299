#include "quantized_products.h"

#include "codebook_product.h"
#include "superblock_product.h"

namespace cairn::CAIRN_VARIANT {

void quantised_part(const Product& job, const Segment& part, Index first, Index last) {
    switch (part.form) {
        case Form::int4: return group_product<4>(job, part, first, last);
        case Form::int8: return group_product<8>(job, part, first, last);
        case Form::fp4: return group_product<8, Form::fp4>(job, part, first, last);
        case Form::iq4: return group_product<8, Form::iq4>(job, part, first, last);
        case Form::q4_k: return block_product<4>(job, part, first, last);
        case Form::q5_k: return block_product<5>(job, part, first, last);
        case Form::q6_k: return block_product<6>(job, part, first, last);
        case Form::iq4_xs: return table_block_product(job, part, first, last);
        default: return with_rows(part.form, [&](auto form) { row_product<decltype(form)>(job, part, first, last); });
    }
}

}  // namespace cairn::CAIRN_VARIANT
