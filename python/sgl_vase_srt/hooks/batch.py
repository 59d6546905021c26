"""Decode batches: rounds, and who gives way when the pool is full."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sgl_vase_srt.engine import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker


def plan(batch: ScheduleBatch, selected_indices: list[int] | None = None) -> None:
    """Plan rounds and free tails: once a decode or mixed step, before memory pressure retracts anybody."""
    if selected_indices is None:
        current.runtime().plan(batch)


def execute(worker: TpModelWorker, *args: Any, **kwargs: Any) -> None:
    """Move KV on the forward stream, between the forward that wrote the last KV and the one that reads it."""
    current.runtime().execute()


def forget(_: None, req: Req) -> None:
    """After a retraction the row is gone: counters, randomness and the window start over."""
    req.eviction_state = None


def retraction_order(order: list[int], reqs: list[Req]) -> list[int]:
    """Retract last what cannot come back: a retracted request prefills its whole logical length."""
    return sorted(order, key=lambda i: current.runtime().fits(reqs[i].seqlen))


def requeue(original: Callable[..., None], scheduler: Scheduler, req: Req, is_retracted: bool = False) -> None:
    """End a retracted request that no prefill can bring back with an error: it would block the queue."""
    runtime = current.runtime()
    if not req.is_retracted or runtime.fits(req.seqlen):  # a pause does not pass the argument
        original(scheduler, req, is_retracted=is_retracted)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    req.to_finish = FINISH_ABORT(
        f"Retracted after {req.seqlen} tokens, more than the KV pool of {runtime.capacity} holds at once: it "
        "cannot be prefilled again. Raise --max-total-tokens or lower --max-running-requests.",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
    )
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=req.to_finish.to_json()), req)
