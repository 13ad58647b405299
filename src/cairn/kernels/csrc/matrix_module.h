// The packed matrices' part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace cairn {

void bind_matrix(nanobind::module_& module);

}  // namespace cairn
