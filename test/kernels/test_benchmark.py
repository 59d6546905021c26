"""The kernel benchmark's floors, and what it says where there is no GPU."""

import pytest
import torch

from benchmark.kernels import run as kernels


def test_floor_of_a_round():
    """604 MB of keys and values for Qwen3-4B at T 4096, 16-bit; everything grows with the requests due."""
    one = kernels.floors(kernels.MODELS["Qwen3-4B"], 4096, 1)
    assert one["value_magnitude"] == 36 * 8 * 4096 * (128 * 2 + 4)
    assert one["round: vase-dkv"] == 2 * 36 * 8 * 4096 * 128 * 2 + one["compact"]
    assert one["compact (order kept)"] == 2 * 2 * 36 * 8 * 4096 * 128 * 2
    assert kernels.floors(kernels.MODELS["Qwen3-4B"], 4096, 256) == {name: 256 * size for name, size in one.items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_without_a_gpu(capsys):
    assert kernels.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--budgets", "64"], ["--models", "Qwen9"], ["--due", "0"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        kernels.main(arguments)
    assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err
