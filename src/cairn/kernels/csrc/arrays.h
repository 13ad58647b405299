// Arrays as the Python module takes them, and the sentence for one that does not fit.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "kernel.h"

namespace cairn {

using Floats = nanobind::ndarray<float, nanobind::c_contig, nanobind::device::cpu>;
using ConstFloats = nanobind::ndarray<const float, nanobind::c_contig, nanobind::device::cpu>;
using Ints = nanobind::ndarray<const std::int32_t, nanobind::c_contig, nanobind::device::cpu>;
using Choices = nanobind::ndarray<std::int32_t, nanobind::c_contig, nanobind::device::cpu>;
using Pool = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;
using Weights = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

inline void check(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

inline Dtype dtype_of(const std::string& name) {
    if (name == "float32") return Dtype::f32;
    if (name == "float16") return Dtype::f16;
    if (name == "bfloat16") return Dtype::bf16;
    throw std::invalid_argument("weights are float32, float16 or bfloat16, not " + name);
}

inline Activation activation_of(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "tanh") return Activation::tanh;
    if (name == "clamped_silu") return Activation::clamped_silu;
    if (name == "relu2") return Activation::relu2;
    check(name == "gelu_tanh", "the activation is silu, gelu, gelu_tanh, tanh, clamped_silu or relu2");
    return Activation::gelu_tanh;
}

// Of KV as numpy holds it: float32, float16, bfloat16 as 16-bit integers, or bytes that hold codes and scales.
inline Dtype pool_dtype(const Pool& kv) {
    if (kv.dtype() == nanobind::dtype<std::int8_t>()) return Dtype::q8;
    if (kv.dtype() == nanobind::dtype<std::uint16_t>()) return Dtype::bf16;
    if (kv.dtype().code == static_cast<std::uint8_t>(nanobind::dlpack::dtype_code::Float) && kv.dtype().bits == 16)
        return Dtype::f16;
    check(kv.dtype() == nanobind::dtype<float>(), "KV is float32, float16, bfloat16 or int8");
    return Dtype::f32;
}

}  // namespace cairn
