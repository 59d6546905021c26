"""How fast a real server is, what its radix cache hits, and whether it survives: throughput, hit rates, soak."""
