"""One server process a configuration, started on first use and torn down with the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmark.serving.server import STRICT, Fleet, Server

COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--context-length", "8192", "--max-total-tokens", "8192"),
    # An idle server must not spin: another one may be under test.
    *("--enable-metrics", "--decode-log-interval", "8", "--random-seed", "1", "--sleep-on-idle"),
)


@pytest.fixture(scope="session")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """``serve(*flags, **env)``: the running server of that configuration. Two stay up: memory is shared."""
    with Fleet(model, 2, lambda: tmp_path_factory.mktemp("server") / "log.txt") as fleet:
        yield lambda *flags, **env: fleet.get([*COMMON, *flags], {**STRICT, **env})


@pytest.fixture(scope="session")
def serve_tiny(serve: Callable[..., Server], tiny: Path) -> Callable[..., Server]:
    """The same with the random model: for what does not depend on the sense of an answer."""
    return lambda *flags, **env: serve("--model-path", str(tiny), "--context-length", "4096", *flags, **env)
