// Adapters: their part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace cairn {

// Adds the call to the class.
void bind_adapters(nanobind::class_<Program>& program);

}  // namespace cairn
