// A variant with the tile unit of AMX: products with weights in bfloat16 are its own, all else is avx512vnni's.
#include "amx_variant.h"

#include <csetjmp>
#include <csignal>

#include "amx_check.h"

#define CAIRN_NAME_OF(x) #x
#define CAIRN_NAME(x) CAIRN_NAME_OF(x)

namespace cairn {

namespace avx512vnni {
extern const Variant variant;
}

namespace CAIRN_VARIANT {
namespace {

#if defined(CAIRN_TILE_MODEL)
using Unit = TileModel;
#else
using Unit = TileUnit;
#endif
const Variant& base = avx512vnni::variant;

void all_parts(const Product& job, Index first, Index last) {
    for (Index i = 0; i < job.matrix.count; i++) {
        const Segment& part = job.matrix.parts[i];
        const Index panels = part.panel_count(), low = first > 0 ? first : 0, high = last < panels ? last : panels;
        if (low < high && part.form == Form::bf16) {
            tile_product<Unit>(job, part, low, high);
        } else if (low < high) {
            Product one = job;
            one.matrix.parts = &part, one.matrix.count = 1;
            base.product(one, low, high);
        }
        first -= panels, last -= panels;
    }
}

void prepare(const Activations& in, const Patch& patch) {
    if (in.groups) {
        Activations groups = in;
        groups.pairs = nullptr;
        base.prepare(groups, patch);
    }
    if (in.pairs)
        for (Index row = patch.row; row < patch.row + patch.rows; row++)
            put_tile_rows(in, row, patch.from, patch.to);
}

#if !defined(CAIRN_TILE_MODEL)
// For the roofline: products of four tiles of sums, all in registers.
float multiply_pairs(Index turns, int fill) {
    alignas(64) std::byte data[TILE_BYTES];
    alignas(64) float sums[TILE_ROWS][LANES];
    std::memset(data, fill, sizeof data);
    Unit::configure(block_config(BLOCK_ROWS, TILE_ROWS));
    Unit::load<4>(data, TILE_ROW_BYTES), Unit::load<5>(data, TILE_ROW_BYTES);
    Unit::load<6>(data, TILE_ROW_BYTES), Unit::load<7>(data, TILE_ROW_BYTES);
    Unit::zero<0>(), Unit::zero<1>(), Unit::zero<2>(), Unit::zero<3>();
    for (Index i = 0; i < turns; i++)
        Unit::multiply<0, 4, 6>(), Unit::multiply<1, 4, 7>(), Unit::multiply<2, 5, 6>(), Unit::multiply<3, 5, 7>();
    Unit::store<0>(sums[0], TILE_ROW_BYTES);
    Unit::release();
    return sums[0][0];
}
#endif

}  // namespace

extern const Variant variant;
const Variant variant = [] {
    Variant own = base;
    own.name = CAIRN_NAME(CAIRN_VARIANT);
    own.product = all_parts, own.pair_rows = block_rows, own.prepare = prepare;
#if !defined(CAIRN_TILE_MODEL)
    own.multiply_pairs = multiply_pairs, own.pair_products = 4 * TILE_ROWS * LANES * TILE_INNER;
#endif
    return own;
}();

bool unit_is_exact() { return unit_agrees<Unit>(); }

#if !defined(CAIRN_TILE_MODEL)
namespace {
sigjmp_buf back;
}  // namespace

bool unit_runs() {
    struct sigaction own = {}, before;
    own.sa_handler = [](int) { siglongjmp(back, 1); };
    if (sigaction(SIGILL, &own, &before)) return false;
    const bool legal = sigsetjmp(back, 1) == 0;
    if (legal) static_cast<void>(multiply_pairs(1, 0));  // each kind of instruction, and nothing to destroy
    sigaction(SIGILL, &before, nullptr);
    return legal;
}
#endif

}  // namespace CAIRN_VARIANT
}  // namespace cairn
