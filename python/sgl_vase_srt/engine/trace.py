"""What was kept, for those who study it: ``VASE_TRACE=DIR`` writes one JSON line a cut and rank.

A line holds the request's id, the round, the row's protected length, the global index of the rank's first
layer and KV head, and ``kept``: ``[layers][heads][keep]`` candidate indices (0 is the row's first private
entry). It reads results back from the device: for experiments, not for serving.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sgl_vase_kernels import KVPool, Rows


class Trace:
    """The trace file of one scheduler process."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank{rank}.jsonl").open("a")

    @classmethod
    def from_environment(cls, rank: int) -> Trace | None:
        folder = os.environ.get("VASE_TRACE")
        return cls(Path(folder), rank) if folder else None

    def write(self, rids: list[str], pool: KVPool, rows: Rows, kept: torch.Tensor) -> None:
        for r, rid in enumerate(rids):
            line = {
                "rid": rid,
                "round": rows.round[r],
                "protected": rows.first[r],
                "layer": pool.layer_offset,
                "head": pool.head_offset,
                "kept": kept[:, :, rows.keep_indptr[r] : rows.keep_indptr[r + 1]].tolist(),
            }
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
