"""Loading holds the network and at most one tensor beside it; what is mapped from files is the page cache's."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.gr00t_n17.checkpoint import weights
from models.gr00t_n17.checkpoint.folder import CheckpointFolder
from models.gr00t_n17.checkpoint.weights import load_weights
from models.gr00t_n17.network import GR00TN17

SLACK = 12e6  # allocator and page granularity; a second copy of any kind would be 8 times that

# Widths that make about 100 MB of a few large and many small tensors, in seconds.
WIDE: dict[str, Any] = {
    "input_embedding_dim": 384,
    "hidden_size": 256,
    "diffusion_model_cfg": {
        "num_layers": 16,
        "num_attention_heads": 8,
        "attention_head_dim": 48,
        "output_dim": 256,
        "dropout": 0.2,
    },
}


def let_go() -> None:
    """Give back what earlier tests have left: garbage that would be freed meanwhile, and memory that would be used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process that are no pages of a file."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_second_copy_of_the_weights_is_held(
    write_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    source = write_checkpoint(tmp_path, config=WIDE, shards=2)
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(source).config)
    sizes = {name: parameter.numel() * dtype.itemsize for name, parameter in network.named_parameters()}
    total, largest = sum(sizes.values()), max(sizes.values())
    assert total > 8 * SLACK
    assert largest < total / 4
    seen: list[int] = []
    copy = weights.copy

    def watched(target: torch.Tensor, value: torch.Tensor) -> None:
        seen.append(resident())
        copy(target, value)
        seen.append(resident())

    monkeypatch.setattr(weights, "copy", watched)
    let_go()
    before = resident()
    load_weights(network, source, dtypes=dict.fromkeys(sizes, dtype))
    assert len(seen) == 2 * len(sizes)
    assert max(seen) - before < total + largest + SLACK
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}


def test_no_operation_of_a_load_takes_more_than_a_tensor(write_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Counted by the allocator, what lives for the length of one operation included."""
    source = write_checkpoint(tmp_path)
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(source).config)
    let_go()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        load_weights(network, source)
    taken = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            peak = max(peak, taken)
    sizes = [parameter.numel() * parameter.element_size() for parameter in network.parameters()]
    assert sum(sizes) <= peak <= sum(sizes) + max(sizes)
