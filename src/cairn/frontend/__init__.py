"""The front of one model: requests in, events out, a worker process behind it."""
