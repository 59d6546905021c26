"""The server fields that no refusal names, in groups, each with how far it is known that they work.

A field that a new SGLang adds is neither refused nor here, which a test reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["tested", "argued", "untested", "unused"]


@dataclass(frozen=True)
class Works:
    """Server fields that need no refusal, and how far that is known.

    ``tested``: end-to-end tests run it. ``argued``: it cannot reach rows, slots, lengths or positions, for
    the reason given. ``untested``: nothing speaks against it and nobody ran it. ``unused``: it is read only
    together with something that is refused. ``name_*`` stands for all fields of that beginning that no table names.
    """

    status: Status
    what: str
    why: str
    fields: tuple[str, ...]


_GROUPS: dict[Status, tuple[tuple[str, str, str], ...]] = {
    "tested": (
        (
            "Batches, pages and the radix tree",
            "end-to-end tests run overlap and tree on and off, pages of 1 and 16, chunked and mixed prefill",
            """model_path dtype context_length max_total_tokens chunked_prefill_size enable_mixed_chunk
            tp_size dp_size page_size disable_radix_cache disable_overlap_schedule random_seed host port enable_metrics
            decode_log_interval""",
        ),
    ),
    "argued": (
        (
            "Which request runs next",
            "the scheduler orders, delays and counts requests; it reads row lengths, which are the shortened ones",
            """mem_fraction_static max_running_requests max_queued_requests max_prefill_tokens prefill_max_requests
            prefill_decode_interval prefill_decode_interval_min_bs schedule_policy schedule_conservativeness
            scheduler_recv_interval retraction_policy default_priority_value abort_on_priority_when_disabled
            schedule_low_priority_values_first enable_prefill_delayer prefill_delayer_max_delay_passes
            prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
            prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
            min_free_slots_delay""",
        ),
        (
            "What the radix tree keeps",
            "its policies choose among nodes that no request holds; an evicted row offers the tree its prompt at most",
            """radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set
            strip_thinking_cache kv_events_config""",
        ),
        (
            "Tensor parallelism and its collectives",
            "all ranks plan the same cut from the same integers and draw by global head; collectives carry activations",
            """nccl_port dist_timeout dist_init_addr enable_p2p_check pre_warm_nccl enable_nccl_nvls
            enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem boundary_reduction
            enable_quant_communications enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode disable_attn_tp_gather""",
        ),
        (
            "Sampling, grammars, log-probabilities",
            "they read logits and token ids; seeded sampling reads logical positions",
            """grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt disable_outlines_disk_cache enable_strict_thinking sampling_defaults
            enable_custom_logit_processor sampling_mask_max_tokens
            enable_deterministic_inference enable_fp32_lm_head enable_watermark watermark_config watermark_key
            watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability
            watermark_default_enabled watermark_enforce_all enable_return_hidden_states return_hidden_states_mode""",
        ),
        (
            "Loading the weights",
            "it ends before a row exists",
            """load_format model_loader_extra_config trust_remote_code revision model_config_parser
            json_model_override_args download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
            startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
            modelexpress_config checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
            weight_cache_timeout weight_version""",
        ),
        (
            "Number formats and kernels of the weights",
            "matrix products see no KV",
            """quantization modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
            modelopt_export_path quantize_and_serve rl_quant_profile enable_tf32_matmul fp8_gemm_runner_backend
            fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops""",
        ),
        (
            "Mixture of experts",
            "experts see hidden states, not KV",
            """ep_size moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
            flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype
            flashinfer_a2a_dispatch_type ep_num_redundant_experts ep_dispatch_algorithm init_expert_location
            enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
            eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
            expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
            moe_dense_tp_size enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
            disable_shared_experts_fusion enforce_shared_experts_fusion enable_fused_moe_sum_all_reduce
            enable_single_batch_overlap enable_shared_experts_attn_tp shared_experts_tp_size""",
        ),
        (
            "Tokenizer, templates and the shape of answers",
            "they end before tokens reach a row, or start after",
            """tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init chat_template
            trust_request_chat_template hf_chat_template_name completion_template default_chat_template_kwargs
            reasoning_parser tool_call_parser tool_server enable_cache_report return_input_ids return_output_ids
            allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
            incremental_streaming_output enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
            dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
            enable_response_store served_model_name""",
        ),
        (
            "The HTTP server and its processes",
            "they carry requests and answers",
            """fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs
            ssl_keyfile_password enable_ssl_refresh api_key admin_api_key file_storage_path base_gpu_id gpu_id_step
            watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node gc_threshold
            gated_launch_port""",
        ),
        (
            "Logs, metrics and traces",
            "they report; pool usage counts what is held, estimates of attention work may count what was evicted too",
            """log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
            uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_mfu_metrics
            enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
            generation_tokens_buckets gc_warning_threshold_secs enable_request_time_stats_logging
            load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker""",
        ),
    ),
    "untested": (
        (
            "CUDA graphs",
            "every step copies positions, lengths and page tables into a graph's buffers; queries are kept by index",
            """cuda_graph_backend_decode cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
            cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill disable_decode_cuda_graph
            disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc
            debug_cuda_graph""",
        ),
        (
            "Options of attention kernels",
            "they split or fuse the same reads of the same rows",
            """triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
            enable_lean_attention enable_fused_qk_norm_rope""",
        ),
        (
            "Several nodes",
            "the plugin must be installed on each; each launcher checks its own",
            "nnodes node_rank",
        ),
        (
            "Activations split by sequence inside a layer",
            "the attention layer is handed whole queries again",
            """enable_attn_tp_input_scattered enable_layernorm_sp enable_megamoe_for_layernorm_sp moe_dp_size""",
        ),
        (
            "Weights outside the GPU",
            "weights move, KV stays",
            """cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
            enable_paged_experts paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer
            kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token""",
        ),
        (
            "Releasing memory between requests",
            "the pool comes back at the same addresses, and no request runs meanwhile",
            "enable_memory_saver enable_weights_cpu_backup",
        ),
        (
            "Other front ends and servers",
            "they use the same tokenizer manager and detokenizer messages",
            """detokenizer_worker_num grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args
            enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size language_model_only""",
        ),
        (
            "Looking into the model",
            "hooks and dumps see the tensors of a step whose rows are shorter",
            """forward_hooks msprobe_dump_config debug_tensor_dump_output_folder debug_tensor_dump_layers
            debug_tensor_dump_input_file enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids""",
        ),
    ),
    "unused": (
        (
            "Speculative decoding",
            "refused: --speculative-algorithm, --decoupled-spec-role",
            """uno_lora_path speculative_* _speculative_* enable_multi_layer_eagle decoupled_spec_* spec_trace_dir
            decrypted_draft_config_file enable_draft_weights_cpu_backup""",
        ),
        (
            "Prefill and decode in different servers, encoders apart",
            "refused: --disaggregation-mode, --enable-pdmux, --encoder-only, --language-only",
            """disaggregation_* num_reserved_decode_tokens optimistic_prefill_attempts encoder_transfer_backend
            encoder_urls encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder
            pdmux_config_path sm_group_num""",
        ),
        (
            "Other tiers of KV",
            "refused: --enable-hierarchical-cache, --hicache-storage-backend, --enable-hisparse, --enable-lmcache, …",
            """hicache_* unified_cache_external_linker_backend unified_cache_external_linker_config
            enable_linker_mla_dedup hisparse_config lmcache_config_file flexkv_config_file""",
        ),
        (
            "Quantized KV",
            "refused: --kv-cache-dtype",
            "quantization_param_path prefill_kv_cache_dequant_dtype",
        ),
        (
            "Data, context and pipeline parallelism",
            "refused: --attn-dp-size, --attn-cp-size, --dcp-size, --pp-size, --elastic-ep-backend",
            """load_balance_method enable_dp_attention_local_control_broadcast enable_dp_lm_head
            enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp cp_strategy enable_cp_tp_group_sharing
            dcp_comm_backend dcp_replicate_q_proj pp_max_micro_batch_size pp_async_batch_depth
            enable_dynamic_chunking enable_elastic_expert_backup mooncake_ib_device ep_join_mode ep_join_rank_offset
            elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout""",
        ),
        (
            "Sliding windows, state-space layers, latent and sparse attention",
            "refused by the model check",
            """c128_page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
            disable_hybrid_swa_memory disable_chunked_prefix_cache enable_encoder_swa_bounded_replay
            enable_decoder_swa_bounded_replay max_mamba_cache_size mamba_* enable_mamba_cache_stochastic_rounding
            uses_mamba_radix_cache enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_*
            enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec enable_scattered_sconv
            flashinfer_mla_disable_ragged dsa_* enable_dsa_fused_indexer dsv4_* enable_deepseek_v4_fp4_indexer
            qsa_indexer_dtype cuda_graph_prefill_max_context ple_offload_embedding ple_offload_backend
            ple_offload_dir""",
        ),
        (
            "Multimodal input",
            "refused by the model check",
            """enable_multimodal mm_* enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process
            enable_prefix_mm_cache allowed_media_domains media_url_max_file_size_mb trust_mm_content_hashes
            limit_mm_data_per_request enable_mm_global_cache image_processor_backend disable_fast_image_processor
            asr_max_buffer_seconds asr_max_concurrent_sessions""",
        ),
        (
            "LoRA",
            "refused: --enable-lora, --lora-paths",
            """enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
            lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
            lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold""",
        ),
        (
            "Parts of other refused flags, and flags that SGLang 0.5.23 does not read",
            "refused: the flag that switches each on; num_continuous_decode_steps is read nowhere",
            """priority_scheduling_preemption_threshold kv_canary_real_data kv_canary_sweep_interval
            dllm_algorithm_config dllm_fdfo tbo_token_distribution_threshold enable_torch_compile_debug_mode
            torch_compile_max_bs smg_http_sidecar_port enable_http_worker_reuseport mlx_enable_sampling
            num_continuous_decode_steps""",
        ),
    ),
}
WORKS = tuple(
    Works(status, what, why, tuple(fields.split()))
    for status, groups in _GROUPS.items()
    for what, why, fields in groups
)
