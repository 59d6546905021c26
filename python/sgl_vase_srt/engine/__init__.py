"""Eviction inside one scheduler process: what is planned, moved, remembered and counted."""
