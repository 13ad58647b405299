// The sampler's part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernel.h"

namespace cairn {

// `find` gives the variant of a name that runs here, or throws. The module's Team is bound before.
void bind_sampler(nanobind::module_& module, const Variant& (*find)(const std::string& name));

}  // namespace cairn
