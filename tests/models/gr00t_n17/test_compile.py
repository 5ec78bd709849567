"""Compiled steps: one graph for backbone and head, equal results, and no new graph while prompts stay in a bucket."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.text import PromptBuilder, WordTokenizer
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import compile_network

TEXTS = ["pick red", "pick up the red block", "pick up the red block and put it there", "put it", "pick it up"]
CONFIG = GR00TN17Config.tiny(
    tune_llm=False,
    tune_visual=False,
    backbone={"vision": {"depth": 1}},
    diffusion_model_cfg={"num_layers": 3, "dropout": 0.2},
    vl_self_attention_cfg={"dropout": 0.2},
    state_dropout_prob=0.2,
)


@pytest.fixture(autouse=True)
def _counted_anew(fresh_compiler: None) -> None:
    counters.clear()


def make_inputs(step: int, multiple: int) -> dict[str, Any]:
    """Two samples of two images whose texts change their length from step to step."""
    texts = [TEXTS[step % len(TEXTS)], TEXTS[(2 * step + 3) % len(TEXTS)]]
    tokenizer = WordTokenizer.from_texts(TEXTS, backbone=CONFIG.backbone)
    prompts = PromptBuilder(tokenizer, CONFIG.backbone, formalize_language=True)
    input_ids, attention_mask = prompts.batch(texts, [4, 6], multiple=multiple)
    g = torch.Generator().manual_seed(step)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "pixel_values": torch.rand(2 * (16 + 24), 1536, generator=g) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]] * 2),
        "state": torch.randn(2, 1, 32, generator=g),
        "action": torch.randn(2, 16, 32, generator=g),
        "action_mask": torch.ones(2, 16, 32),
        "embodiment_id": 1,
    }


def step_of(network: GR00TN17, step: int, multiple: int) -> tuple[Tensor, list[Tensor]]:
    network.zero_grad()
    torch.manual_seed(step)
    noise, time = torch.randn(2, 16, 32), torch.rand(2)
    loss = network(make_inputs(step, multiple), noise, time)
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters() if p.grad is not None]


def test_no_recompile_over_text_lengths_of_a_bucket_and_equal_steps() -> None:
    network = GR00TN17(CONFIG)
    network.init_weights(0)
    lengths = {int(make_inputs(step, 1)["input_ids"].shape[1]) for step in range(5)}
    assert len(lengths) >= 3
    assert {make_inputs(step, 32)["input_ids"].shape for step in range(5)} == {(2, 32)}
    plain = [step_of(network, step, 32) for step in range(5)]
    compile_network(network, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = [step_of(network, step, 32) for step in range(5)]
    assert counters["stats"]["unique_graphs"] == 2  # backbone and head
    assert not counters["graph_break"]
    for (loss, gradients), (other, others) in zip(plain, compiled, strict=True):
        assert torch.equal(loss, other)
        assert len(gradients) == len(others) > 0
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    # Without buckets the very next length is a new graph, which is what the test above would see.
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(RecompileError):
        step_of(network, 2, 1)


def test_names_of_a_compiled_network_stay() -> None:
    network = GR00TN17(CONFIG)
    names = list(network.state_dict())
    compile_network(network, backend="eager")
    assert list(network.state_dict()) == names
