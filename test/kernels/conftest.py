"""Triton decides at import whether it interprets: those tests run in a process of their own."""

from triton import knobs

collect_ignore_glob = [] if knobs.runtime.interpret else ["interpreted/*"]
