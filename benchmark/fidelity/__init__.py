"""How far eviction moves the next-token distribution, without a server."""
