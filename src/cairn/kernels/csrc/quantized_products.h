// Products with quantised weights, compiled beside variant.cpp so that two cores share a variant's compile.
#pragma once

#include "kernel.h"

namespace cairn::CAIRN_VARIANT {

// The product of `part`'s panels from `first` to before `last`. `part` is quantised.
void quantised_part(const Product& job, const Segment& part, Index first, Index last);

}  // namespace cairn::CAIRN_VARIANT
