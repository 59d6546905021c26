"""The tokenizer process: requests are checked before they reach a scheduler, and answers say what was evicted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from sgl_vase_srt import compat
from sgl_vase_srt.engine import current, options
from sgl_vase_srt.hooks.output import KEY


def check(_: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a request that cannot be served, or asks for what cannot be had: a ``ValueError`` becomes HTTP 400."""
    compat.check_request(obj)
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, Mapping):
        options.asked(current.settings(), params.get("custom_params"))


def fold_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """Give an answer one eviction record; SGLang would append one a step."""
    rest = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, rest, index, finish_reason)
    if KEY in customized_info:
        meta_info[KEY] = customized_info[KEY][index][0]


_answered: ContextVar[dict[int, dict[str, Any]] | None] = ContextVar("_answered", default=None)
"""Latest eviction record of each choice of the request that this task answers."""


async def remember_eviction(
    original: Callable[..., AsyncIterator[Any]], *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Keep the records where the usage block is computed: the answer's meta_info is out of reach there."""
    seen: dict[int, dict[str, Any]] = {}
    _answered.set(seen)
    async for out in original(*args, **kwargs):
        for i, answer in enumerate(out if isinstance(out, list) else [out]):
            if KEY in answer.get("meta_info", {}):
                seen[answer.get("index", i)] = answer["meta_info"][KEY]
        yield out


def add_to_usage(usage: Any, *_: Any, **__: Any) -> Any:
    """Add the record to the OpenAI usage block, summed over its choices."""
    if seen := _answered.get():
        records = list(seen.values())
        sums = {key: sum(r[key] for r in records) for key in ("evictions", "evicted_tokens", "kv_tokens")}
        usage.eviction = records[0] | sums
    return usage


def extend_usage_model() -> None:
    """Let SGLang's usage model, and every response that embeds it, carry an ``eviction`` object."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    protocol.UsageInfo.model_config["extra"] = "allow"
    protocol.UsageInfo.model_rebuild(force=True)
    for model in vars(protocol).values():
        if isinstance(model, type) and issubclass(model, BaseModel) and "usage" in model.model_fields:
            model.model_rebuild(force=True)
