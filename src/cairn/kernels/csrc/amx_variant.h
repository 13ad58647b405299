// What of a variant with tiles is known outside; amx_variant.cpp is compiled for the unit, and for its model.
#pragma once

#include "kernel.h"

namespace cairn {

namespace amx {
// Whether the instructions are legal in this process, whatever the CPU says of itself: an emulator may say too much. Not
// safe from two threads at once.
bool unit_runs();
// Whether this CPU's unit computes what the model of it says. The process must be allowed to use it.
bool unit_is_exact();
}  // namespace amx

namespace amxmodel {
bool unit_is_exact();
}

}  // namespace cairn
