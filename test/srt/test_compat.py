"""What is refused: every server field decided on, every refusal fires alone, plain configurations pass."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sgl_vase_srt import compat
from sgl_vase_srt.compat import page, refusals, works
from sgl_vase_srt.compat.refusals import Refusal
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

ROOT = Path(__file__).parents[2]
PREFILL_GRAPH = CudaGraphConfig(prefill=PhaseConfig(backend="full"))

# One value of the fields that each refusal reads for which it must fire.
CONFLICTS: dict[str, dict[str, Any]] = {
    "--pp-size": {"pp_size": 2},
    "--attn-dp-size": {"attn_dp_size": 2},
    "--dwdp-size": {"dwdp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--enable-prefill-cp": {"enable_prefill_cp": True},
    "--enable-cp-decode-attn-tp": {"enable_cp_decode_attn_tp": True},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
    "--enable-dsa-cache-layer-split": {"enable_dsa_cache_layer_split": True},
    "--elastic-ep-backend": {"elastic_ep_backend": "mooncake"},
    "--use-ray": {"use_ray": True},
    "--tokenizer-worker-num": {"tokenizer_worker_num": 2},
    "--smg-grpc-mode": {"smg_grpc_mode": True},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--disaggregation-decode-enable-offload-kvcache": {"disaggregation_decode_enable_offload_kvcache": True},
    "--disaggregation-decode-retraction-backup": {"disaggregation_decode_retraction_backup": "host_pool"},
    "--enable-pd-role-switch": {"enable_pd_role_switch": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--encoder-only": {"encoder_only": True},
    "--language-only": {"language_only": True},
    "--speculative-algorithm": {"speculative_algorithm": "NGRAM"},
    "--decoupled-spec-role": {"decoupled_spec_role": "drafter"},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--hicache-storage-backend": {"hicache_storage_backend": "file"},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--radix-cache-backend": {"radix_cache_backend": "mine"},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--enable-page-major-kv-layout": {"enable_page_major_kv_layout": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--prefill-only-disable-kv-cache": {"prefill_only_disable_kv_cache": True},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "--kv-canary": {"kv_canary": "log"},
    "--attention-backend": {"decode_attention_backend": "flashmla"},
    "--device": {"device": "npu"},
    "--cuda-graph-backend-prefill": {"cuda_graph_config": PREFILL_GRAPH},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--enable-nvidia-megakernel": {"enable_nvidia_megakernel": True},
    "--enable-amd-monokernel": {"enable_amd_monokernel": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--model-impl": {"model_impl": "transformers"},
    "--sampling-backend": {"sampling_backend": "token_oracle"},
    "--is-embedding": {"is_embedding": True},
    "--enable-mis": {"enable_mis": True},
    "--enable-return-routed-experts": {"enable_return_routed_experts": True},
    "--enable-return-indexer-topk": {"enable_return_indexer_topk": True},
    "--rl-on-policy-target": {"rl_on_policy_target": "fsdp"},
    "--enable-lora": {"lora_paths": ["adapter"]},
    "--enable-priority-scheduling": {"enable_priority_scheduling": True},
    "--preferred-sampling-params": {"preferred_sampling_params": {"custom_params": {"eviction": {"budget": 16}}}},
}


def defaults() -> dict[str, Any]:
    """SGLang's raw defaults, with what resolution always fills in."""
    values = {f.name: f.default for f in msgspec.structs.fields(ServerArgs)}
    return {**values, "device": "cpu", "attention_backend": "torch_native", "eviction": "vase-attnv"}


def test_every_server_field_is_decided_on_once() -> None:
    fields = {f.name for f in msgspec.structs.fields(ServerArgs)}
    said = [name for entry in (*refusals.SERVER, *works.WORKS) for name in entry.fields]
    decided = Counter(name for name in said if "*" not in name)
    rest = fields - decided.keys()
    decided.update(name for pattern in said if "*" in pattern for name in fnmatch.filter(rest, pattern) or [pattern])
    assert fields - decided.keys() == set(), "new in SGLang: refuse it or say why it works"
    assert decided.keys() - fields == set(), "gone from SGLang"
    assert [name for name, times in decided.items() if times > 1] == []


def test_every_refused_flag_is_one_that_users_type() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    typed = {option for action in parser._actions for option in action.option_strings}
    assert {refusal.flag for refusal in refusals.SERVER} <= typed


def test_every_refusal_has_a_conflict_here() -> None:
    assert [refusal.flag for refusal in refusals.SERVER] == list(CONFLICTS)


@pytest.mark.parametrize("refusal", refusals.SERVER, ids=lambda refusal: refusal.flag)
def test_each_conflict_is_refused_by_name_reason_and_remedy(refusal: Refusal) -> None:
    with pytest.raises(compat.Unsupported) as error:
        compat.check_server_args(SimpleNamespace(**defaults() | CONFLICTS[refusal.flag]))
    assert str(error.value) == f"--eviction does not support {refusal}"
    assert "\n" not in str(error.value)


def test_one_sentence_names_every_conflict() -> None:
    view = SimpleNamespace(**defaults() | CONFLICTS["--pp-size"] | CONFLICTS["--enable-lora"])
    with pytest.raises(
        compat.Unsupported, match=r"^--eviction .*--pp-size above 1, .*; --enable-lora or --lora-paths, .*\)$"
    ):
        compat.check_server_args(view)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"attention_backend": name, "device": "cuda"} for name in refusals.ATTENTION_BACKENDS),
        *({"kv_cache_dtype": name} for name in refusals.KV_DTYPES),
        {"enable_priority_scheduling": True, "disable_priority_preemption": True},
        {"cuda_graph_config": PREFILL_GRAPH, "eviction": "vase-dkv"},
        {"cuda_graph_config": CudaGraphConfig()},
        {"disaggregation_decode_retraction_backup": "none"},
        {"tp_size": 2, "page_size": 16, "enable_mixed_chunk": True, "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_plain_configurations_pass(changes: dict[str, Any]) -> None:
    compat.check_server_args(SimpleNamespace(**defaults() | changes))


def test_accepted_attention_backends_exist() -> None:
    assert {*refusals.ATTENTION_BACKENDS} <= {*ATTENTION_BACKEND_CHOICES}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "sliding_window": None}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
PLAIN = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen3-moe": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mistral": MISTRAL,  # SGLang serves it without the window; layers are looked at once they exist
}
OTHER = {
    "multi-head latent attention": {
        **LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "state-space, linear and hybrid layers": {
        **LLAMA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "sliding-window and chunked attention": {
        **QWEN3,
        "sliding_window": 512,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "encoder-decoder models": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "torch_dtype": "float32",
    },
    "M-RoPE positions": {
        **LLAMA,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {},
    },
    "multimodal input": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"model_type": "clip_vision_model"},
        "torch_dtype": "float32",
    },
    "models that do not generate": {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
    "n-gram embeddings": {**LLAMA, "use_ngram_embedding": True, "ngram_embedding_n": 3},
    "non-causal attention": {**LLAMA, "is_causal": False},
    "ALiBi": {**LLAMA, "architectures": ["BaichuanForCausalLM"]},
    "logit caps, learned sinks and position-dependent temperatures": {**LLAMA, "attn_logit_softcapping": 30.0},
    "dual-chunk attention": {**LLAMA, "dual_chunk_attention_config": {"chunk_size": 1024}},
    "a quantized KV cache in the checkpoint": {
        **LLAMA,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
}


def model_config(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig(str(directory))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_pass(name: str, tmp_path: Path) -> None:
    compat.check_model(model_config(tmp_path, PLAIN[name]))


@pytest.mark.parametrize("refusal", refusals.MODEL, ids=lambda refusal: refusal.flag)
def test_other_models_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    with pytest.raises(compat.Unsupported) as error:
        compat.check_model(model_config(tmp_path, OTHER[refusal.flag]))
    assert str(refusal) in str(error.value)


def test_resolved_defaults_pass(tmp_path: Path) -> None:
    """SGLang's own resolution on this machine turns no default into something that is refused."""
    model_config(tmp_path, LLAMA)
    args = ServerArgs(
        model_path=str(tmp_path), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True
    )
    args.resolve_once()
    view = resolving_view(args)
    resolved = {f.name: getattr(view, f.name) for f in msgspec.structs.fields(ServerArgs)}
    compat.check_server_args(SimpleNamespace(**resolved, eviction="vase-attnv"))


@pytest.mark.parametrize("refusal", refusals.ENVIRONMENT, ids=lambda refusal: refusal.flag)
def test_environment_variables_are_refused(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(envs, refusal.flag).name == refusal.flag
    monkeypatch.delenv(refusal.flag, raising=False)
    compat.check_environment()
    monkeypatch.setenv(refusal.flag, "vectorized_5d" if refusal.limit else "1")
    with pytest.raises(compat.Unsupported, match=refusal.flag):
        compat.check_environment()


@pytest.mark.parametrize(
    ("request_", "flag"),
    [
        (GenerateReqInput(text="a", sampling_params={"beam_width": 4}), "beam_width"),
        (SimpleNamespace(sampling_params=SamplingParams(beam_width=2)), "beam_width"),
        (GenerateReqInput(text="a", sampling_params={}, return_routed_experts=True), "return_routed_experts"),
        (GenerateReqInput(text="a", sampling_params={}, return_indexer_topk=True), "return_indexer_topk"),
    ],
)
def test_requests_are_refused(request_: Any, flag: str) -> None:
    with pytest.raises(compat.Unsupported, match=rf"^--eviction does not support {flag}.*\)$"):
        compat.check_request(request_)


@pytest.mark.parametrize("params", [{}, {"beam_width": 1}, {"beam_width": None, "n": 4}])
def test_plain_requests_pass(params: dict[str, Any]) -> None:
    compat.check_request(GenerateReqInput(text="a", sampling_params=params))
    compat.check_request(SimpleNamespace(sampling_params=SamplingParams(**params)))


def test_docs_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--markdown"]) == 0
    tables = capsys.readouterr().out
    assert tables in (ROOT / "docs" / "compatibility.md").read_text(), (
        "run python -m sgl_vase_srt.compat --markdown docs/compatibility.md"
    )


def test_docs_are_rewritten_between_the_markers(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"above\n{page.BEGIN}\nstale\n{page.END}\nbelow\n")
    assert page.main(["--markdown", str(file)]) == 0
    assert file.read_text() == f"above\n{page.markdown()}below\n"
    assert page.main([]) == 2
