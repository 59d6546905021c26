"""The model's attention layers, as the scores model them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


def attention_layers(runner: ModelRunner) -> list[RadixAttention]:
    """The attention layers of this rank in order. Raises ``ValueError`` for what the scores do not model."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = sorted((m for m in runner.model.modules() if isinstance(m, RadixAttention)), key=lambda m: m.layer_id)
    if not layers:
        raise ValueError("--eviction found no attention layer in this model: use SGLang's own implementation of it")
    first = layers[0]
    for layer in layers:
        if (
            layer.logit_cap
            or layer.sliding_window_size > 0
            or layer.is_cross_attention
            or layer.use_irope
            or layer.xai_temperature_len > 0
            or layer.pos_encoding_mode != "NONE"
            or layer.attn_type != AttentionType.DECODER
        ):
            raise ValueError(
                f"--eviction needs plain causal attention: layer {layer.layer_id} has a logit cap, a sliding window, "
                "cross attention, a temperature or a position encoding of its own"
            )
        if (layer.scaling, layer.tp_q_head_num, layer.head_dim) != (first.scaling, first.tp_q_head_num, first.head_dim):
            raise ValueError(f"--eviction needs equal attention layers: layer {layer.layer_id} differs from the first")
    pool = runner.token_to_kv_pool
    if [layer.layer_id for layer in layers] != list(range(pool.start_layer, pool.start_layer + pool.layer_num)):
        raise ValueError(f"--eviction needs one attention layer a KV layer, found {len(layers)} for {pool.layer_num}")
    return layers
