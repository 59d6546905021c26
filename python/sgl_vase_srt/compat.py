"""What eviction can be combined with: the table, the checks that read it, the source of docs/compatibility.md.

Eviction shortens a request's KV row in place while it decodes: slot ``j`` of a row holds another token for
each layer and head, and a row is shorter than prompt + output. Whatever copies, verifies, shares or recomputes
rows by token is refused. Every field of SGLang's ``ServerArgs`` is either named by a refusal or in a group
below; a field that a new SGLang adds is in neither, which a test reports.

``python -m sgl_vase_srt.compat --markdown [FILE]`` prints the tables, or rewrites them inside FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgl_vase.registry import policy_class


class Unsupported(ValueError):
    """A combination that eviction refuses; the message is one sentence."""


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

    @property
    def name(self) -> str:
        return f"{self.flag} {self.limit}".rstrip()

    def __str__(self) -> str:
        return f"{self.name}, because {self.why} ({self.fix})"


@dataclass(frozen=True)
class Works:
    """Server fields that need no refusal, and how far that is known.

    ``tested``: end-to-end tests run it. ``argued``: it cannot reach rows, slots, lengths or positions, for
    the reason given. ``untested``: nothing speaks against it and nobody ran it. ``unused``: it is read only
    together with something that is refused.
    """

    status: Literal["tested", "argued", "untested", "unused"]
    what: str
    why: str
    fields: tuple[str, ...]


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _switch(flag: str, why: str, fix: str = "drop it", **more: Any) -> Refusal:
    """Refuse a flag that is on, or given at all."""
    return Refusal(flag, lambda view: bool(getattr(view, _field(flag))), why, fix, **more)


def _width(flag: str, why: str, fix: str) -> Refusal:
    """Refuse a group wider than one process."""
    return Refusal(flag, lambda view: getattr(view, _field(flag)) > 1, why, fix, limit="above 1")


def _other(flag: str, off: str, why: str, fix: str) -> Refusal:
    """Refuse any value but ``off``."""
    return Refusal(flag, lambda view: getattr(view, _field(flag)) != off, why, fix, limit=f"other than {off}")


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
    Refusal(
        "--disaggregation-decode-retraction-backup",
        lambda view: view.disaggregation_decode_retraction_backup not in (None, "none"),
        _BY_TOKEN,
        "drop it",
        limit="other than none",
    ),
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
    Refusal(
        "--kv-cache-dtype",
        lambda view: view.kv_cache_dtype not in KV_DTYPES,
        _UNSCALED,
        "use auto or bf16",
        limit=f"other than {', '.join(KV_DTYPES)}",
    ),
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
    Refusal(
        "--device",
        lambda view: view.device not in DEVICES,
        "its KV pool has a layout of its own",
        f"use {' or '.join(DEVICES)}",
        limit=f"other than {' and '.join(DEVICES)}",
    ),
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
    Refusal(
        "--model-impl",
        lambda view: view.model_impl in ("transformers", "mindspore"),
        "its attention layers are not SGLang modules that can be found",
        "use auto or sglang",
        limit="transformers or mindspore",
    ),
    Refusal(
        "--sampling-backend",
        lambda view: view.sampling_backend == "token_oracle",
        _ORACLE,
        "use pytorch or flashinfer",
        limit="token_oracle",
    ),
    # Meaning of the answer.
    _switch("--is-embedding", _EMBEDS, "serve it without --eviction"),
    _switch("--enable-mis", _EMBEDS, "serve it without --eviction"),
    _switch("--enable-return-routed-experts", _BY_SLOT),
    _switch("--enable-return-indexer-topk", _BY_SLOT),
    _switch("--rl-on-policy-target", "the trainer recomputes log-probabilities with the whole cache"),
    Refusal(
        "--enable-lora",
        lambda view: bool(view.enable_lora or view.lora_paths),
        "adapters have not been run with eviction",
        "merge the adapter into the weights",
        limit="or --lora-paths",
        also=("lora_paths",),
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
    return {*(getattr(config.hf_text_config, "layer_types", None) or ())}


def _is_hybrid(config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(config) is not None


def _kv_is_quantized(config: Any) -> bool:
    quantization = config.hf_quant_config or {}
    return bool((quantization.get("quantization") or quantization).get("kv_cache_quant_algo"))


_OTHER_MODEL = "serve a decoder with plain causal attention"

MODEL = (
    Refusal(
        "multi-head latent attention",
        lambda config: config.attention_arch.name == "MLA",
        "all heads share one latent a token, so no head can keep its own tokens",
        _OTHER_MODEL,
    ),
    Refusal(
        "state-space, linear and hybrid layers",
        lambda config: (
            config.attention_arch.name == "SSM"
            or _is_hybrid(config)
            or bool(_layer_types(config) - {"full_attention", "attention", "sliding_attention", "chunked_attention"})
        ),
        "their state is not made of tokens, and its checkpoints go by row length",
        _OTHER_MODEL,
    ),
    Refusal(
        "sliding-window and chunked attention",
        lambda config: (
            config.is_hybrid_swa
            or config.is_local_attention_model
            or bool(config.attention_chunk_size)
            or bool(_layer_types(config) & {"sliding_attention", "chunked_attention"})
        ),
        _NOT_POSITIONS,
        _OTHER_MODEL,
    ),
    Refusal(
        "encoder-decoder models",
        lambda config: config.is_encoder_decoder,
        "rows start with the encoder's tokens",
        _OTHER_MODEL,
    ),
    Refusal(
        "M-RoPE positions",
        lambda config: config.model_is_mrope,
        "decode positions are computed from the row's length",
        "serve the text model with --language-model-only, where it can",
    ),
    Refusal(
        "multimodal input",
        lambda config: bool(config.is_multimodal or config.is_audio_model),
        "media tokens have not been run with eviction",
        "serve the text model with --language-model-only, where it can",
    ),
    Refusal("models that do not generate", lambda config: not config.is_generation, _EMBEDS, "drop --eviction"),
    Refusal(
        "n-gram embeddings",
        lambda config: bool(config.use_ngram_embedding or config.use_engram),
        "they look up earlier tokens by row length",
        _OTHER_MODEL,
    ),
    Refusal(
        "non-causal attention",
        lambda config: (
            getattr(config.hf_text_config, "is_causal", None) is False
            or bool(getattr(config.hf_text_config, "use_bidirectional_attention", False))
        ),
        "the scores follow causal attention",
        _OTHER_MODEL,
    ),
    Refusal(
        "ALiBi",
        lambda config: getattr(config, "use_alibi", False),
        _NOT_POSITIONS,
        _OTHER_MODEL,
    ),
    Refusal(
        "logit caps, learned sinks and position-dependent temperatures",
        lambda config: (
            config.has_attention_sinks
            or any(
                getattr(config.hf_text_config, name, None)
                for name in ("attn_logit_softcapping", "attn_temperature_len")
            )
        ),
        "the scores do not model them",
        _OTHER_MODEL,
    ),
    Refusal(
        "dual-chunk attention",
        lambda config: getattr(config.hf_config, "dual_chunk_attention_config", None) is not None,
        "a query has a different form for each chunk of the row",
        _OTHER_MODEL,
    ),
    Refusal(
        "a quantized KV cache in the checkpoint",
        _kv_is_quantized,
        _UNSCALED,
        "serve a checkpoint without one",
    ),
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


REQUEST = (
    Refusal(
        "beam_width",
        lambda request: _beam_width(request) > 1,
        "beams share and fork rows by token",
        "use n for independent samples",
        limit="above 1",
    ),
    Refusal(
        "return_routed_experts",
        lambda request: bool(getattr(request, "return_routed_experts", False)),
        _BY_SLOT,
        "drop it",
    ),
    Refusal(
        "return_indexer_topk",
        lambda request: bool(getattr(request, "return_indexer_topk", False)),
        _BY_SLOT,
        "drop it",
    ),
)

WORKS = (
    Works(
        "tested",
        "Batches, pages and the radix tree",
        "end-to-end tests run overlap on and off, pages of 1 and 16, chunked and mixed prefill, the tree on and off",
        _names("""model_path dtype context_length max_total_tokens chunked_prefill_size enable_mixed_chunk
            tp_size dp_size page_size disable_radix_cache disable_overlap_schedule random_seed host port enable_metrics
            decode_log_interval"""),
    ),
    Works(
        "argued",
        "Which request runs next",
        "the scheduler orders, delays and counts requests; it reads row lengths, which are the shortened ones",
        _names("""mem_fraction_static max_running_requests max_queued_requests max_prefill_tokens prefill_max_requests
            prefill_decode_interval prefill_decode_interval_min_bs schedule_policy schedule_conservativeness
            scheduler_recv_interval retraction_policy default_priority_value abort_on_priority_when_disabled
            schedule_low_priority_values_first enable_prefill_delayer prefill_delayer_max_delay_passes
            prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
            prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
            min_free_slots_delay"""),
    ),
    Works(
        "argued",
        "What the radix tree keeps",
        "its policies choose among nodes that no request holds; an evicted row offers the tree its prompt at most",
        _names("""radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set
            strip_thinking_cache kv_events_config"""),
    ),
    Works(
        "argued",
        "Tensor parallelism and its collectives",
        "every rank plans the same cut from the same integers and draws by global head; collectives carry activations",
        _names("""nccl_port dist_timeout dist_init_addr enable_p2p_check pre_warm_nccl enable_nccl_nvls
            enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem boundary_reduction
            enable_quant_communications enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode disable_attn_tp_gather"""),
    ),
    Works(
        "argued",
        "Sampling, grammars, log-probabilities",
        "they read logits and token ids; seeded sampling reads logical positions",
        _names("""grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt disable_outlines_disk_cache enable_strict_thinking sampling_defaults
            enable_custom_logit_processor sampling_mask_max_tokens
            enable_deterministic_inference enable_fp32_lm_head enable_watermark watermark_config watermark_key
            watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability
            watermark_default_enabled watermark_enforce_all enable_return_hidden_states return_hidden_states_mode"""),
    ),
    Works(
        "argued",
        "Loading the weights",
        "it ends before a row exists",
        _names("""load_format model_loader_extra_config trust_remote_code revision model_config_parser
            json_model_override_args download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
            startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
            modelexpress_config checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
            weight_cache_timeout weight_version"""),
    ),
    Works(
        "argued",
        "Number formats and kernels of the weights",
        "matrix products see no KV",
        _names("""quantization modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
            modelopt_export_path quantize_and_serve rl_quant_profile enable_tf32_matmul fp8_gemm_runner_backend
            fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops"""),
    ),
    Works(
        "argued",
        "Mixture of experts",
        "experts see hidden states, not KV",
        _names("""ep_size moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
            flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype
            flashinfer_a2a_dispatch_type ep_num_redundant_experts ep_dispatch_algorithm init_expert_location
            enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
            eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
            expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
            moe_dense_tp_size enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
            disable_shared_experts_fusion enforce_shared_experts_fusion enable_fused_moe_sum_all_reduce
            enable_single_batch_overlap enable_shared_experts_attn_tp shared_experts_tp_size"""),
    ),
    Works(
        "argued",
        "Tokenizer, templates and the shape of answers",
        "they end before tokens reach a row, or start after",
        _names("""tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init chat_template
            trust_request_chat_template hf_chat_template_name completion_template default_chat_template_kwargs
            reasoning_parser tool_call_parser tool_server enable_cache_report return_input_ids return_output_ids
            allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
            incremental_streaming_output enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
            dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
            enable_response_store served_model_name"""),
    ),
    Works(
        "argued",
        "The HTTP server and its processes",
        "they carry requests and answers",
        _names("""fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs
            ssl_keyfile_password enable_ssl_refresh api_key admin_api_key file_storage_path base_gpu_id gpu_id_step
            watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node gc_threshold
            gated_launch_port"""),
    ),
    Works(
        "argued",
        "Logs, metrics and traces",
        "they report; pool usage counts what is held, estimates of attention work may count what was evicted too",
        _names("""log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
            uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_mfu_metrics
            enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
            generation_tokens_buckets gc_warning_threshold_secs enable_request_time_stats_logging
            load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker"""),
    ),
    Works(
        "untested",
        "CUDA graphs",
        "positions, lengths and page tables are copied into a graph's buffers at every step; queries are kept by index",
        _names("""cuda_graph_backend_decode cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
            cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill disable_decode_cuda_graph
            disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc
            debug_cuda_graph"""),
    ),
    Works(
        "untested",
        "Options of attention kernels",
        "they split or fuse the same reads of the same rows",
        _names("""triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
            enable_lean_attention enable_fused_qk_norm_rope"""),
    ),
    Works(
        "untested",
        "Several nodes",
        "the plugin must be installed on each; each launcher checks its own",
        ("nnodes", "node_rank"),
    ),
    Works(
        "untested",
        "Activations split by sequence inside a layer",
        "the attention layer is handed whole queries again",
        _names("""enable_attn_tp_input_scattered enable_layernorm_sp enable_megamoe_for_layernorm_sp moe_dp_size"""),
    ),
    Works(
        "untested",
        "Weights outside the GPU",
        "weights move, KV stays",
        _names("""cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
            enable_paged_experts paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer
            kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token"""),
    ),
    Works(
        "untested",
        "Releasing memory between requests",
        "the pool comes back at the same addresses, and no request runs meanwhile",
        ("enable_memory_saver", "enable_weights_cpu_backup"),
    ),
    Works(
        "untested",
        "Other front ends and servers",
        "they use the same tokenizer manager and detokenizer messages",
        _names("""detokenizer_worker_num grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args
            enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size language_model_only"""),
    ),
    Works(
        "untested",
        "Looking into the model",
        "hooks and dumps see the tensors of a step whose rows are shorter",
        _names("""forward_hooks msprobe_dump_config debug_tensor_dump_output_folder debug_tensor_dump_layers
            debug_tensor_dump_input_file enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids"""),
    ),
    Works(
        "unused",
        "Speculative decoding",
        "refused: --speculative-algorithm, --decoupled-spec-role",
        _names("""uno_lora_path speculative_draft_model_path speculative_draft_model_revision
            speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
            speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size
            speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
            speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
            speculative_token_map speculative_attention_mode speculative_draft_attention_backend
            speculative_dsa_topk_backend speculative_draft_kv_cache_dtype speculative_draft_window_size
            speculative_draft_sink_size speculative_moe_runner_backend speculative_moe_a2a_backend
            speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
            _speculative_draft_quantization_explicitly_set speculative_boundary_reduction enable_multi_layer_eagle
            speculative_adaptive speculative_adaptive_config decoupled_spec_bind_endpoint
            decoupled_spec_connect_endpoints decoupled_spec_rank spec_trace_dir speculative_ngram_min_bfs_breadth
            speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
            speculative_ngram_capacity speculative_ngram_external_corpus_path
            speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
            decrypted_draft_config_file enable_draft_weights_cpu_backup"""),
    ),
    Works(
        "unused",
        "Prefill and decode in different servers, encoders apart",
        "refused: --disaggregation-mode, --enable-pdmux, --encoder-only, --language-only",
        _names("""disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
            disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval disaggregation_enable_kv_checksum
            disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
            num_reserved_decode_tokens optimistic_prefill_attempts encoder_transfer_backend encoder_urls
            encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder pdmux_config_path
            sm_group_num"""),
    ),
    Works(
        "unused",
        "Other tiers of KV",
        "refused: --enable-hierarchical-cache, --hicache-storage-backend, --enable-hisparse, --enable-lmcache, …",
        _names("""hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy
            hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy
            hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
            hicache_storage_prefetch_retry_max_attempts unified_cache_external_linker_backend
            unified_cache_external_linker_config enable_linker_mla_dedup hisparse_config lmcache_config_file
            flexkv_config_file"""),
    ),
    Works(
        "unused",
        "Quantized KV",
        "refused: --kv-cache-dtype",
        ("quantization_param_path", "prefill_kv_cache_dequant_dtype"),
    ),
    Works(
        "unused",
        "Data, context and pipeline parallelism",
        "refused: --attn-dp-size, --attn-cp-size, --dcp-size, --pp-size, --elastic-ep-backend",
        _names("""load_balance_method enable_dp_attention_local_control_broadcast enable_dp_lm_head
            enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp cp_strategy enable_cp_tp_group_sharing
            dcp_comm_backend dcp_replicate_q_proj pp_max_micro_batch_size pp_async_batch_depth
            enable_dynamic_chunking enable_elastic_expert_backup mooncake_ib_device ep_join_mode ep_join_rank_offset
            elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout"""),
    ),
    Works(
        "unused",
        "Sliding windows, state-space layers, latent and sparse attention",
        "refused by the model check",
        _names("""c128_page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
            disable_hybrid_swa_memory disable_chunked_prefix_cache enable_encoder_swa_bounded_replay
            enable_decoder_swa_bounded_replay max_mamba_cache_size mamba_full_memory_ratio mamba_backend
            mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
            mamba_cache_philox_rounds mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
            enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend
            linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm
            linear_replayssm_cache_len enable_linear_replayssm_spec enable_scattered_sconv
            flashinfer_mla_disable_ragged dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend
            dsa_topk_backend dsa_triton_union enable_dsa_fused_indexer dsv4_prefill_backend dsv4_attn_backend
            enable_deepseek_v4_fp4_indexer qsa_indexer_dtype cuda_graph_prefill_max_context ple_offload_embedding
            ple_offload_backend ple_offload_dir"""),
    ),
    Works(
        "unused",
        "Multimodal input",
        "refused by the model check",
        _names("""enable_multimodal mm_attention_backend enable_precise_embedding_interpolation
            enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config
            mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
            mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache
            mm_global_cache_backend image_processor_backend disable_fast_image_processor mm_feature_transport
            asr_max_buffer_seconds asr_max_concurrent_sessions"""),
    ),
    Works(
        "unused",
        "LoRA",
        "refused: --enable-lora, --lora-paths",
        _names("""enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
            lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
            lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold"""),
    ),
    Works(
        "unused",
        "Parts of other refused flags, and flags that SGLang 0.5.23 does not read",
        "refused: the flag that switches each on; num_continuous_decode_steps is read nowhere",
        _names("""priority_scheduling_preemption_threshold kv_canary_real_data kv_canary_sweep_interval
            dllm_algorithm_config dllm_fdfo tbo_token_distribution_threshold enable_torch_compile_debug_mode
            torch_compile_max_bs smg_http_sidecar_port enable_http_worker_reuseport mlx_enable_sampling
            num_continuous_decode_steps"""),
    ),
)


def _refuse(table: Iterable[Refusal], view: Any) -> None:
    if found := [str(refusal) for refusal in table if refusal.when(view)]:
        raise Unsupported(f"--eviction does not support {'; '.join(found)}")


def check_server_args(cfg: Any) -> None:
    """Check resolved server args (``resolving_view(server_args)`` after ``resolve_once``).

    Raises ``Unsupported`` with one sentence that names every refused flag, its reason and what to do.
    """
    _refuse(SERVER, cfg)


def check_model(model_config: Any) -> None:
    """Check SGLang's ``ModelConfig`` the same way; needs no weights."""
    _refuse(MODEL, model_config)


def check_environment() -> None:
    """Check SGLang's environment variables the same way."""
    from sglang.srt.environ import envs

    _refuse(ENVIRONMENT, envs)


def check_request(request: Any) -> None:
    """Check one request (``GenerateReqInput`` of a single prompt, or its tokenized form) the same way."""
    _refuse(REQUEST, request)


# ----------------------------------------------------------------------- docs

BEGIN, END = "<!-- generated: python -m sgl_vase_srt.compat --markdown -->", "<!-- end of generated -->"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
        "",
    ]


def _refusals(title: str, head: str, table: Iterable[Refusal], quote: str = "`") -> list[str]:
    rows = ((f"{quote}{r.flag}{quote} {r.limit}".rstrip(), r.why, r.fix) for r in table)
    return [f"### {title}", "", *_table((head, "why", "instead"), rows)]


def markdown() -> str:
    """The tables of ``docs/compatibility.md``."""
    lines = [BEGIN, "", "## Refused", ""]
    lines += _refusals("Server flags", "flag", SERVER)
    lines += _refusals("Models", "property", MODEL, quote="")
    lines += _refusals("Environment variables", "variable", ENVIRONMENT)
    lines += _refusals("Requests (HTTP 400)", "field", REQUEST)
    for status, title in (
        ("tested", "Works, tested"),
        ("argued", "Works, for a reason"),
        ("untested", "Allowed, not tested"),
        ("unused", "Without effect: belongs to what is refused"),
    ):
        groups = (w for w in WORKS if w.status == status)
        rows = ((w.what, w.why, " ".join(f"`{name}`" for name in w.fields)) for w in groups)
        lines += [f"## {title}", "", *_table(("what", "why", "server fields"), rows)]
    return "\n".join([*lines, END]) + "\n"


def main(argv: list[str]) -> int:
    match argv:
        case ["--markdown"]:
            print(markdown(), end="")
        case ["--markdown", file]:
            text = Path(file).read_text()
            before, _, rest = text.partition(BEGIN)
            _, _, after = rest.partition(END + "\n")
            Path(file).write_text(before + markdown() + after)
        case _:
            print("usage: python -m sgl_vase_srt.compat --markdown [FILE]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
