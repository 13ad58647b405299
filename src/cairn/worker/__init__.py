"""The worker process of one model: step loop, grammars and KV stores, controlled over a socket."""
