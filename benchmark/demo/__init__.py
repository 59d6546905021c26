"""One long answer from a server that evicts, and the small model that gives it."""
