// Elementary functions by the same steps on every machine: numbers that KV and logits depend on come from no C library.
//
// Each step is a sum, a product or a quotient of doubles, which IEEE 754 defines to the last bit: nothing here may be
// fused or reordered, so only files that every variant shares include this. kernels/elementary.py takes the same steps
// and says what the constants are.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace cairn {

namespace elementary {

constexpr double LN2 = 0.6931471805599453, LOG2E = 1.4426950408889634;
constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number, held in the low bits
constexpr std::uint64_t ONE = 0x3ff0000000000000, ROOT_HALF = 0x3fe6a09e667f3bcd;
constexpr double INF = std::numeric_limits<double>::infinity(), NO_NUMBER = std::numeric_limits<double>::quiet_NaN();

constexpr double EXP[] = {0.00019890990824673654, 0.0013933649996309251, 0.0083333109254809,
                          0.041666464925285904,   0.16666666681623232,   0.500000001346581};
constexpr double ATANH[] = {0.11665807235921749, 0.14275389316595982, 0.20000061105905326, 0.33333333277021004};
constexpr double SIN[] = {-2.4805587179980646e-08, 2.7555990399839905e-06, -0.0001984126691523504, 0.008333333331077422,
                          -0.16666666666663882};
constexpr double COS[] = {2.070056539736993e-09, -2.755636931675049e-07, 2.4801585209738397e-05, -0.0013888888887276056,
                          0.04166666666666468};

constexpr double TWO_OVER_PI = 0.6366197723675814;
constexpr double HALF_PI[] = {1.5707963109016418, 1.5893254712295857e-08, 6.123233995736766e-17};
constexpr double FAR = 67108864.0;
constexpr std::uint64_t TWO_OVER_PI_BITS[] = {0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0,
                                              0xdb629599, 0x3c439041, 0xfe5163ab};
constexpr double SIXTY_TWO_BITS = 3.4061215800865545e-19;

template <int N>
inline double polynomial(const double (&terms)[N], double x) {
    double found = terms[0];
    for (int i = 1; i < N; i++) found = found * x + terms[i];
    return found;
}

// e^x = (1 + part) * power, with a power of 2.
struct Power {
    double part, power;
};
inline Power powers(float x) {
    const float raised = x < -104.0f ? -104.0f : x, bounded = raised > 89.0f ? 89.0f : raised;
    const double shifted = bounded * LOG2E + SHIFT, rest = bounded - (shifted - SHIFT) * LN2;
    const std::uint64_t power = (std::bit_cast<std::uint64_t>(shifted) << 52) + ONE;
    return {(polynomial(EXP, rest) * rest + 1.0) * rest, std::bit_cast<double>(power)};
}
inline double minus_one(float x) {
    const Power found = powers(x);
    return found.part * found.power + (found.power - 1.0);
}

// The logarithm of a number above 0, which near 1 is 1 + `near`.
inline double logarithm(double x, double near) {
    const auto bits = std::bit_cast<std::int64_t>(x);
    const std::int64_t turns = (bits - static_cast<std::int64_t>(ROOT_HALF)) >> 52;
    const double rest = turns == 0 ? near : std::bit_cast<double>(bits - turns * (std::int64_t{1} << 52)) - 1.0;
    const double small = rest / (rest + 2.0), square = small * small;
    return static_cast<double>(turns) * LN2 + (polynomial(ATANH, square) * square + 1.0) * (small + small);
}

// An angle as so many quarter turns, modulo 4, and a rest of at most pi / 4.
struct Quarters {
    std::uint64_t count;
    double rest;
};
inline Quarters far_quarters(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint64_t whole = (bits & 0x7fffffu) | 0x800000u, first = (bits >> 23 & 0xffu) - 152u;
    const auto word = [&](std::uint64_t i) {
        const std::uint64_t* at = TWO_OVER_PI_BITS + first / 32 + i;
        return (at[0] << 32 | at[1]) << first % 32 >> 32;
    };
    const std::uint64_t turned = (whole * word(0) << 32) + whole * word(1) + (whole * word(2) >> 32);
    const std::uint64_t quarters = ((turned >> 61) + 1) >> 1;
    const double rest = static_cast<double>(static_cast<std::int64_t>(turned - (quarters << 62))) * SIXTY_TWO_BITS;
    return bits >> 31 ? Quarters{0 - quarters, -rest} : Quarters{quarters, rest};
}
inline Quarters quarters(float x) {
    const double wide = x, size = wide < 0.0 ? -wide : wide;
    if (size >= FAR && size < INF) return far_quarters(x);
    const double shifted = wide * TWO_OVER_PI + SHIFT, whole = shifted - SHIFT;
    return {std::bit_cast<std::uint64_t>(shifted), wide - whole * HALF_PI[0] - whole * HALF_PI[1] - whole * HALF_PI[2]};
}

}  // namespace elementary

// Within 0.51 units in the last place.
inline float exp_of(float x) {
    const elementary::Power found = elementary::powers(x);
    return static_cast<float>((found.part + 1.0) * found.power);
}
inline float expm1_of(float x) { return x == 0.0f ? x : static_cast<float>(elementary::minus_one(x)); }
inline float log_of(float x) {
    using namespace elementary;
    if (x > 0.0f && x < INF) return static_cast<float>(logarithm(x, x - 1.0));
    return static_cast<float>(x == 0.0f ? -INF : x < 0.0f ? NO_NUMBER : x);
}
inline float log1p_of(float x) {
    using namespace elementary;
    if (x == 0.0f) return x;
    if (x > -1.0f && x < INF) return static_cast<float>(logarithm(x + 1.0, x));
    return static_cast<float>(x == -1.0f ? -INF : x < -1.0f ? NO_NUMBER : x);
}

// Of an angle in radians; NaN where it is not finite.
struct CosSin {
    double cos, sin;
};
inline CosSin cos_sin_of(float x) {
    using namespace elementary;
    const Quarters found = quarters(x);
    const double square = found.rest * found.rest;
    const double sine = (polynomial(SIN, square) * square + 1.0) * found.rest;
    const double cosine = (polynomial(COS, square) * square - 0.5) * square + 1.0;
    const bool swapped = found.count & 1, low = found.count & 2;
    const double first = swapped ? sine : cosine, second = swapped ? cosine : sine;
    return {low != swapped ? -first : first, low ? -second : second};
}

// The largest whole number that is not above x.
inline float floor_of(float x) {
    if (!(x > -0x1p23f && x < 0x1p23f)) return x;  // it is whole, or no number
    const auto whole = static_cast<float>(static_cast<std::int32_t>(x));
    return whole > x ? whole - 1.0f : whole;
}

}  // namespace cairn
