#include "streams_module.h"

#include "arrays.h"

namespace nb = nanobind;

namespace cairn {
namespace {

// Their number and size.
struct Streams {
    Index count, size;
};

template <class Array>
Streams streams_of(const Array& x) {
    check(x.ndim() == 3, "streams are [M, A, H]");
    return {static_cast<Index>(x.shape(1)), static_cast<Index>(x.shape(2))};
}

template <class Array>
void has_width(const Array& x, Index size) {
    check(x.ndim() == 2 && static_cast<Index>(x.shape(1)) == size, "a stream is [M, H]");
}

void mix_streams(Program& program, const ConstFloats& x, const ConstFloats& parts, const Floats& out) {
    const Streams one = streams_of(x), other = streams_of(out);
    check(one.count == other.count && one.size == other.size, "as many streams come out as go in");
    check(parts.ndim() == 2 && static_cast<Index>(parts.shape(1)) == one.count * one.count, "parts are [M, A A]");
    program.mix_streams(x.data(), one.count, one.size, parts.data(), out.data());
}

void correct_streams(Program& program, const ConstFloats& given, const ConstFloats& parts, int active, const Floats& x) {
    const Streams one = streams_of(x);
    has_width(given, one.size);
    check(parts.ndim() == 2 && static_cast<Index>(parts.shape(1)) == one.count, "parts are [M, A]");
    check(active >= 0 && active < one.count, "the active stream is one of them");
    program.correct_streams(given.data(), parts.data(), one.count, one.size, active, x.data());
}

void take_stream(Program& program, const ConstFloats& x, int place, const Floats& out) {
    const Streams one = streams_of(x);
    has_width(out, one.size);
    check(place >= 0 && place < one.count, "a stream is one of them");
    program.take_stream(x.data(), one.count, one.size, place, out.data());
}

void put_stream(Program& program, const ConstFloats& x, int place, const Floats& out) {
    const Streams one = streams_of(out);
    has_width(x, one.size);
    check(place >= 0 && place < one.count, "a stream is one of them");
    program.put_stream(x.data(), one.count, one.size, place, out.data());
}

void add_streams(Program& program, const ConstFloats& x, int first, const Floats& out) {
    const Streams one = streams_of(out);
    has_width(x, one.size);
    check(first >= 0, "streams are counted from 0");
    program.add_streams(x.data(), one.count, one.size, first, out.data());
}

void match_magnitude(Program& program, const ConstFloats& like, const Floats& x) {
    check(x.ndim() == 2, "a stream is [M, H]");
    has_width(like, static_cast<Index>(x.shape(1)));
    program.match_magnitude(like.data(), static_cast<Index>(x.shape(1)), x.data());
}

void sparsify(Program& program, const Floats& gates, double factor) {
    check(gates.ndim() == 2 && gates.shape(1) % 2 == 0, "gates are [M, 2F]");
    program.sparsify(gates.data(), static_cast<Index>(gates.shape(1)) / 2, static_cast<float>(factor));
}

void scale_columns(Program& program, const ConstFloats& x, const ConstFloats& weight, const Floats& out) {
    check(x.ndim() == 2, "x is [M, H]");
    has_width(out, static_cast<Index>(x.shape(1)));
    check(weight.size() == x.shape(1), "there is a number for each column");
    program.scale_columns(x.data(), static_cast<Index>(x.shape(1)), weight.data(), out.data());
}

}  // namespace

void bind_streams(nb::class_<Program>& program) {
    const auto array = nb::arg().noconvert();
    program.def("mix_streams", &mix_streams, array, array, array)
        .def("correct_streams", &correct_streams, array, array, nb::arg(), array)
        .def("take_stream", &take_stream, array, nb::arg(), array)
        .def("put_stream", &put_stream, array, nb::arg(), array)
        .def("add_streams", &add_streams, array, nb::arg(), array)
        .def("match_magnitude", &match_magnitude, array, array)
        .def("sparsify", &sparsify, array, nb::arg())
        .def("scale_columns", &scale_columns, array, array, array);
}

}  // namespace cairn
