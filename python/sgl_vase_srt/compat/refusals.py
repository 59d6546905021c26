"""What eviction cannot be combined with: server flags, models, environment variables, requests. Tables only.

Eviction shortens a request's KV row in place while it decodes: slot ``j`` of a row holds another token for
each layer and head, and a row is shorter than prompt + output. Whatever copies, verifies, shares or recomputes
rows by token is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_vase.registry import policy_class


@dataclass(frozen=True)
class Refusal:
    """``flag`` is refused where ``when`` holds for the object that carries it.

    ``flag`` names a server flag, an environment variable, a property of a model or a field of a request;
    ``limit`` says in words when it is refused; ``also`` are further fields that the condition reads.
    """

    flag: str
    when: Callable[[Any], bool]
    why: str
    fix: str
    limit: str = ""
    also: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """``ServerArgs`` fields that this refusal decides on."""
        return (_field(self.flag), *self.also)

    def __str__(self) -> str:
        return f"{f'{self.flag} {self.limit}'.rstrip()}, because {self.why} ({self.fix})"


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _switch(flag: str, why: str, fix: str = "drop it", limit: str = "", also: tuple[str, ...] = ()) -> Refusal:
    """Refuse a flag that is on, or given at all; so is any of ``also``."""
    fields = (_field(flag), *also)
    return Refusal(flag, lambda view: any(getattr(view, name) for name in fields), why, fix, limit, also)


def _width(flag: str, why: str, fix: str) -> Refusal:
    """Refuse a group wider than one process."""
    return Refusal(flag, lambda view: getattr(view, _field(flag)) > 1, why, fix, limit="above 1")


def _other(flag: str, off: str, why: str, fix: str) -> Refusal:
    """Refuse any value but ``off``."""
    return Refusal(flag, lambda view: getattr(view, _field(flag)) not in (None, off), why, fix, f"other than {off}")


def _only(flag: str, values: tuple[str, ...], why: str) -> Refusal:
    """Refuse any value but ``values``."""
    among = " or ".join(values)
    return Refusal(
        flag, lambda view: getattr(view, _field(flag)) not in values, why, f"use {among}", f"other than {among}"
    )


def _values(flag: str, values: tuple[str, ...], why: str, fix: str) -> Refusal:
    """Refuse any of ``values``."""
    return Refusal(flag, lambda view: getattr(view, _field(flag)) in values, why, fix, " or ".join(values))


def _variable(name: str, why: str) -> Refusal:
    """Refuse an environment variable that is set to anything but its off value."""
    return Refusal(name, lambda envs: bool(getattr(envs, name).get()), why, "unset it")


ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "flex_attention", "intel_amx")
"""Backends that read a request's K and V through ``req_to_token`` and ``seq_lens`` alone, from the plain pool."""

DEVICES = ("cuda", "cpu")
KV_DTYPES = ("auto", "bf16", "bfloat16")

_BY_TOKEN = "it stores, moves or reloads a request's KV as that of its tokens, which an evicted row no longer is"
_CONTEXT = "the ranks split a row by token position, and an evicted row has none"
_EMBEDS = "nothing is decoded, so nothing would ever be evicted"
_MODAL = "part of the model runs in another server; only text models are supported"
_OWN_STEP = "it replaces the attention layers that eviction hooks"
_ORACLE = "tokens come from a test oracle, not from the model"
_LAYOUT = "compaction expects a token's heads side by side"
_CHECKED = "it checks that slot j of a row is token j"
_DRAFTS = "drafts are verified and rolled back by logical row length"
_BY_SLOT = "it is looked up by the slots of the tokens, which move"
_UNSCALED = "scores are computed on unscaled values only"
_NOT_POSITIONS = "distances are measured in slots, which are no longer positions"
_NO_TOKENIZER_MANAGER = "it goes around the tokenizer manager that eviction hooks"


def _attention_backends(view: Any) -> set[str | None]:
    return {
        view.prefill_attention_backend or view.attention_backend,
        view.decode_attention_backend or view.attention_backend,
    }


def _prefill_graph_hides_queries(view: Any) -> bool:
    graphs = view.cuda_graph_config
    backend = "disabled" if graphs is None else graphs.prefill.backend
    return backend not in ("disabled", "breakable") and policy_class(view.eviction).needs_queries


SERVER = (
    # Several processes or several servers for one request.
    _width("--pp-size", "a stage holds some layers of a row and plans without the others", "use --tp-size"),
    Refusal(
        "--attn-dp-size",
        lambda view: view.attn_dp_size > 1 or view.enable_dp_attention,
        "a rank's decode step may run as a prefill, for which eviction has no logical lengths",
        "use --tp-size",
        limit="above 1, or --enable-dp-attention",
        also=("enable_dp_attention",),
    ),
    _width("--dwdp-size", "it turns on data-parallel attention", "use --tp-size"),
    _width("--attn-cp-size", _CONTEXT, "use --tp-size"),
    _width("--dcp-size", _CONTEXT, "use --tp-size"),
    _switch("--enable-prefill-cp", _CONTEXT, "use --tp-size"),
    _switch("--enable-cp-decode-attn-tp", _CONTEXT, "use --tp-size"),
    _switch("--enable-kv-cache-sharding", _CONTEXT, "use --tp-size"),
    _switch("--enable-dsa-cache-layer-split", _CONTEXT, "use --tp-size"),
    _switch("--elastic-ep-backend", "a rank that joins later does not know earlier evictions"),
    _switch("--use-ray", "its actors do not load plugins", "start without Ray"),
    _width(
        "--tokenizer-worker-num", "the workers do not load plugins, so answers would not say what was evicted", "use 1"
    ),
    _switch("--smg-grpc-mode", _NO_TOKENIZER_MANAGER, "use HTTP", limit="or --grpc-mode", also=("grpc_mode",)),
    _other("--disaggregation-mode", "null", _BY_TOKEN, "serve in one server"),
    _switch("--disaggregation-decode-enable-offload-kvcache", _BY_TOKEN),
    _other("--disaggregation-decode-retraction-backup", "none", _BY_TOKEN, "drop it"),
    _switch("--enable-pd-role-switch", _BY_TOKEN),
    _switch("--enable-pdmux", "prefill runs on a second stream, unordered with the moves of KV"),
    _switch("--encoder-only", _MODAL),
    _switch("--language-only", _MODAL),
    # Several tokens a step.
    _switch("--speculative-algorithm", _DRAFTS),
    _other("--decoupled-spec-role", "null", _DRAFTS, "drop it"),
    _switch("--dllm-algorithm", "a diffusion model rewrites whole blocks of its row"),
    # Other owners, tiers and layouts of KV.
    _switch("--enable-hierarchical-cache", _BY_TOKEN),
    _switch("--hicache-storage-backend", _BY_TOKEN),
    _switch("--enable-unified-cache-external-linker", _BY_TOKEN),
    _switch("--enable-lmcache", _BY_TOKEN),
    _switch("--enable-flexkv", _BY_TOKEN),
    _switch("--enable-hisparse", "it keeps its own device and host copies of a row, by token"),
    _switch("--radix-cache-backend", "whether it lets go of the tail of a row is unknown", "use the built-in tree"),
    _switch("--enable-session-radix-cache", "a session keeps references on rows of ended requests"),
    _switch("--enable-streaming-session", "the next turn continues in the row of the last one"),
    _switch("--enable-page-major-kv-layout", "compaction expects one K and one V buffer a layer"),
    _switch("--enable-unified-memory", "the pool moves slots by itself, behind the plan of a round"),
    _switch("--prefill-only-disable-kv-cache", "there would be no KV to evict"),
    _only("--kv-cache-dtype", KV_DTYPES, _UNSCALED),
    _other("--kv-canary", "none", _CHECKED, "drop it; SGLANG_CHECK_KV_PAGE_INVARIANTS=1 works"),
    # Kernels and devices.
    Refusal(
        "--attention-backend",
        lambda view: not _attention_backends(view) <= {*ATTENTION_BACKENDS},
        "it keeps KV in a form of its own, or nobody checked that it goes by the shortened length",
        f"use {', '.join(ATTENTION_BACKENDS)}",
        limit="or the one for prefill or decode (chosen or default) not in the list",
        also=("prefill_attention_backend", "decode_attention_backend"),
    ),
    _only("--device", DEVICES, "its KV pool has a layout of its own"),
    Refusal(
        "--cuda-graph-backend-prefill",
        _prefill_graph_hides_queries,
        "a replayed prefill skips the hook that keeps the queries this policy scores with",
        "add --disable-prefill-cuda-graph, or use a policy without queries such as vase-dkv",
        limit="(chosen or default) other than disabled and breakable, for policies that use queries",
        also=("cuda_graph_config", "disable_prefill_cuda_graph"),
    ),
    _switch("--enable-torch-compile", _OWN_STEP),
    _switch("--enable-nvidia-megakernel", _OWN_STEP),
    _switch("--enable-amd-monokernel", _OWN_STEP),
    _switch("--enable-two-batch-overlap", "half batches do not carry logical lengths"),
    _values(
        "--model-impl",
        ("transformers", "mindspore"),
        "its attention layers are not SGLang modules that can be found",
        "use auto or sglang",
    ),
    _values("--sampling-backend", ("token_oracle",), _ORACLE, "use pytorch or flashinfer"),
    # Meaning of the answer.
    _switch("--is-embedding", _EMBEDS, "serve it without --eviction"),
    _switch("--enable-mis", _EMBEDS, "serve it without --eviction"),
    _switch("--enable-return-routed-experts", _BY_SLOT),
    _switch("--enable-return-indexer-topk", _BY_SLOT),
    _switch("--rl-on-policy-target", "the trainer recomputes log-probabilities with the whole cache"),
    _switch(
        "--enable-lora",
        "adapters have not been run with eviction",
        "merge the adapter into the weights",
        "or --lora-paths",
        ("lora_paths",),
    ),
    Refusal(
        "--enable-priority-scheduling",
        lambda view: view.enable_priority_scheduling and not view.disable_priority_preemption,
        "preemption counts what a running request may still gain, which is next to nothing once it evicts",
        "add --disable-priority-preemption",
        limit="with preemption",
        also=("disable_priority_preemption",),
    ),
    Refusal(
        "--preferred-sampling-params",
        lambda view: "eviction" in ((view.preferred_sampling_params or {}).get("custom_params") or {}),
        "it is merged into requests after they were checked",
        "use the --eviction flags",
        limit="with eviction in custom_params",
    ),
)


def _layer_types(config: Any) -> set[str]:
    return {*(_text(config, "layer_types") or ())}


def _is_hybrid(config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(config) is not None


def _kv_is_quantized(config: Any) -> bool:
    quantization = config.hf_quant_config or {}
    return bool((quantization.get("quantization") or quantization).get("kv_cache_quant_algo"))


def _text(config: Any, name: str) -> Any:
    return getattr(config.hf_text_config, name, None)


def _model(
    name: str, when: Callable[[Any], Any], why: str, fix: str = "serve a decoder with plain causal attention"
) -> Refusal:
    return Refusal(name, lambda config: bool(when(config)), why, fix)


MODEL = (
    _model(
        "multi-head latent attention",
        lambda config: config.attention_arch.name == "MLA",
        "all heads share one latent a token, so no head can keep its own tokens",
    ),
    _model(
        "state-space, linear and hybrid layers",
        lambda config: (
            config.attention_arch.name == "SSM"
            or _is_hybrid(config)
            or _layer_types(config) - {"full_attention", "attention", "sliding_attention", "chunked_attention"}
        ),
        "their state is not made of tokens, and its checkpoints go by row length",
    ),
    _model(
        "sliding-window and chunked attention",
        lambda config: (
            config.is_hybrid_swa
            or config.is_local_attention_model
            or config.attention_chunk_size
            or _layer_types(config) & {"sliding_attention", "chunked_attention"}
        ),
        _NOT_POSITIONS,
    ),
    _model("encoder-decoder models", lambda config: config.is_encoder_decoder, "rows start with the encoder's tokens"),
    _model(
        "M-RoPE positions",
        lambda config: config.model_is_mrope,
        "decode positions are computed from the row's length",
        "serve the text model with --language-model-only, where it can",
    ),
    _model(
        "multimodal input",
        lambda config: config.is_multimodal or config.is_audio_model,
        "media tokens have not been run with eviction",
        "serve the text model with --language-model-only, where it can",
    ),
    _model("models that do not generate", lambda config: not config.is_generation, _EMBEDS, "drop --eviction"),
    _model(
        "n-gram embeddings",
        lambda config: config.use_ngram_embedding or config.use_engram,
        "they look up earlier tokens by row length",
    ),
    _model(
        "non-causal attention",
        lambda config: _text(config, "is_causal") is False or _text(config, "use_bidirectional_attention"),
        "the scores follow causal attention",
    ),
    _model("ALiBi", lambda config: getattr(config, "use_alibi", False), _NOT_POSITIONS),
    _model(
        "logit caps, learned sinks and position-dependent temperatures",
        lambda config: (
            config.has_attention_sinks
            or _text(config, "attn_logit_softcapping")
            or _text(config, "attn_temperature_len")
        ),
        "the scores do not model them",
    ),
    _model(
        "dual-chunk attention",
        lambda config: getattr(config.hf_config, "dual_chunk_attention_config", None) is not None,
        "a query has a different form for each chunk of the row",
    ),
    _model("a quantized KV cache in the checkpoint", _kv_is_quantized, _UNSCALED, "serve a checkpoint without one"),
)

ENVIRONMENT = (
    _variable("SGLANG_USE_HND_KVCACHE", _LAYOUT),
    Refusal(
        "SGLANG_AITER_KV_CACHE_LAYOUT",
        lambda envs: envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower() != "nhd",
        _LAYOUT,
        "unset it",
        limit="other than nhd",
    ),
    _variable(
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the pool would get its size after eviction's buffers got theirs"
    ),
    _variable("SGLANG_RUST_SERVER", _NO_TOKENIZER_MANAGER),
    _variable("SGLANG_USE_MLX", "MLX keeps its own KV cache"),
    _variable("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", _ORACLE),
    _variable("SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT", _CHECKED),
    _variable("SGLANG_TEST_SCRIPTED_RUNTIME", "scripts drive the scheduler past the hooks"),
    _variable("SGLANG_DEBUG_REVERT_PR", "it brings back code that the hooks were not written for"),
)


def _beam_width(request: Any) -> int:
    params = getattr(request, "sampling_params", None)
    width = params.get("beam_width") if isinstance(params, dict) else getattr(params, "beam_width", None)
    return width or 1


def _asked(name: str, why: str) -> Refusal:
    """Refuse a field of a request that is on."""
    return Refusal(name, lambda request: bool(getattr(request, name, False)), why, "drop it")


REQUEST = (
    Refusal(
        "beam_width",
        lambda request: _beam_width(request) > 1,
        "beams share and fork rows by token",
        "use n for independent samples",
        limit="above 1",
    ),
    _asked("return_routed_experts", _BY_SLOT),
    _asked("return_indexer_topk", _BY_SLOT),
)
