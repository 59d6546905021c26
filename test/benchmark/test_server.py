"""What is left when a test run dies, and what is said when a server does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import requests

from benchmark.serving import server

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
time.sleep(300)
"""

CROWDED = """
import http.server, os, sys
with open(os.environ["STARTS"], "a+") as starts:
    starts.write("x")
    starts.seek(0)
    if len(starts.read()) <= int(os.environ["CROWDED"]):
        sys.exit("EADDRINUSE, message: address already in use")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.mark.parametrize("crowded", [1, 3])
def test_a_server_whose_port_was_taken_is_started_again(tmp_path: Path, crowded: int) -> None:
    """But not for ever: the third failure is reported."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(CROWDED)
    starts = tmp_path / "starts"
    env = {"PYTHONPATH": str(tmp_path), "STARTS": str(starts), "CROWDED": str(crowded)}
    one = server.Server("model", env=env)
    with contextlib.ExitStack() as stack:
        if crowded == 3:
            stack.enter_context(pytest.raises(server.ServerError, match="address already in use"))
        stack.enter_context(one)
    assert starts.read_text() == "x" * min(crowded + 1, 3)


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


@pytest.mark.parametrize("in_fleet", [False, True])
def test_a_server_that_dies_under_a_request_says_why(tmp_path: Path, in_fleet: bool) -> None:
    gone = server.Server("model", log=tmp_path / "log.txt")
    gone.log_path.write_text("the scheduler was killed")
    gone._process = subprocess.Popen(["true"], start_new_session=True)
    other = server.Server("model", log=tmp_path / "other.txt")
    other._process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    fleet = server.Fleet(Path("model"), 2)
    fleet._up = {("other",): other, ("gone",): gone}
    with pytest.raises(server.ServerError, match="the scheduler was killed"), fleet if in_fleet else gone:
        raise requests.ConnectionError("connection reset")
    if not in_fleet:
        other.stop()
    for stopped in (gone, other):
        with pytest.raises(server.ServerError, match="not running"):
            _ = stopped.pid


def test_a_fleet_starts_together_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)
    started: list[server.Server] = []

    def start(self: server.Server) -> server.Server:
        both.wait()
        self._process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        started.append(self)
        return self

    monkeypatch.setattr(server.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(server.Server, "start", start)
    with server.Fleet(Path("model"), 2) as fleet:
        first = fleet.start([(["--a"], {}), (["--a"], {"x": "1"}), (["--a"], {})])
        assert [(s.flags, s.env) for s in first] == [(["--a"], {}), (["--a"], {"x": "1"})]
        assert fleet.get(["--a"], {}) is first[0] and len(started) == 2
        fleet.start([(["--b"], {}), (["--c"], {})])
        assert len(started) == 4 and not any(s._process for s in first), "the limit is two"
    assert not any(s._process for s in started)


def test_a_fleet_stops_the_others_if_one_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    other = threading.Event()
    stopped = threading.Event()

    def start(self: server.Server) -> None:
        if self.flags == ["bad"]:
            assert other.wait(20)
            raise server.ServerError("the flag is bad")
        other.set()
        assert stopped.wait(20), "it goes on starting until it is stopped"

    monkeypatch.setattr(server.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(server.Server, "start", start)
    monkeypatch.setattr(server.Server, "stop", lambda self: stopped.set())
    with server.Fleet(Path("model"), 2) as fleet, pytest.raises(server.ServerError, match="the flag is bad"):
        fleet.start([(["good"], {}), (["bad"], {})])
