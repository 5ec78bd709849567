"""Ten steps of the plain network, and the same steps with blocks that are compiled and recompute.

Dropout acts, so that a recomputation that draws anew would show. The compiler's graphs run as they are (`aot_eager`):
what it makes of them is `test_compiled_kernels.py`'s.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import (
    checkpoint_blocks,
    compile_network,
    gradient_blocks,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
STEPS = 10
IDS = [0, 1, 3, 5, 5, 5, 5, 4, 20, 21, 2]
SIZES: dict[str, Any] = {
    "diffusion_model_cfg": {"num_layers": 3, "dropout": 0.2},
    "vl_self_attention_cfg": {"dropout": 0.2},
    "state_dropout_prob": 0.2,
}
ALL_TUNED = SIZES
HEAD_TUNED = SIZES | {"tune_llm": False, "tune_visual": False, "backbone": {"vision": {"depth": 1}}}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "layers": {"mode": "layers", "layers": [0]},
    "auto": {"mode": "auto", "memory_gb": 5e-4},
}


def make(config: dict[str, Any]) -> GR00TN17:
    network = GR00TN17(GR00TN17Config.tiny(**config))
    network.init_weights(0)
    return network


def loss_of(network: GR00TN17, step: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(step)
    config, batch = network.config, 2
    inputs = {
        "input_ids": torch.tensor([IDS] * batch),
        "attention_mask": torch.tensor([[0] + [1] * (len(IDS) - 1)] * batch),
        "pixel_values": torch.randn(16 * batch, 1536, generator=g),
        "image_grid_thw": [[1, 4, 4]] * batch,
        "state": torch.randn(batch, 1, config.max_state_dim, generator=g),
        "action": torch.randn(batch, config.action_horizon, config.max_action_dim, generator=g),
        "action_mask": torch.ones(batch, config.action_horizon, config.max_action_dim),
        "embodiment_id": 1,
    }
    noise = torch.randn(batch, config.action_horizon, config.max_action_dim, generator=g)
    torch.manual_seed(1000 + step)
    return network(inputs, noise, torch.rand(batch, generator=g))


def train(network: GR00TN17) -> tuple[Tensor, list[Tensor]]:
    """Losses [STEPS] and the gradients of the first step."""
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    losses, first = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(network, step)
        loss.backward()
        first = first or [p.grad.clone() for p in network.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), first


@pytest.mark.parametrize("config", [ALL_TUNED, HEAD_TUNED], ids=["all", "head"])
def test_checkpointed_steps_are_bit_equal(config: dict[str, Any]) -> None:
    losses, gradients = train(make(config))
    assert losses.unique().numel() == STEPS
    for name, values in CHECKPOINTING.items():
        network = make(config)
        names = list(network.state_dict())
        report = checkpoint_blocks(network, CheckpointingConfig(**values))
        assert list(network.state_dict()) == names
        others, first = train(network)
        assert torch.equal(others, losses), name
        assert all(torch.equal(a, b) for a, b in zip(first, gradients, strict=True)), name
        kept = sum(report.blocks.values()) - sum(map(len, report.recomputed.values()))
        assert (kept > 0) == (name in ("none", "layers", "auto")), name
        assert bool(report.recomputed) == (name != "none")


def test_compiled_steps_with_every_checkpointing_equal_the_plain_ones() -> None:
    losses, gradients = train(make(HEAD_TUNED))
    graphs = []
    for name, values in CHECKPOINTING.items():  # without a reset between: what fits is shared, what does not is noticed
        network = make(HEAD_TUNED)
        names = list(network.state_dict())
        checkpoint_blocks(network, CheckpointingConfig(**values))
        report = compile_network(network, CompileConfig(scope="blocks", on_failure="raise"), backend="aot_eager")
        assert list(network.state_dict()) == names
        others, first = train(network)
        torch.testing.assert_close(others, losses, rtol=1e-5, atol=0, msg=name)
        for a, b in zip(first, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7, msg=name)
        assert len(report.units) == 7
        assert (report.recompiles, report.failures) == (0, {})
        graphs.append(report.graphs)
    assert graphs[0] > 0
    assert sum(graphs[1:]) > 0


def kept_bytes(network: GR00TN17) -> int:
    """What autograd keeps at the end of a forward pass, weights excluded, by storage."""
    weights = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert loss_of(network).requires_grad
    return sum(kept.values())


def test_kept_bytes_fall_with_every_block_that_recomputes() -> None:
    measured = [kept_bytes(make(HEAD_TUNED))]
    for k in (1, 2, 3):
        network = make(HEAD_TUNED)
        checkpoint_blocks(network, CheckpointingConfig(mode="layers", last_k=k, parts=("dit",)))
        measured.append(kept_bytes(network))
    assert measured == sorted(set(measured), reverse=True)
    # All blocks of the head: what is left are their inputs and what stands outside of the blocks.
    network = make(HEAD_TUNED)
    checkpoint_blocks(network, CheckpointingConfig(mode="full"))
    assert kept_bytes(network) < 0.4 * measured[0]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_auto_needs_what_it_says(share: float) -> None:
    """`memory_gb` is about blocks; what the rest of the head keeps is the same in every choice."""
    network = make(ALL_TUNED)
    total = sum(map(len, gradient_blocks(network).values()))
    everything = kept_bytes(network)
    network = make(ALL_TUNED)
    full = checkpoint_blocks(network, CheckpointingConfig(mode="full"), example=lambda: loss_of(network))
    assert full.saved_bytes is not None
    rest = kept_bytes(network) - full.saved_bytes
    budget = share * (everything - rest)
    chosen = make(ALL_TUNED)
    report = checkpoint_blocks(
        chosen, CheckpointingConfig(mode="auto", memory_gb=budget / 1e9), example=lambda: loss_of(chosen)
    )
    need = kept_bytes(chosen) - rest
    assert report.saved_bytes == pytest.approx(need, rel=0.1)
    assert report.peak_bytes is not None
    assert report.peak_bytes <= budget
    recomputed = sum(map(len, report.recomputed.values()))
    assert 0 < recomputed < total
