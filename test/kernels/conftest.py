"""Interpreted tests are collected only in a process that Triton's interpreter was chosen for from the start."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
