// Streams of a hidden state: their part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace cairn {

// Adds the calls to the class.
void bind_streams(nanobind::class_<Program>& program);

}  // namespace cairn
