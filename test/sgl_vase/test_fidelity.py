"""The fidelity benchmark on a random model of two layers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmark.common import pages
from benchmark.fidelity import run as fidelity

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a checkpoint and a text of 200 one-word tokens."""
    directory = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (50, 48)}
    for layer in ("model.layers.0", "model.layers.1"):
        for name, shape in {"q": (48, 48), "k": (16, 48), "v": (16, 48), "o": (48, 48)}.items():
            shapes[f"{layer}.self_attn.{name}_proj"] = shape
        for name, shape in {"gate": (64, 48), "up": (64, 48), "down": (48, 64)}.items():
            shapes[f"{layer}.mlp.{name}_proj"] = shape
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        for norm in (name, name.replace("0", "1")):
            weights[f"model.{norm}.weight"] = torch.ones(48)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = torch.randint(50, (200,), generator=generator).tolist()
    (directory / "text").write_text(" ".join(f"w{i}" for i in ids))
    return directory


def run(model, *arguments: str) -> tuple[int, dict]:
    out = model / "out.json"
    paths = ["--model", str(model), "--text", str(model / "text"), "--json", str(out)]
    status = fidelity.main([*paths, "--tokens", "200", "--buffer", "8", *arguments])
    return status, json.loads(out.read_text()) if status == 0 else {}


def test_logits_are_those_of_transformers(model):
    """Fed in two pieces, against the whole at once."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ours = fidelity.Llama(model)
    ids = torch.tensor(ours.tokenizer.encode((model / "text").read_text()).ids[:40])
    cache = fidelity.Cache(ours, 40)
    with torch.inference_mode():
        first = ours.logits(ids[:25], 0, cache)
        cache.grow(25, 25)
        got = torch.cat([first, ours.logits(ids[25:], 25, cache)])
        torch.testing.assert_close(got, reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_every_policy_is_measured_and_a_roomy_budget_costs_nothing(model):
    """Rounds come every ``buffer`` tokens once ``T + B`` is reached; nothing differs before the first."""
    policies = "vase,vase-dkv,h2o,random:sinks=false,r-kv:variant=r-kv:lam=0.25"
    status, out = run(model, "--budgets", "24,96,200", "--policies", policies)
    assert status == 0
    full, *results = out["results"]
    assert (full["policy"], full["kl"], full["rounds"]) == ("full cache", 0.0, 0)
    assert [r["policy"] for r in results[::3]] == policies.split(",")
    for tight, medium, roomy in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert [r["rounds"] for r in (tight, medium, roomy)] == [(200 - 24) // 8, (200 - 96) // 8, 0]
        assert (roomy["kl"], roomy["nll"]) == (0.0, full["nll"])
        assert tight["kl"] > medium["kl"] > 0
        assert tight["nll"] != medium["nll"] != full["nll"]


def test_seeds_and_options_matter(model):
    first, again, other = (
        run(model, "--budgets", "24", "--policies", "random", "--seed", seed)[1]["results"][1]["kl"] for seed in "001"
    )
    assert first == again != other
    options = run(model, "--budgets", "24", "--policies", "vase,vase:sampling=false,vase:magnitude=l2:pool_width=1")[1]
    assert len({r["kl"] for r in options["results"]}) == 4


def test_the_docs_are_rewritten_between_the_marks(model, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{fidelity.BEGIN}\nold\n{pages.END}\nafter\n")
    assert run(model, "--budgets", "96,24", "--policies", "snapkv", "--docs", str(page))[0] == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| policy | KL at 96 | KL at 24 | NLL at 96 | NLL at 24 |" in text
    assert "| `snapkv` | 0." in text and "tokens 200, buffer 8, seed 0." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "vase", "--budgets", "24.5"], "--budgets must be whole numbers"),
        (["--policies", "vase", "--budgets", "8"], "--eviction-budget must be >= 9, got 8"),
        (["--policies", "vases"], "--eviction must be one of"),
        (["--policies", "vase:sinks"], "--policies: option 'sinks' of vase needs a value"),
        (["--policies", "vase:sinks=perhaps"], "option sinks must be true or false, got 'perhaps'"),
        (["--policies", "vase", "--tokens", "1"], "--tokens must be >= 2, got 1"),
        (["--policies", "vase", "--tokens", "201"], "--text has 200 tokens, --tokens asks for 201"),
        (["--policies", "vase", "--text", "missing"], "No such file"),
    ],
)
def test_bad_arguments_are_named(model, capsys, arguments, message):
    assert run(model, *arguments)[0] == 2
    assert message in capsys.readouterr().err


def test_other_models_are_refused(model, tmp_path):
    for change in ({"architectures": ["Qwen3ForCausalLM"]}, {"rope_scaling": {"factor": 2}}, {"attention_bias": True}):
        for name in ("model.safetensors", "tokenizer.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
        with pytest.raises(fidelity.InputError, match="--model"):
            fidelity.Llama(tmp_path)
    with pytest.raises(fidelity.InputError, match="No such file"):
        fidelity.Llama(tmp_path / "missing")
