"""A small random Qwen3 model with 8 query and 4 KV heads, which tensor parallelism can split.

Its head is not tied to its embedding and its weights are large: then its greedy text follows every token that it
attends to. Tied, it would repeat one token whatever the cache holds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def build(out: Path, tokenizer: Path, seed: int = 0) -> None:
    """Write the model to ``out`` with the tokenizer files of the model in ``tokenizer``."""
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
