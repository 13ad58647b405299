"""The kernels in MLX, for Apple GPUs, and for any CPU to test them. Nothing else in the package imports mlx."""
