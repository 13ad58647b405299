"""The kernels in Triton, one source for NVIDIA and AMD GPUs: every sum in an order that no batch changes."""

import os

# Products and sums are fused where `tl.fma` says so and nowhere else, so that two kernels give the same bits.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
