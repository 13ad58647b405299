"""The kernels in plain torch, for any device that torch computes on. Nothing else in the package imports torch."""
