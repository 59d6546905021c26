"""FlashInfer's page table as the slots that ``Rows`` takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def page_table_slots(
    kv_indptr: Sequence[int], kv_indices: torch.Tensor, kv_last_page_len: Sequence[int], page_size: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Slots of every request, int64 ``[sum(lengths)]`` on the device of ``kv_indices``, and the requests' lengths.

    Request ``r`` owns pages ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``, of which the last holds
    ``kv_last_page_len[r]`` tokens (FlashInfer's convention; the first and the last argument are host integers).
    Raises ``ValueError`` naming the argument that does not fit.
    """
    pages = [b - a for a, b in itertools.pairwise(kv_indptr)]
    if page_size < 1:
        raise ValueError(f"page_size must be positive, got {page_size}")
    if not kv_indptr or kv_indptr[0] != 0 or min(pages, default=1) < 1:
        raise ValueError(f"kv_indptr must start at 0 and rise, got {list(kv_indptr)}")
    if kv_indices.dim() != 1 or kv_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"kv_indices must be int32 or int64 in one dimension, got {kv_indices.dtype} {kv_indices.shape}"
        )
    if kv_indices.shape[0] < kv_indptr[-1]:
        raise ValueError(f"kv_indices holds {kv_indices.shape[0]} pages, kv_indptr ends at {kv_indptr[-1]}")
    if len(kv_last_page_len) != len(pages) or any(not 1 <= n <= page_size for n in kv_last_page_len):
        raise ValueError(f"kv_last_page_len must be {len(pages)} numbers in [1, {page_size}], got {kv_last_page_len}")
    lengths = tuple((p - 1) * page_size + n for p, n in zip(pages, kv_last_page_len, strict=True))
    slots = kv_indices[: kv_indptr[-1], None].long() * page_size + torch.arange(page_size, device=kv_indices.device)
    rows = torch.split(slots.flatten(), [p * page_size for p in pages])
    return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]), lengths
