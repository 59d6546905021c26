"""A real SGLang server process for tests, measurements and the demo: started on a free port, always torn down."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's own checks of pool and tree, on."""

STOCK = {"SGLANG_PLUGINS": "vase_cpu"}
"""Of this project, only the CPU platform is loaded: SGLang as it is."""

REPEATABLE = {"VASE_BATCH_INVARIANT": "1"}
"""On a CPU, answers that do not tell how many were in their batch."""

_GUARD = 'read _; kill -TERM "$1"; sleep 20; kill -s KILL -- -"$1"'


def guard(pid: int) -> subprocess.Popen[bytes]:
    """A process that ends the session of ``pid`` when this one dies, however it dies: its pipe closes then."""
    return subprocess.Popen(
        ["sh", "-c", _GUARD, "guard", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class ServerError(RuntimeError):
    """The server did not come up, ended or refused a request; the message ends with its log or its answer."""


def free_port() -> int:
    """A TCP port on the loopback interface that is free at this moment, and that no client is given by chance."""
    while True:
        port = random.SystemRandom().randrange(10000, 22000)  # below SGLang's own and the system's ephemeral ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def flush(url: str) -> None:
    """Empty the radix tree; the server waits until no request runs, and refuses if one goes on or a slot is lost."""
    requests.post(url + "/flush_cache?timeout=10", timeout=60).raise_for_status()


def generate(url: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The answer to one request, however long it takes. Raises ``ServerError``, which names ``what`` was asked."""
    response = requests.post(url + "/generate", json=body, timeout=86400)
    if response.status_code != 200:
        raise ServerError(f"{what}: HTTP {response.status_code}: {response.text[:500]}")
    return dict(response.json())


class Server:
    """``python -m sglang.launch_server`` with ``flags``, in a process session of its own.

    ``env`` is added to this process's environment. ``log`` receives the server's output; without it the log lives in a
    temporary folder until ``stop``. Use as a context manager, or pair ``start`` with ``stop``.
    """

    def __init__(
        self, model: Path | str, flags: Sequence[str] = (), *, env: Mapping[str, str] = {}, log: Path | None = None
    ) -> None:
        self.model = Path(model)
        self.flags = list(flags)
        self.env = dict(env)
        self._folder = None if log else Path(tempfile.mkdtemp(prefix="sgl-vase-server-"))
        self.log_path = log or self._folder / "log.txt"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the HTTP server. Raises ``ServerError`` when it is not running."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def metrics(self) -> str:
        """The Prometheus page; needs ``--enable-metrics``."""
        return requests.get(f"{self.url}/metrics", timeout=60).text

    def start(self, timeout: float = 600, on_wait: Callable[[float], None] = lambda seconds: None) -> Server:
        """Start and return once the server has generated a token; ``on_wait(seconds)`` is called while it has not.

        Raises ``ServerError`` when the process ends first or ``timeout`` seconds pass; nothing is left running then.
        A server whose ports were taken by another process before it bound them is started again.
        """
        attempts = 3
        while True:
            self._launch()
            attempts -= 1
            try:
                self._wait_until_ready(timeout, on_wait)
                return self
            except BaseException as error:
                if not attempts or not isinstance(error, ServerError) or "already in use" not in self.log().lower():
                    self.stop()
                    raise
                self._end()

    def _launch(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.flags],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = guard(self._process.pid)

    def stop(self) -> None:
        """End the server and every process it started; safe to call twice."""
        self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            members = family(process.pid)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            # SGLang's children outlive a parent that was killed or crashed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(members, timeout=10)
            process.wait()
        watcher, self._guard = self._guard, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def __enter__(self) -> Server:
        return self if self._process else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, requests.ConnectionError) and self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=5)
                    raise ServerError(f"the server ended by itself; the end of its log:\n{self._tail()}") from error
        finally:
            self.stop()

    def _wait_until_ready(self, timeout: float, on_wait: Callable[[float], None]) -> None:
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < timeout:
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"the server exited while starting; the end of its log:\n{self._tail()}")
            if "error while attempting to bind" in self.log():  # SGLang stays, deaf
                raise ServerError(f"another process took port {self.port}; try again")
            # Another process may answer on this port: believe only our own.
            if self._listens() and self._generates():
                return
            on_wait(elapsed)
            time.sleep(0.5)
        raise ServerError(f"the server was not ready after {timeout:.0f} s; the end of its log:\n{self._tail()}")

    def _listens(self) -> bool:
        for member in family(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in member.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                        return True
        return False

    def _generates(self) -> bool:
        try:
            return requests.get(f"{self.url}/health_generate", timeout=60).status_code == 200
        except requests.RequestException:
            return False

    def _tail(self, lines: int = 20) -> str:
        return "\n".join(self.log().splitlines()[-lines:])


class Fleet:
    """Servers of one model by flags and environment; the ``limit`` used last stay up. Use as a context manager.

    ``log`` names the file of each new server's output.
    """

    def __init__(self, model: Path, limit: int, log: Callable[[], Path | None] = lambda: None) -> None:
        self._model, self._limit, self._log = model, limit, log
        self._up: dict[tuple[str, ...], Server] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: Any) -> None:
        servers = contextlib.ExitStack()
        while self._up:
            servers.push(self._up.pop(next(iter(self._up))))
        servers.__exit__(*error)  # the one used last first: that is who died, if one did

    def get(self, flags: Sequence[str], env: Mapping[str, str]) -> Server:
        """The server with ``flags`` and ``env``, started if need be."""
        return self.start([(flags, env)])[0]

    def start(self, wanted: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Server]:
        """The servers with these flags and environments, at most ``limit``; what is missing starts together."""
        asked = {(*flags, *(f"{name}={env[name]}" for name in sorted(env))): (flags, env) for flags, env in wanted}
        found = {
            key: self._up.pop(key, None) or Server(self._model, flags, env=env, log=self._log())
            for key, (flags, env) in asked.items()
        }
        while self._up and len(self._up) + len(found) > self._limit:
            self._up.pop(next(iter(self._up))).stop()
        self._up |= found
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a start is mostly imports, on one core
            try:
                for start in as_completed([pool.submit(Server.__enter__, server) for server in found.values()]):
                    start.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for key, server in found.items():
                    del self._up[key]
                    server.stop()
                raise
        return list(found.values())


def family(pid: int) -> list[psutil.Process]:
    """The process and all that it started; empty when it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
