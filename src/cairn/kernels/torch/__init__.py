"""The kernels in plain torch, for any device that torch supports. Nothing else in the package imports torch."""
