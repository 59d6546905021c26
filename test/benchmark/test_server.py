"""What is left when a test run dies."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmark import server

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
time.sleep(300)
"""


def test_a_server_does_not_outlive_its_owner() -> None:
    """Not even one that ignores SIGTERM, nor its children."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    with process.stdout:
        guard = server.guard(process.pid)
        assert guard.stdin is not None
        guard.stdin.close()  # as the system does when the owner dies
        assert process.wait(timeout=60) == -9
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        guard.wait(timeout=10)
