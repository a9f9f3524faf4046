// Programmatic dependent launch: a kernel that is launched so may start while the one before it in its stream still runs.
#pragma once
#include "types.cuh"

// Returns when the kernels before this one are complete and their writes visible. Nothing that they may write, and
// nothing that they may read of what this one writes, is touched before.
FS_DEVICE void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start, as far as it was launched so, wherever this one leaves room.
FS_DEVICE void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
