"""Views of a paged KV cache and of the ragged rows that an eviction round works on.

Vocabulary: a *slot* holds the keys and values of one token in one layer
(``slot = page * page_size + offset``); a *row* is the ordered list of slots a request
owns; *candidates* are the scored part of a row; the *buffer* is its last ``B`` entries,
always kept; *survivors* are the candidates that stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

Layout = Literal["NHD", "HND"]


def upload(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Host integers as int64 on ``device``, from pinned memory: the host does not wait."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class KVPool:
    """K and V buffers of every layer of one rank.

    ``k`` and ``v`` hold one tensor a layer, all of one shape, dtype and stride:
    ``[pages, page_size, heads, dim]`` for ``NHD``, ``[pages, heads, page_size, dim]`` for
    ``HND`` (FlashInfer's two layouts). ``k_scale``/``v_scale`` (float32 ``[layers]``)
    multiply fp8 values; ``None`` means 1.
    ``layer_offset``/``head_offset`` are the global index of local layer 0 and KV head 0,
    so that random draws do not depend on how the model is split.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    layout: Layout = "NHD"
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    layer_offset: int = 0
    head_offset: int = 0

    def __post_init__(self) -> None:
        if self.layout not in ("NHD", "HND"):
            raise ValueError(f"layout must be NHD or HND, got {self.layout!r}")
        if not self.k or len(self.k) != len(self.v):
            raise ValueError(f"k and v need one buffer a layer each, got {len(self.k)} and {len(self.v)}")
        for name, buffers in (("k", self.k), ("v", self.v)):
            head = buffers[0]
            if head.dim() != 4 or head.stride(-1) != 1:
                raise ValueError(f"{name}[0] must be 4-D with a dense last dimension, got {tuple(head.shape)}")
            for i, b in enumerate(buffers):
                if (b.shape, b.stride(), b.dtype, b.device) != (head.shape, head.stride(), head.dtype, head.device):
                    raise ValueError(f"{name}[{i}] differs from {name}[0] in shape, stride, dtype or device")
        if self.k[0].shape[:3] != self.v[0].shape[:3] or self.k[0].dtype != self.v[0].dtype:
            raise ValueError(
                f"k and v differ: {tuple(self.k[0].shape)} {self.k[0].dtype}, "
                f"{tuple(self.v[0].shape)} {self.v[0].dtype}"
            )

    @classmethod
    def from_slots(cls, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], **kwargs: object) -> KVPool:
        """A token pool, ``[slots, heads, dim]`` a layer (SGLang's MHA pool): page size 1."""
        return cls(tuple(b.unsqueeze(1) for b in k), tuple(b.unsqueeze(1) for b in v), "NHD", **kwargs)  # type: ignore[arg-type]

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def heads(self) -> int:
        return self.k[0].shape[2 if self.layout == "NHD" else 1]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1 if self.layout == "NHD" else 2]

    @property
    def slots(self) -> int:
        return self.k[0].shape[0] * self.page_size

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype


@dataclass(frozen=True)
class Rows:
    """The private entries of ``R`` due requests, concatenated, plus what a round needs to know of each.

    ``slots``: int64 ``[N]`` on the pool's device, each row in order: candidates, then the
    ``buffer`` last entries. All other fields are host integers, one an entry of the batch:
    ``lengths`` (private entries of the row, candidates + buffer), ``first`` (index of the
    row's entry 0 in the request's whole row, i.e. the protected length ``P``), ``keep``
    (survivors ``K``), ``reserve`` (``N_v <= K``), ``sinks`` (leading candidates that are among
    the request's first positions), ``seed`` (64-bit request key), ``round`` (eviction number,
    from 0) and ``carried`` (leading candidates that survived an earlier round).
    """

    slots: torch.Tensor
    lengths: tuple[int, ...]
    buffer: int
    first: tuple[int, ...]
    keep: tuple[int, ...]
    reserve: tuple[int, ...]
    sinks: tuple[int, ...]
    seed: tuple[int, ...]
    round: tuple[int, ...]
    carried: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.lengths)
        for name in ("first", "keep", "reserve", "sinks", "seed", "round", "carried"):
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {size} rows")
        if self.slots.dtype != torch.int64 or self.slots.shape != (sum(self.lengths),):
            raise ValueError(
                f"slots must be int64 [{sum(self.lengths)}], got {self.slots.dtype} {tuple(self.slots.shape)}"
            )
        if self.buffer < 0:
            raise ValueError(f"buffer must be >= 0, got {self.buffer}")
        for r in range(size):
            n = self.lengths[r] - self.buffer
            if not 0 <= self.keep[r] <= n:
                raise ValueError(f"row {r}: keep {self.keep[r]} outside [0, {n}] candidates")
            if not 0 <= self.reserve[r] <= self.keep[r]:
                raise ValueError(f"row {r}: reserve {self.reserve[r]} outside [0, keep={self.keep[r]}]")
            if not 0 <= self.sinks[r] <= n:
                raise ValueError(f"row {r}: sinks {self.sinks[r]} outside [0, {n}] candidates")

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Candidates of each row."""
        return tuple(n - self.buffer for n in self.lengths)

    @cached_property
    def indptr(self) -> tuple[int, ...]:
        """Row ``r`` is ``slots[indptr[r]:indptr[r + 1]]``."""
        return (0, *itertools.accumulate(self.lengths))

    @cached_property
    def candidate_indptr(self) -> tuple[int, ...]:
        """Row ``r``'s scores are ``scores[..., candidate_indptr[r]:candidate_indptr[r + 1]]``."""
        return (0, *itertools.accumulate(self.candidates))

    @cached_property
    def keep_indptr(self) -> tuple[int, ...]:
        """Row ``r``'s survivors are ``kept[..., keep_indptr[r]:keep_indptr[r + 1]]``."""
        return (0, *itertools.accumulate(self.keep))


@dataclass(frozen=True)
class QueryWindow:
    """The last post-RoPE queries of each due request, as the runtime's ring holds them.

    ``ring``: ``[layers, ring_slots, window, q_heads, dim]``; the query at position ``p`` of a
    request lies in column ``p % window``. ``slot``: the ring slot of each request, ``end``:
    its logical length (one past the position of its last query), ``valid``: how many of its
    last positions are in the ring (``<= window``). ``scale``: softmax scale of the logits.
    """

    ring: torch.Tensor
    slot: tuple[int, ...]
    end: tuple[int, ...]
    valid: tuple[int, ...]
    scale: float

    def columns(self, row: int, last: int | None = None) -> list[int]:
        """Ring columns of the row's newest ``last`` (default: all valid) queries, oldest first."""
        window = self.ring.shape[2]
        count = self.valid[row] if last is None else min(last, self.valid[row])
        return [p % window for p in range(self.end[row] - count, self.end[row])]
