"""Tensor and data parallelism on CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.serving.server import REPEATABLE, STRICT, Server, flush
from test.e2e.client import gauge, generate_all
from test.e2e.conftest import COMMON
from test.e2e.texts import prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EVICTING = ("--eviction", "vase", "--eviction-budget", "160", "--eviction-buffer", "32", "--context-length", "4096")


def kept_sets(folder: Path) -> dict[tuple[str, int, int, int], list[int]]:
    """Kept candidates by request, round, layer and global head."""
    found: dict[tuple[str, int, int, int], list[int]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            for layer, heads in enumerate(line["kept"]):
                for head, kept in enumerate(heads):
                    found[line["rid"], line["round"], layer, line["head"] + head] = kept
    return found


def run(tiny: Path, folder: Path, *flags: str, **env: str) -> list[dict[str, Any]]:
    folder.mkdir()
    env = {**STRICT, **REPEATABLE, **env, "VASE_TRACE": str(folder)}
    with Server(tiny, [*COMMON, *EVICTING, *flags], env=env, log=folder / "log.txt") as server:
        prompts = [prompt_ids(i, length) for i, length in enumerate((5, 90, 300))]
        answers = generate_all(server.url, prompts, 330, rids=["short", "middle", "long"])
        flush(server.url)
        assert gauge(server.url, "sgl_vase:eviction_rounds") > 0
    return answers


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The answers of one process, and the folder of what it kept."""
    folder = tmp_path_factory.mktemp("parallel") / "one"
    return run(tiny, folder), folder


def test_two_ranks_keep_what_one_keeps(tiny: Path, tmp_path: Path, alone: tuple[list[dict[str, Any]], Path]) -> None:
    one, folder = alone
    two = run(tiny, tmp_path / "two", "--tp-size", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert [a["text"] for a in one] == [a["text"] for a in two]
    whole, split = kept_sets(folder), kept_sets(tmp_path / "two")
    assert len(whole) >= 3 * 4 * 3 * 3  # requests x heads x layers x rounds
    assert whole == split


def test_data_parallel_behind_the_router(tiny: Path, tmp_path: Path, alone: tuple[list[dict[str, Any]], Path]) -> None:
    answers = run(tiny, tmp_path / "dp", "--dp-size", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert all(answer["meta_info"]["eviction"]["evictions"] for answer in answers)
    assert [a["text"] for a in answers] == [a["text"] for a in alone[0]]
