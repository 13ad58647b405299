// What Python calls of layers that keep a state.
#pragma once

#include <nanobind/nanobind.h>

#include "program.h"

namespace cairn {

void bind_recurrent(nanobind::class_<Program>& program);

}  // namespace cairn
