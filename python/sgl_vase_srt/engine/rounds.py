"""The device's half of a round: score, choose and move what was planned, before the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sgl_vase_kernels import KVPool, QueryWindow, Rows, ops

from sgl_vase import EvictionConfig, Policy, Round, RowPlan
from sgl_vase.policy import FIRST_POSITIONS
from sgl_vase_srt.engine.ring import QueryRing
from sgl_vase_srt.engine.trace import Trace

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

WORKSPACE = 256 << 20
"""Bytes that one launch's temporaries may take beside the KV pool; more due rows are moved in several."""
LONG_ROW = 4096 + 1024
"""Entries of a row that selection walks in blocks."""


@dataclass(frozen=True)
class Due:
    """One planned cut, with the row's slots as they were when it was planned."""

    req: Req
    plan: RowPlan
    copy: tuple[torch.Tensor, torch.Tensor] | None
    """A row that detaches: its tree-owned slots and the ones they are copied to."""
    slots: torch.Tensor
    seed: int
    round: int
    carried: int
    """Leading candidates that survived the last round."""
    ring_slot: int
    end: int
    """Logical length of the row."""
    valid: int
    """Newest queries that the ring holds of it."""


@dataclass
class Rounds:
    """One process's pool and the policy that chooses in it. ``state``: float32 ``[layers, heads, slots]``."""

    policy: Policy
    pool: KVPool
    buffer: int
    scale: float = 1.0
    ring: QueryRing | None = None
    state: torch.Tensor | None = None
    trace: Trace | None = None

    @property
    def _most_candidates(self) -> int:
        """Of one launch: what ``WORKSPACE`` holds of scores, reserve scores and survivors' indices."""
        return WORKSPACE // (16 * self.pool.layers * self.pool.heads)

    def execute(self, due: Sequence[Due]) -> None:
        """Enqueue the moves of all planned cuts; call on the forward stream."""
        starts: list[int] = []
        room = 0
        for i, d in enumerate(due):
            candidates = d.plan.length - d.plan.protected
            room -= candidates
            # A copy may go to slots that an earlier cut gave back: that cut is moved first.
            if not starts or d.copy is not None or room < 0:
                starts.append(i)
                room = self._most_candidates - candidates
        for start, stop in zip(starts, [*starts[1:], len(due)], strict=True):
            if (copy := due[start].copy) is not None:
                ops.copy_slots(self.pool, *copy)
            self._move(due[start:stop])

    def _move(self, due: Sequence[Due]) -> None:
        if self.pool.device.type == "cuda":
            for tensor in (t for d in due for t in (d.slots, *(d.copy or ()))):
                tensor.record_stream(torch.cuda.current_stream())
        plans = [d.plan for d in due]
        rows = Rows(
            slots=torch.cat([d.slots for d in due]),
            lengths=tuple(p.length - p.protected for p in plans),
            buffer=self.buffer,
            first=tuple(p.protected for p in plans),
            keep=tuple(p.keep for p in plans),
            reserve=tuple(p.reserve for p in plans),
            sinks=tuple(max(0, FIRST_POSITIONS - p.protected) for p in plans),
            seed=tuple(d.seed for d in due),
            round=tuple(d.round for d in due),
            carried=tuple(d.carried for d in due),
        )
        slot, end, valid = zip(*((d.ring_slot, d.end, d.valid) for d in due), strict=True)
        kept = self._cut(rows, slot, end, valid)
        if self.trace is not None:
            self.trace.write([d.req.rid for d in due], self.pool, rows, kept)

    def _cut(self, rows: Rows, slot: tuple[int, ...], end: tuple[int, ...], valid: tuple[int, ...]) -> torch.Tensor:
        """Choose the survivors of ``rows`` and move them; their indices, as ``Policy.select`` gives them."""
        queries = None if self.ring is None else QueryWindow(self.ring.data, slot, end, valid, self.scale)
        kept = self.policy.select(Round(self.pool, rows, queries, self.state))
        ops.compact(self.pool, rows, kept, keep_order=self.policy.needs_order)
        return kept

    def warm_up(self, config: EvictionConfig, page_size: int, capacity: int) -> None:
        """One round over the empty pool of ``capacity`` tokens for each size of row that a kernel is built for.

        A server that compiles at its first round stalls every request, and what the kernels do not take would
        end it there.
        """
        longest = config.footprint()
        lengths = [longest, *(n for n in (2**i for i in range(7, 31)) if config.private_floor < n < longest)]
        if capacity > LONG_ROW and longest <= LONG_ROW:
            lengths.append(LONG_ROW)
        for length in lengths:
            keep = (length - self.buffer + 1) // 2
            zero = (0,)
            # Slot 0 is the padding's; page 0 of paged pools is its own.
            slots = torch.arange(page_size, page_size + length, device=self.pool.device)
            rows = Rows(slots, (length,), self.buffer, zero, (keep,), (keep // 4,), zero, zero, zero, zero)
            self._cut(rows, zero, (length,), (self.buffer,))
        if self.state is not None:
            self.state.zero_()
