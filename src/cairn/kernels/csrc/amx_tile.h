// The tile unit of AMX: eight registers of 16 rows of 64 bytes, and products of tiles of bfloat16. One source computes with
// the instructions or with a model of them, which is for tests and for the check of the unit before it is used.
//
// Register numbers are template arguments, as instructions name them. Whoever computes with tiles configures them first
// and releases them at the end: the system then has nothing of them to save, and nobody else's configuration is met.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd.h"

namespace cairn::CAIRN_VARIANT {

constexpr Index TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES, TILE_COUNT = 8;
constexpr Index TILE_INNER = TILE_ROW_BYTES / 2;  // inner indices of one product of tiles

// What LDTILECFG reads.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    void set(int tile, Index count) {
        rows[tile] = static_cast<std::uint8_t>(count);
        row_bytes[tile] = count ? TILE_ROW_BYTES : 0;
    }
};
static_assert(sizeof(TileConfig) == 64);

// The instructions. They are written out, not intrinsics: those of GCC 12 say that of a configuration the first eight bytes
// are read, so that it may leave out the rest. Here the operand is the whole of it.
struct TileUnit {
    static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
    static void release() { asm volatile("tilerelease"); }

    template <int TILE>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    // Rows lie `stride` bytes apart.
    template <int TILE>
    static void load(const std::byte* from, Index stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    static void store(float* to, Index stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    // SUMS += X times WEIGHTS.
    template <int SUMS, int X, int WEIGHTS>
    static void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(WEIGHTS));
    }
};

// The model of them, after the operation that Intel's manual gives for TDPBF16PS (Software Developer's Manual, volume 2),
// which Bochs has, too. Each sum of a product of tiles is made of two chains from zero on, one of the even numbers of the
// pairs and one of the odd, each number multiplied and added with one rounding; both are added, and then added to what was
// there. Subnormal numbers count as zero and become zero; roundings are to the nearest, ties to even, whatever MXCSR says.
//
// A step that the unit would refuse with a fault ends the program.
class TileModel {
  public:
    static void configure(const TileConfig& config) {
        State& now = state();
        now = {};
        refuse(config.palette != 1 || config.start);
        for (const auto byte : config.reserved) refuse(byte);
        for (Index i = 0; i < 16; i++) {
            const Index rows = config.rows[i], bytes = config.row_bytes[i];
            refuse(rows > TILE_ROWS || bytes > TILE_ROW_BYTES || !rows != !bytes || (i >= TILE_COUNT && rows));
            if (i < TILE_COUNT) now.tile[i].rows = rows, now.tile[i].bytes = bytes;
        }
        now.configured = true;
    }
    static void release() { state() = {}; }

    template <int TILE>
    static void zero() {
        std::memset(known(TILE).data, 0, sizeof known(TILE).data);
    }
    template <int TILE>
    static void load(const std::byte* from, Index stride) {
        Tile& to = known(TILE);
        std::memset(to.data, 0, sizeof to.data);
        for (Index row = 0; row < to.rows; row++)
            std::memcpy(to.data[row], from + row * stride, static_cast<std::size_t>(to.bytes));
    }
    template <int TILE>
    static void store(float* to, Index stride) {
        const Tile& from = known(TILE);
        for (Index row = 0; row < from.rows; row++)
            std::memcpy(reinterpret_cast<std::byte*>(to) + row * stride, from.data[row], static_cast<std::size_t>(from.bytes));
    }
    template <int SUMS, int X, int WEIGHTS>
    static void multiply() {
        static_assert(SUMS != X && SUMS != WEIGHTS && X != WEIGHTS);
        Tile& to = known(SUMS);
        const Tile &x = known(X), &weights = known(WEIGHTS);
        refuse(to.rows != x.rows || to.bytes != weights.bytes || x.bytes != 4 * weights.rows || to.bytes % 4);
        alignas(64) float sums[TILE_ROWS][LANES];
        std::memcpy(sums, to.data, sizeof sums);
        // To the nearest, no exceptions, and both bits that let subnormal numbers count as zero and become zero.
        const unsigned before = _mm_getcsr();
        _mm_setcsr(0x9fc0);
        add(x.data[0], weights.data[0], to.rows, weights.rows, sums);
        _mm_setcsr(before);
        std::memset(to.data, 0, sizeof to.data);
        for (Index row = 0; row < to.rows; row++)
            std::memcpy(to.data[row], sums[row], static_cast<std::size_t>(to.bytes));
    }

  private:
    struct Tile {
        alignas(64) std::byte data[TILE_ROWS][TILE_ROW_BYTES];
        Index rows, bytes;
    };
    struct State {
        bool configured;
        Tile tile[TILE_COUNT];
    };

    static State& state() {
        static thread_local State now = {};
        return now;
    }
    static Tile& known(int tile) {
        refuse(!state().configured || !state().tile[tile].rows);
        return state().tile[tile];
    }
    static void refuse(bool wrong) {
        if (wrong) std::abort();
    }

    // Compiled by itself: a compiler may move arithmetic across a write of MXCSR, but not out of this function.
    [[gnu::noinline, gnu::noclone]] static void add(const std::byte* x, const std::byte* weights, Index rows, Index pairs,
                                                    float (*sums)[LANES]) {
        asm volatile("" : : : "memory");
        for (Index row = 0; row < rows; row++) {
            Vec even = {}, odd = {};
            for (Index k = 0; k < pairs; k++) {
                std::uint32_t pair;
                std::memcpy(&pair, x + row * TILE_ROW_BYTES + 4 * k, 4);
                const std::uint32_t low = pair << 16, high = pair & 0xffff0000;
                float first, second;
                std::memcpy(&first, &low, 4), std::memcpy(&second, &high, 4);
                const IntVec both = load_int(weights + k * TILE_ROW_BYTES);
                even = fma(set(first), low_bf16(both), even);
                odd = fma(set(second), high_bf16(both), odd);
            }
            const Vec all = even + odd;
            CAIRN_VARIANT::store(sums[row], CAIRN_VARIANT::load(sums[row]) + all);
        }
        asm volatile("" : : : "memory");
    }
};

}  // namespace cairn::CAIRN_VARIANT
