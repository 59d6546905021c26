"""The model's side: logical positions, and the queries that policies score with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sgl_vase_kernels import ops

from sgl_vase_srt.engine import current

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def prepare(forward_batch: ForwardBatch, cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **_: Any) -> None:
    """Give decode rows their logical positions, and say on the host which queries of this forward are captured."""
    runtime = current.runtime()
    mode = forward_batch.forward_mode
    if mode.is_decode():
        if any(runtime.state_of(req).evictions for req in batch.reqs):
            forward_batch.positions = (batch.orig_seq_lens - 1).to(forward_batch.positions.dtype)
        runtime.capture = any(runtime.state_of(req).ring_slot for req in batch.reqs)
        return
    if not mode.is_extend():
        return
    decoding = len(batch.decoding_reqs or ())
    if decoding:
        positions = forward_batch.positions.clone()
        positions[-decoding:] = (batch.orig_seq_lens[-decoding:] - 1).to(positions.dtype)
        forward_batch.positions = positions
        forward_batch.vase_logical_lens = torch.cat(
            [batch.seq_lens[:-decoding], batch.orig_seq_lens[-decoding:].to(batch.seq_lens.dtype)]
        )
    if runtime.ring is not None:
        runtime.capture = runtime.window_tokens(batch, decoding) or False


def sample_at_logical_length(
    original: Callable[..., Any], runner: ModelRunner, logits_output: Any, forward_batch: ForwardBatch
) -> Any:
    """Sample a mixed batch at logical lengths: seeded noise is a function of the position, and physical ones repeat."""
    logical = getattr(forward_batch, "vase_logical_lens", None)
    if logical is None:
        return original(runner, logits_output, forward_batch)
    physical, forward_batch.seq_lens = forward_batch.seq_lens, logical
    try:
        return original(runner, logits_output, forward_batch)
    finally:
        forward_batch.seq_lens = physical


def capture_queries(
    backend: Any,
    q: torch.Tensor,
    k: Any,
    v: Any,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    *_: Any,
    **__: Any,
) -> None:
    """Keep the post-RoPE queries ``[tokens, heads * dim]`` that the policy scores with, in the layer's ring.

    Decode writes every row through the slot table (slot 0 is scratch): static buffers only, so a CUDA graph
    captures it. What to write is the runtime's to know: runners rebuild the batch and drop foreign attributes.
    """
    runtime = current.runtime()
    ring = runtime.ring
    assert ring is not None
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()  # also when graphs are captured again
    if (runtime.capture is False and not capturing) or forward_batch.forward_mode.is_idle():
        return
    q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
    if forward_batch.forward_mode.is_decode():
        slots = ring.table[forward_batch.req_pool_indices]
        ops.store_queries(ring.layer(layer.layer_id), slots, forward_batch.positions, q)
    elif isinstance(runtime.capture, tuple):
        index, slots, positions = runtime.capture
        ops.store_queries(ring.layer(layer.layer_id), slots, positions, q[index])
