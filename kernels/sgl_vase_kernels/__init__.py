"""Kernels of KV-cache eviction over paged caches: score, select, compact."""

from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows, upload

__all__ = ["KVPool", "QueryWindow", "Rows", "upload"]
