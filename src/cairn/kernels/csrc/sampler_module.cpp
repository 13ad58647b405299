// Reads what Python asks of lines of logits, with the interpreter's lock; the answers are found without it.
#include "sampler_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "sampler.h"

namespace nb = nanobind;

namespace cairn {
namespace {

using Lines = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// splitmix64's finaliser absorbs each word in turn: `random_bits` in kernels/sampling.py.
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t choice, std::uint64_t position) {
    std::uint64_t state = 0;
    for (const std::uint64_t word : {seed, choice, position}) {
        state += word + 0x9E3779B97F4A7C15u;
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
        state ^= state >> 31;
    }
    return state >> 11;
}

void check(const Sampler& sampler, const Lines& logits, std::size_t lines) {
    if (static_cast<Index>(logits.shape(1)) != sampler.vocab() || logits.shape(0) != lines)
        throw std::invalid_argument("logits are [lines, vocab]");
}

// Appends token ids and returns how many there are then. Ids beyond the vocabulary are a mistake, or passed over.
Index put_ids(Sampler& sampler, nb::handle tokens, Index from, bool strict) {
    const nb::object fast = nb::steal(PySequence_Fast(tokens.ptr(), "token ids are a sequence"));
    if (!fast.is_valid()) nb::raise_python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    for (Py_ssize_t i = from; i < count; i++) {
        const long id = PyLong_AsLong(items[i]);
        if (id == -1 && PyErr_Occurred()) nb::raise_python_error();
        const bool known = id >= 0 && id < sampler.vocab();
        if (!known && strict) throw std::invalid_argument("a token is outside the vocabulary");
        if (known) sampler.ids.push_back(static_cast<std::int32_t>(id));
    }
    return static_cast<Index>(sampler.ids.size());
}

Index put_biases(Sampler& sampler, nb::handle pairs) {
    for (const nb::handle pair : nb::cast<nb::tuple>(pairs)) {
        const auto id = nb::cast<std::int64_t>(pair[0]);
        if (id < 0 || id >= sampler.vocab()) continue;
        sampler.biases.resize(sampler.ids.size());
        sampler.biases.push_back(static_cast<float>(nb::cast<double>(pair[1])));
        sampler.ids.push_back(static_cast<std::int32_t>(id));
    }
    return static_cast<Index>(sampler.ids.size());
}

// (top, None) or (top, (divisor, top_k, top_p, least, repetition, presence, frequency, late), (seed, choice, position),
// biases, banned, tokens or None, the first of them that counts, the first of the output, a mask or None)
Ask read(Sampler& sampler, const nb::tuple& line, const float* logits) {
    Ask ask = {};
    ask.logits = logits;
    ask.top = nb::cast<Index>(line[0]);
    ask.draw = !line[1].is_none();
    if (!ask.draw) return ask;
    const auto numbers = nb::cast<nb::tuple>(line[1]);
    ask.divisor = static_cast<float>(nb::cast<double>(numbers[0]));
    ask.top_k = nb::cast<Index>(numbers[1]);
    ask.top_p = nb::cast<double>(numbers[2]);
    ask.least = static_cast<float>(nb::cast<double>(numbers[3]));
    ask.repetition = static_cast<float>(nb::cast<double>(numbers[4]));
    ask.presence = static_cast<float>(nb::cast<double>(numbers[5]));
    ask.frequency = static_cast<float>(nb::cast<double>(numbers[6]));
    ask.late = nb::cast<bool>(numbers[7]);
    const auto words = nb::cast<nb::tuple>(line[2]);
    ask.bits = random_bits(PyLong_AsUnsignedLongLongMask(nb::object(words[0]).ptr()), nb::cast<std::uint64_t>(words[1]),
                           nb::cast<std::uint64_t>(words[2]));
    if (PyErr_Occurred()) nb::raise_python_error();
    ask.bias = static_cast<Index>(sampler.ids.size());
    ask.bias_end = ask.banned = put_biases(sampler, line[3]);
    ask.banned_end = ask.seen = ask.generated = ask.seen_end = put_ids(sampler, line[4], 0, false);
    if (!line[8].is_none()) {
        // The caller's list holds it until the answers are there.
        const auto mask = nb::cast<nb::bytes>(line[8]);
        if (static_cast<Index>(mask.size()) < (sampler.vocab() + 31) / 32 * 4)
            throw std::invalid_argument("a mask has a bit for each token, in whole words of 32");
        ask.mask = reinterpret_cast<const unsigned char*>(mask.data());
    }
    if (line[5].is_none()) return ask;
    const auto first = nb::cast<Index>(line[6]);
    ask.seen_end = put_ids(sampler, line[5], first, true);
    ask.generated = std::min(ask.seen_end, ask.seen + nb::cast<Index>(line[7]) - first);
    return ask;
}

nb::object told(const Sampler& sampler, Index number) {
    const Told& one = sampler.told[static_cast<std::size_t>(number)];
    const Ask& ask = sampler.asks[static_cast<std::size_t>(number)];
    nb::list top;
    for (Index i = 0; i < std::min(ask.top, sampler.vocab()) && one.token != NOT_FINITE; i++)
        top.append(sampler.tops[static_cast<std::size_t>(number * sampler.top_width + i)]);
    return nb::make_tuple(one.token != NOT_FINITE, one.token < 0 ? nb::none() : nb::object(nb::int_(one.token)),
                          ask.top < 0 ? 0.0 : static_cast<double>(one.peak), one.mass, nb::tuple(top));
}

nb::list choose(Sampler& sampler, const nb::list& lines, const Lines& logits) {
    check(sampler, logits, lines.size());
    sampler.asks.clear(), sampler.ids.clear(), sampler.biases.clear();
    sampler.top_width = 0;
    for (std::size_t i = 0; i < lines.size(); i++) {
        sampler.asks.push_back(
            read(sampler, nb::cast<nb::tuple>(lines[i]), logits.data() + static_cast<Index>(i) * sampler.vocab()));
        sampler.top_width = std::max(sampler.top_width, std::min(sampler.asks.back().top, sampler.vocab()));
    }
    sampler.told.resize(lines.size());
    sampler.tops.resize(lines.size() * static_cast<std::size_t>(sampler.top_width));
    {
        const nb::gil_scoped_release unlocked;
        sampler.run();
    }
    nb::list answers;
    for (std::size_t i = 0; i < lines.size(); i++) answers.append(told(sampler, static_cast<Index>(i)));
    return answers;
}

}  // namespace

void bind_sampler(nb::module_& module, const Variant& (*find)(const std::string& name)) {
    nb::class_<Sampler>(module, "Sampler")
        .def("__init__",
             [find](Sampler* self, const std::string& variant, std::shared_ptr<Team> team, Index vocab) {
                 if (vocab < 1 || vocab > 1 << 22) throw std::invalid_argument("a vocabulary has 1 to 2^22 tokens");
                 new (self) Sampler(find(variant), std::move(team), vocab);
             })
        .def("greedy",
             [](const Sampler& self, const Lines& logits, const Tokens& out) {
                 check(self, logits, out.shape(0));
                 self.greedy(logits.data(), static_cast<Index>(logits.shape(0)), out.data());
             },
             nb::arg("logits").noconvert(), nb::arg("out").noconvert(), nb::call_guard<nb::gil_scoped_release>())
        .def("choose", &choose, nb::arg("lines"), nb::arg("logits").noconvert());
}

}  // namespace cairn
