"""Models as data: config, weights, the decoder, the hub."""
