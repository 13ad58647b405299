"""More than one machine: sealed objects in a store that all replicas share, and the router in front of them."""
