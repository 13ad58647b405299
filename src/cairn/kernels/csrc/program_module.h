// The recorded calls' part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernel.h"

namespace cairn {

// `find` gives the variant of a name that runs here, or throws. The module's Team and Matrix are bound before.
void bind_program(nanobind::module_& module, const Variant& (*find)(const std::string& name));

}  // namespace cairn
