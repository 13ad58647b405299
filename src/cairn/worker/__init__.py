"""The worker process of one model: the step loop, grammars and stores behind a socket."""
