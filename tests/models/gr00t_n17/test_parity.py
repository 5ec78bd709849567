"""The network against the public port of the released model on equal random weights, float32, part by part.

golden/make_parity_golden.py wrote the expected values. Attention is SDPA on both sides: with FlashAttention, upstream's
default, the backbone would round to bfloat16. Padding rows of the backbone attend to nothing; both sides and
FlashAttention give them an attention output of zero, and here it counts, because vl_self_attention masks no key. So the
features are compared on all rows, padding included.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.common.optim import OptimizerConfig, build_optimizer, decay_groups
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17

GOLDEN = Path(__file__).parent / "golden"
NORM = "backbone.model.model.language_model.norm.weight"  # not used by either side, and frozen here


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


case = load_module(GOLDEN / "parity_case.py")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "parity.safetensors")


@pytest.fixture(scope="module")
def golden_step() -> dict[str, Tensor]:
    return load_file(GOLDEN / "parity_step.safetensors")


def make_network(**changes: Any) -> GR00TN17:
    network = GR00TN17(GR00TN17Config.from_dict({**case.SIZES, **changes}))
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(case.weights(shapes))
    return network.train()


@pytest.fixture(scope="module")
def network() -> GR00TN17:
    return make_network()


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def features_of(network: GR00TN17, batch: dict[str, Tensor]) -> Any:
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
    with torch.no_grad():
        return network.backbone(*(batch[name] for name in names))


def test_the_dit_alone(network: GR00TN17, golden: dict[str, Tensor]) -> None:
    image = torch.arange(13).expand(3, -1) % 3 == 1
    valid = torch.arange(13) >= torch.tensor([[0], [2], [5]])
    with torch.no_grad():
        output = network.action_head.model(
            case.normal("dit.x", 3, 8, 24),
            torch.tensor([0, 437, 998]),
            case.normal("dit.context", 3, 13, 32),
            valid,
            image,
        )
    assert worst(output, golden["dit"]) < 1e-6


def test_the_adapter_on_the_features(network: GR00TN17, golden: dict[str, Tensor]) -> None:
    head = network.action_head
    with torch.no_grad():
        normed = head.vlln(case.normal("adapter", 2, 13, 32))
        assert worst(normed, golden["vlln"]) < 1e-6
        assert worst(head.vl_self_attention(normed), golden["adapter"]) < 1e-6


@pytest.mark.parametrize("name", list(case.BATCHES))
def test_features_of_the_backbone_on_all_rows(network: GR00TN17, golden: dict[str, Tensor], name: str) -> None:
    batch = case.batch(name)
    features, valid, image_mask = features_of(network, batch)
    assert bool(valid.all()) == (name == "plain")
    assert int(image_mask.sum()) * 4 == len(batch["pixel_values"])
    assert worst(features, golden[f"{name}.features"]) < 2e-6


@pytest.mark.parametrize("name", list(case.BATCHES))
def test_loss_with_given_noise_and_time(network: GR00TN17, golden: dict[str, Tensor], name: str) -> None:
    with torch.no_grad():
        loss = network(case.batch(name), *case.noise_and_time(name))
    assert loss.item() == pytest.approx(golden[f"{name}.loss"].item(), rel=2e-6)


@pytest.mark.parametrize("name", list(case.BATCHES))
def test_four_sampling_steps(network: GR00TN17, golden: dict[str, Tensor], name: str) -> None:
    batch = case.batch(name)
    noise, _ = case.noise_and_time(name)
    features = features_of(network, batch)
    actions = network.action_head.sample(*features, batch["state"], batch["embodiment_id"], noise)
    assert worst(actions, golden[f"{name}.sample"]) < 5e-6


def test_padding_rows_decide_the_result(network: GR00TN17) -> None:
    """What the comparison on all rows is for: other values on padding rows change the loss of valid tokens."""
    batch = case.batch("mixed")
    noise, time = case.noise_and_time("mixed")
    features, valid, image_mask = features_of(network, batch)
    rest = [batch[name] for name in ("state", "action", "action_mask", "embodiment_id")]
    other = torch.where(valid[..., None], features, -features)
    with torch.no_grad():
        first = network.action_head.loss(features, valid, image_mask, *rest, noise, time)
        second = network.action_head.loss(other, valid, image_mask, *rest, noise, time)
    assert abs(first - second).item() > 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_one_optimiser_step(golden_step: dict[str, Tensor], fused: bool) -> None:
    """Gradients, their global norm, clipping, both groups of weight decay and the update, of the whole head."""
    network = make_network()
    loss = network(case.batch("mixed"), *case.noise_and_time("mixed"))
    loss.backward()
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    assert {f"grad.{name}" for name in trained} == {name for name in golden_step if name.startswith("grad.")}
    for name, p in trained.items():
        expected = golden_step[f"grad.{name}"]
        # Biases of keys have no gradient (a softmax does not see a shift): what is there is rounding.
        assert (p.grad - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-7, name
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = build_optimizer(network, OptimizerConfig(lr=1e-3, weight_decay=0.1, fused=fused))
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    assert norm.item() == pytest.approx(golden_step["norm"].item(), rel=2e-6)
    optimizer.step()
    decay, _ = decay_groups(network)
    for name, p in trained.items():
        if name.endswith("to_k.bias"):
            continue
        expected, clipped = golden_step[f"change.{name}"], golden_step[f"grad.{name}"] / golden_step["norm"]
        difference = (p.detach() - before[name] - expected).abs()
        # Adam's first step is lr * g / (|g| + eps): where a gradient is as small as its rounding error the sign is
        # chance. Exact zeros (slots of other embodiments) show the weight decay alone.
        certain = (clipped.abs() > 1e-5) | (clipped == 0)
        assert certain.float().mean() > 0.7, name
        assert difference[certain].max() < 1e-6, name
        unused = (clipped == 0) & (before[name].abs() > 0.01)
        if unused.any():
            assert (expected[unused].abs() > 0).all() == (name in decay), name


def test_gradients_with_everything_trained(golden: dict[str, Tensor]) -> None:
    network = make_network(tune_llm=True, tune_visual=True)
    network(case.batch("mixed"), *case.noise_and_time("mixed")).backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    expected = {name.removeprefix("all."): value for name, value in golden.items() if name.startswith("all.")}
    assert set(gradients) == set(expected) - {NORM}
    for name, gradient in gradients.items():
        norm, along = expected[name]
        assert gradient.norm().item() == pytest.approx(norm.item(), rel=1e-5, abs=2e-7), name
        direction = case.normal("direction." + name, *gradient.shape)
        assert (gradient * direction).sum().item() == pytest.approx(
            along.item(), rel=1e-5, abs=1e-5 * norm.item() + 2e-7
        )
