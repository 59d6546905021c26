"""The machine that a row was measured on."""

import os
import platform
import time
from functools import cache
from importlib.metadata import version
from typing import Any

import psutil
import pynvml


@cache
def gpus() -> list[Any]:
    """Handles of all GPUs, none without the driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def machine() -> dict[str, Any]:
    """The part of a row that says where and when: ``versions`` by package, ``machine``, ``date``."""
    names = ("sglang", "sgl-vase", "torch")
    cards = "".join(f", {pynvml.nvmlDeviceGetName(gpu)}" for gpu in gpus())
    return {
        "versions": {name: version(name) for name in names},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {psutil.virtual_memory().total // 2**30} GiB{cards}",
        "date": time.strftime("%Y-%m-%d"),
    }


def named(versions: dict[str, str]) -> str:
    """The versions in words."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())
