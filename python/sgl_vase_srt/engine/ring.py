"""The query ring: the last ``B`` post-RoPE queries of the requests that are near an eviction."""

from __future__ import annotations

import torch
from sgl_vase_kernels import upload


class QueryRing:
    """Ring slots for the requests that hold more than their budget.

    A request needs its queries only for the ``B`` steps before a round, so a slot is taken when
    the row reaches ``T_eff``: at most ``pool tokens / private floor`` requests can be that long at
    once, whatever the number that runs. Slot 0 is scratch, for rows that need no capture.

    ``data``: ``[layers, slots, window, q_heads, dim]``. ``table``: int64 ``[rows]``, the slot of each
    row of ``req_to_token``, changed on the forward stream only.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        window: int,
        q_heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        first_layer: int = 0,
    ) -> None:
        self.data = torch.zeros(layers, slots + 1, window, q_heads, dim, dtype=dtype, device=device)
        self.table = torch.zeros(rows, dtype=torch.int64, device=device)
        self._first_layer = first_layer
        self._free = list(range(slots, 0, -1))
        self._moves: dict[int, int] = {}

    @property
    def window(self) -> int:
        return self.data.shape[2]

    @property
    def slots(self) -> int:
        return self.data.shape[1] - 1

    def layer(self, layer_id: int) -> torch.Tensor:
        """``[slots, window, q_heads, dim]`` of one (global) layer."""
        return self.data[layer_id - self._first_layer]

    def take(self, row: int) -> int:
        """A slot for the request in ``row``."""
        if not self._free:
            raise RuntimeError(
                f"the query ring has no slot left for row {row}: {self.slots} requests hold more than their budget"
            )
        slot = self._free.pop()
        self._moves[row] = slot
        return slot

    def give_back(self, row: int, slot: int) -> None:
        self._free.append(slot)
        self._moves[row] = 0

    def flush(self) -> None:
        """Bring the device's slot table up to date. Call on the forward stream."""
        if not self._moves:
            return
        rows, slots = upload([*self._moves.items()], self.table.device).unbind(1)
        self.table[rows] = slots
        self._moves.clear()
