"""Number formats of quantised tensors: reading them, rounding to them, and how config.json states them."""
