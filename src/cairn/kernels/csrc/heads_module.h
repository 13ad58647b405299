// Heads of wider rows: their part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace cairn {

// Adds the calls to the class.
void bind_heads(nanobind::class_<Program>& program);

}  // namespace cairn
