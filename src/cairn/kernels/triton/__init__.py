"""The kernels in Triton, one source for NVIDIA and AMD GPUs: every sum in an order that no batch changes."""
