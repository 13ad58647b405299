// Runs the instructions of the kernels with AMX's tiles, also on a CPU without them: there each is an illegal instruction,
// and a handler of that signal decodes it and does what Intel's manual says. So what is tried is the compiled code itself:
// its registers, addresses, strides and configurations. On a CPU with tiles the program runs unaided.
//
// `tiles` compares the products of the kernels `amx` with those of `amxmodel`, bit by bit. `tiles wrong-order` lets the
// handler add the products of pairs in turns, as an older text of Intel's has it: that must be found.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernel.h"
#include "amx_cpu.h"
#include "amx_variant.h"

namespace cairn {

namespace amx {
extern const Variant variant;
}
namespace amxmodel {
extern const Variant variant;
}

// In place of what the kernels with tiles take from those without: here only products with bfloat16 are tried.
namespace avx512vnni {
extern const Variant variant;
const Variant variant = {};
}  // namespace avx512vnni

namespace {

bool wrong_order = false;
long seen = 0;

[[noreturn]] void refuse(const char* why) {
    std::fprintf(stderr, "the tile unit refuses: %s\n", why);
    std::_Exit(3);
}

// A unit of its own beside that of the kernels' model: scalar, and without the CPU's fused or flushing arithmetic.
struct Unit {
    bool configured = false;
    int rows[8] = {}, bytes[8] = {};
    unsigned char data[8][16][64] = {};

    void configure(const unsigned char* from) {
        if (from[0] != 1 || from[1]) refuse("palette or first row");
        for (int i = 2; i < 16; i++)
            if (from[i]) refuse("reserved bytes");
        for (int i = 0; i < 16; i++) {
            const int wide = from[16 + 2 * i] | from[17 + 2 * i] << 8, high = from[48 + i];
            if (wide > 64 || high > 16 || !wide != !high || (i >= 8 && high)) refuse("size of a tile");
            if (i < 8) rows[i] = high, bytes[i] = wide;
        }
        std::memset(data, 0, sizeof data);
        configured = true;
    }
    void check(int tile) const {
        if (!configured || tile > 7 || !rows[tile] || bytes[tile] % 4) refuse("a tile that is not configured");
    }
    void load(int tile, const unsigned char* from, long stride) {
        check(tile);
        std::memset(data[tile], 0, sizeof data[tile]);
        for (int row = 0; row < rows[tile]; row++) std::memcpy(data[tile][row], from + row * stride, bytes[tile]);
    }
    void store(int tile, unsigned char* to, long stride) const {
        check(tile);
        for (int row = 0; row < rows[tile]; row++) std::memcpy(to + row * stride, data[tile][row], bytes[tile]);
    }
    void multiply(int sums, int x, int weights);
};

thread_local Unit unit;

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// The float nearest to an exact sum, ties to even, of what was rounded to odd; what is too small becomes zero.
float to_float(double sum) {
    if (!std::isfinite(sum) || sum == 0.0) return static_cast<float>(sum);
    if (std::fabs(sum) < 0x1p-120) {
        const float wide = static_cast<float>(sum * 0x1p100);  // as if exponents had no end
        return std::fabs(wide) < 0x1p-26f ? std::copysign(0.0f, wide) : static_cast<float>(wide * 0x1p-100);
    }
    return static_cast<float>(sum);
}

// a + b, both exact: to 53 bits, the last of which says whether anything was left out.
double odd_sum(double a, double b) {
    const double sum = a + b;
    if (!std::isfinite(sum)) return sum;
    const double back = sum - a, error = (a - (sum - back)) + (b - back);
    std::int64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (error == 0.0 || bits & 1) return sum;
    return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

float multiply_add(float a, float b, float c) {
    return to_float(odd_sum(static_cast<double>(flushed(a)) * static_cast<double>(flushed(b)), flushed(c)));
}
float add(float a, float b) { return to_float(odd_sum(flushed(a), flushed(b))); }

float number(const unsigned char* bfloat16) {
    const std::uint32_t bits = static_cast<std::uint32_t>(bfloat16[0] | bfloat16[1] << 8) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

void Unit::multiply(int sums, int x, int weights) {
    for (const int tile : {sums, x, weights}) check(tile);
    if (sums == x || sums == weights || x == weights) refuse("one tile twice");
    if (rows[sums] != rows[x] || bytes[sums] != bytes[weights] || bytes[x] / 4 != rows[weights]) refuse("sizes of tiles");
    for (int m = 0; m < rows[sums]; m++)
        for (int n = 0; n < bytes[sums] / 4; n++) {
            float sum, even = 0, odd = 0;
            std::memcpy(&sum, data[sums][m] + 4 * n, 4);
            for (int k = 0; k < rows[weights]; k++) {
                const unsigned char *left = data[x][m] + 4 * k, *right = data[weights][k] + 4 * n;
                if (wrong_order) {
                    sum = multiply_add(number(left), number(right), sum);
                    sum = multiply_add(number(left + 2), number(right + 2), sum);
                } else {
                    even = multiply_add(number(left), number(right), even);
                    odd = multiply_add(number(left + 2), number(right + 2), odd);
                }
            }
            if (!wrong_order) sum = add(sum, add(even, odd));
            std::memcpy(data[sums][m] + 4 * n, &sum, 4);
        }
}

// One instruction: a prefix of three bytes (VEX), its code, and where its operands are.
class Instruction {
  public:
    Instruction(const unsigned char* at, greg_t* registers) : at_(at), registers_(registers) {}

    // Returns its length; 0 if it is none of the tiles'.
    int run() {
        if (at_[0] != 0xc4 || (at_[1] & 31) != 2 || at_[2] & 0x84) return 0;
        const int code = at_[3], prefix = at_[2] & 3, first = at_[4] >> 3 & 7, last = at_[4] & 7;
        const bool memory = at_[4] < 0xc0;
        if (code == 0x49 && prefix == 0 && !memory && first == 0) return unit = {}, 5;
        if (code == 0x49 && prefix == 0 && memory && first == 0) return unit.configure(address()), length_;
        if (code == 0x49 && prefix == 3 && !memory && last == 0) return zero(first), 5;
        if (code == 0x4b && (prefix == 2 || prefix == 3) && memory) {
            if (last != 4) refuse("no second register");
            unsigned char* rows = address();
            prefix == 3 ? unit.load(first, rows, stride_) : unit.store(first, rows, stride_);
            return length_;
        }
        if (code == 0x5c && prefix == 2 && !memory) return unit.multiply(first, last, ~at_[2] >> 3 & 15), 5;
        return 0;
    }

  private:
    static void zero(int tile) {
        unit.check(tile);
        std::memset(unit.data[tile], 0, sizeof unit.data[tile]);
    }
    std::uint64_t value(int number) const {
        static constexpr int PLACES[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                         REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return static_cast<std::uint64_t>(registers_[PLACES[number]]);
    }
    // Of memory; a second register, which is the stride of tiles, is left out.
    unsigned char* address() {
        const int mode = at_[4] >> 6, low = at_[4] & 7, above = at_[1] & 0x20 ? 0 : 8;
        int at = 5, base = low + above;
        bool from_here = mode == 0 && low == 5, absolute = false;
        if (low == 4) {
            const int both = at_[at++], index = (both >> 3 & 7) + (at_[1] & 0x40 ? 0 : 8);
            base = (both & 7) + above;
            absolute = mode == 0 && (both & 7) == 5;
            stride_ = index == 4 ? 0 : static_cast<long>(value(index)) * (1 << (both >> 6));
        }
        std::int32_t offset = 0;
        if (mode == 1) {
            offset = static_cast<signed char>(at_[at]), at += 1;
        } else if (mode == 2 || from_here || absolute) {
            std::memcpy(&offset, at_ + at, 4), at += 4;
        }
        length_ = at;
        const std::uint64_t from = from_here  ? reinterpret_cast<std::uint64_t>(at_) + static_cast<std::uint64_t>(at)
                                   : absolute ? 0
                                              : value(base);
        return reinterpret_cast<unsigned char*>(from + static_cast<std::uint64_t>(static_cast<std::int64_t>(offset)));
    }

    const unsigned char* at_;
    greg_t* registers_;
    int length_ = 0;
    long stride_ = 0;
};

void on_illegal_instruction(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const auto* at = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
    const int length = Instruction(at, registers).run();
    if (!length) refuse("an instruction that is none of the tiles'");
    registers[REG_RIP] += length;
    __atomic_fetch_add(&seen, 1, __ATOMIC_RELAXED);
}

// The same numbers for every run: normal ones near 1.
class Numbers {
  public:
    std::uint32_t next() { return static_cast<std::uint32_t>((state_ = state_ * 6364136223846793005u + 1) >> 33); }
    float number() { return static_cast<float>(static_cast<int>(next() % 4096) - 2048) * 0x1p-10f; }

  private:
    std::uint64_t state_ = 3;
};

// Memory that ends where nothing can be read.
template <class T>
class Bounded {
  public:
    explicit Bounded(Index count) : size_(static_cast<std::size_t>(count) * sizeof(T)) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), whole = (size_ + page - 1) / page * page;
        mapped_ = whole + page;
        at_ = static_cast<std::byte*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (at_ == MAP_FAILED || mprotect(at_ + whole, page, PROT_NONE)) refuse("no memory");
        first_ = reinterpret_cast<T*>(at_ + whole - size_);
    }
    ~Bounded() { munmap(at_, mapped_); }
    Bounded(const Bounded&) = delete;
    Bounded& operator=(const Bounded&) = delete;

    T* data() { return first_; }
    T* begin() { return first_; }
    T* end() { return first_ + size_ / sizeof(T); }

  private:
    std::size_t size_, mapped_;
    std::byte* at_;
    T* first_;
};

double rounded(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return static_cast<double>(x);
}

// How far a sum is from what it should be, at most, as a share of what roundings can explain.
double farthest(const Segment& part, const float* bias, const float* x, Index rows, const float* before,
                const float* after, Index stride) {
    double most = 0;
    const auto* weights = reinterpret_cast<const unsigned char*>(part.panels);
    for (Index row = 0; row < rows; row++)
        for (Index n = 0; n < part.out; n++) {
            const Index at = row * stride + part.column + n;
            double sum = static_cast<double>(before[at]) + (bias ? static_cast<double>(bias[n]) : 0.0), size = 1.0;
            for (Index k = 0; k < part.inner; k++) {
                const auto* pair = weights + n / LANES * part.panel_bytes() + (k / 2 * LANES + n % LANES) * 4;
                const double term = static_cast<double>(number(pair + k % 2 * 2)) * rounded(x[row * part.inner + k]);
                sum += term, size += std::fabs(term);
            }
            most = std::fmax(most, std::fabs(static_cast<double>(after[at]) - sum) / (size * 0x1p-21));
        }
    return most;
}

double error = 0;

// Two matrices beside each other, with a bias, added to what is there, on two threads.
std::vector<float> product(const Variant& kernels, Index rows, Index inner, Index out) {
    Numbers numbers;
    Segment parts[2] = {{nullptr, nullptr, Form::bf16, false, false, inner, out, 0},
                        {nullptr, nullptr, Form::bf16, false, false, inner, 20, out}};
    Bounded<std::uint16_t> panels[2] = {Bounded<std::uint16_t>(parts[0].panel_count() * parts[0].panel_bytes() / 2),
                                        Bounded<std::uint16_t>(parts[1].panel_count() * parts[1].panel_bytes() / 2)};
    std::vector<float> bias(static_cast<std::size_t>(padded(out)));
    for (float& one : bias) one = numbers.number();
    for (int i = 0; i < 2; i++) {
        for (auto& one : panels[i]) one = static_cast<std::uint16_t>(0x3e80 + numbers.next() % 512 + (numbers.next() % 2 << 15));
        parts[i].panels = reinterpret_cast<const std::byte*>(panels[i].data());
    }
    parts[0].bias = bias.data();
    std::vector<float> x(static_cast<std::size_t>(rows * inner)), found(static_cast<std::size_t>(rows * (out + 20)));
    for (float& one : x) one = numbers.number();
    for (float& one : found) one = numbers.number();
    const std::vector<float> before = found;
    Bounded<std::byte> pairs(rows * Activations::pair_bytes(inner));
    const Activations in = {x.data(), inner, rows, inner, pairs.data(), nullptr};
    for (Index row = 0; row < rows; row++)
        for (Index from = 0; from < inner; from += 4 * GROUP)
            kernels.prepare(in, {row, 1, from, from + 4 * GROUP < inner ? from + 4 * GROUP : inner});
    const Index ends[] = {out, out + 20};
    const Product job = {{parts, 2, inner, out + 20, ends, 2}, in, found.data(), out + 20, true};
    const Index panel_count = job.matrix.panel_count();
    std::thread other([&] { kernels.product(job, panel_count / 2, panel_count); });
    kernels.product(job, 0, panel_count / 2);
    other.join();
    for (const Segment& part : parts)
        error = std::fmax(error, farthest(part, part.bias, x.data(), rows, before.data(), found.data(), out + 20));
    return found;
}

int run() {
    const bool emulated = !cpu_has_tiles();
    if (!emulated && !allow_tiles()) {
        std::printf("the system does not let this process use tiles\n");
        return 77;
    }
    // Before anybody emulates them.
    const bool told = amx::unit_runs() == !emulated;
    if (!told) std::printf("whether the instructions are legal is not told\n");
    if (emulated) {
        struct sigaction action = {};
        action.sa_sigaction = on_illegal_instruction;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGILL, &action, nullptr);
    }
    const bool exact = amx::unit_is_exact();
    // What the roofline measures: here 0x3c3c, about 0.0115, times itself, 32 times in each of 3 turns.
    const float sum = amx::variant.multiply_pairs(3, 0x3c), right = 3 * 32 * 0x1.78p-7f * 0x1.78p-7f;
    const bool probed = std::fabs(sum - right) < 1e-6f && amx::variant.pair_products == 4 * 16 * 16 * 32;
    int cases = 0, other = 0;
    for (const Index rows : {1, 3, 15, 16, 17, 31, 32, 33, 40, 65})
        for (const Index inner : {1, 2, 31, 32, 33, 64, 129, 160})
            for (const Index out : {5, 16, 48}) {
                const auto found = product(amx::variant, rows, inner, out), wanted = product(amxmodel::variant, rows, inner, out);
                cases++;
                other += std::memcmp(found.data(), wanted.data(), 4 * found.size()) != 0;
            }
    if (emulated && unit.configured) std::printf("tiles were left configured\n");
    if (!probed) std::printf("the probe's sum is %g, not %g\n", sum, right);
    if (error > 1) std::printf("a sum is off by %g times what roundings explain\n", error);
    std::printf("%s: the unit is %s; %d cases, %d with other bits; %ld instructions emulated\n",
                emulated ? "emulated" : "on this CPU", exact ? "exact" : "inexact", cases, other, seen);
    return exact && told && probed && error <= 1 && !other && !(emulated && unit.configured) ? 0 : 1;
}

}  // namespace
}  // namespace cairn

int main(int count, char** words) {
    cairn::wrong_order = count > 1 && !std::strcmp(words[1], "wrong-order");
    return cairn::run();
}
