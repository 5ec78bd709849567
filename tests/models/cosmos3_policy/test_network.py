"""The network against Diffusers' class on equal random weights, float32, and samples of a pack among themselves.

golden/make_parity_golden.py wrote the expected values, one sample at a time: that class knows no packs.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed, Velocity

GOLDEN = Path(__file__).parent / "golden"


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cosmos3_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


case = load_module(GOLDEN / "parity_case.py")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "parity.safetensors")


@pytest.fixture
def network() -> Cosmos3Policy:
    network = Cosmos3Policy(Cosmos3PolicyConfig.from_dict(case.SIZES))
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(case.weights(shapes))
    return network


def pack(*samples: Any, **changes: Any) -> Packed:
    with_actions = all(sample.rows for sample in samples)
    values: dict[str, Any] = {
        "text_ids": torch.cat([sample.text_ids() for sample in samples]),
        "text_lengths": tuple(sample.text for sample in samples),
        "latents": [sample.latents() for sample in samples],
        "vision_noisy": [sample.vision_noisy() for sample in samples],
        "sigma": torch.tensor([sample.sigma for sample in samples]),
        "fps": tuple(sample.fps for sample in samples),
    }
    if with_actions:
        values |= {
            "action": [sample.action() for sample in samples],
            "action_noisy": [sample.action_noisy() for sample in samples],
            "action_start": tuple(sample.start for sample in samples),
            "domain": torch.tensor([sample.domain for sample in samples]),
        }
    return Packed(**{**values, **changes})


def loss(velocity: Velocity, samples: tuple[Any, ...]) -> Tensor:
    total = torch.zeros(())
    for i, sample in enumerate(samples):
        total = total + (velocity.vision[i] * case.values(sample.name + "/d_vision", velocity.vision[i].shape)).sum()
        if velocity.action is not None:
            weight = case.values(sample.name + "/d_action", velocity.action[i].shape)
            total = total + (velocity.action[i] * weight).sum()
    return total


@pytest.mark.parametrize(
    "samples",
    [(case.POLICY,), (case.COMMANDS,), (case.VIDEO,), (case.POLICY, case.COMMANDS), (case.COMMANDS, case.POLICY)],
    ids=lambda samples: "+".join(sample.name for sample in samples),
)
def test_outputs_equal_the_library(network: Cosmos3Policy, golden: dict[str, Tensor], samples: tuple[Any, ...]) -> None:
    velocity = network(pack(*samples))
    for i, sample in enumerate(samples):
        assert velocity.vision[i].shape == golden[f"{sample.name}/vision"].shape
        torch.testing.assert_close(velocity.vision[i], golden[f"{sample.name}/vision"], rtol=0, atol=1e-5)
        if sample.rows:
            torch.testing.assert_close(velocity.action[i], golden[f"{sample.name}/action"], rtol=0, atol=1e-5)
    assert (velocity.action is None) == (samples == (case.VIDEO,))


@pytest.mark.parametrize("kind", ["gradient", "pack_gradient"])
def test_gradients_equal_the_library(network: Cosmos3Policy, golden: dict[str, Tensor], kind: str) -> None:
    samples = (case.POLICY,) if kind == "gradient" else (case.POLICY, case.COMMANDS)
    loss(network(pack(*samples)), samples).backward()
    expected = {name.partition("/")[2]: g for name, g in golden.items() if name.startswith(f"{kind}/")}
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert set(found) == set(expected) == {name for name, p in network.named_parameters() if p.requires_grad}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_input_tokens_equal_the_library(network: Cosmos3Policy, golden: dict[str, Tensor]) -> None:
    """Clean tokens get no noise level, noisy ones theirs; what enters the first layer says so."""
    inputs: list[Tensor] = []
    network.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    network(pack(case.POLICY, case.COMMANDS))
    expected = torch.cat([golden["policy/tokens"], golden["commands/tokens"]])
    torch.testing.assert_close(inputs[0], expected, rtol=0, atol=1e-5)


def test_stacked_samples_equal_listed_ones(network: Cosmos3Policy) -> None:
    """Equal shapes may come as tensors; texts still differ in length."""
    other = dataclasses.replace(case.POLICY, name="other", text=11, sigma=0.4, fps=10.0, start=1, domain=3)
    listed = pack(case.POLICY, other)
    names = ("latents", "vision_noisy", "action", "action_noisy")
    stacked = dataclasses.replace(listed, **{name: torch.stack(getattr(listed, name)) for name in names})
    a, b = network(listed), network(stacked)
    assert isinstance(b.vision, Tensor)
    assert isinstance(b.action, Tensor)
    torch.testing.assert_close(b.vision, torch.stack(a.vision), rtol=0, atol=1e-6)
    torch.testing.assert_close(b.action, torch.stack(a.action), rtol=0, atol=1e-6)


def test_one_domain_for_all_may_be_a_number(network: Cosmos3Policy) -> None:
    by_sample = network(pack(case.POLICY, dataclasses.replace(case.COMMANDS, domain=2)))
    by_number = network(pack(case.POLICY, case.COMMANDS, domain=2))
    for a, b in zip(by_sample.action, by_number.action, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)


class Reads(TorchDispatchMode):
    """Operations that wait for the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.operations += 1
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
def test_a_pass_reads_no_value_of_a_tensor(network: Cosmos3Policy, attention: Any) -> None:
    """On a GPU each of these would wait for the device."""
    network.attention = attention
    samples = (case.POLICY, case.COMMANDS)
    packed = pack(*samples)
    with Reads() as reads:
        velocity = network(packed)
        sum(v.sum() for v in (*velocity.vision, *velocity.action)).backward()
    assert reads.operations > 100
    assert reads.found == []


def test_samples_of_a_pack_do_not_see_each_other(network: Cosmos3Policy) -> None:
    """Bit for bit: whatever the others hold, a sample's result and gradients stay."""
    changed = dataclasses.replace(case.COMMANDS, name="changed", sigma=0.8, domain=3, fps=30.0)
    first, second = network(pack(case.POLICY, case.COMMANDS)), network(pack(case.POLICY, changed))
    assert torch.equal(first.vision[0], second.vision[0])
    assert torch.equal(first.action[0], second.action[0])
    assert not torch.equal(first.vision[1], second.vision[1])
    packed = pack(case.POLICY, case.COMMANDS)
    for tensor in (*packed.latents, *packed.action):
        tensor.requires_grad_()
    velocity = network(packed)
    (velocity.vision[0].sum() + velocity.action[0].sum()).backward()
    assert packed.latents[0].grad.abs().min() > 0
    for other in (packed.latents[1].grad, packed.action[1].grad):
        assert torch.count_nonzero(other) == 0


def test_clean_positions_come_back_as_zeros(network: Cosmos3Policy) -> None:
    velocity = network(pack(case.POLICY, case.COMMANDS))
    for i, sample in enumerate((case.POLICY, case.COMMANDS)):
        assert velocity.vision[i].shape == (case.SIZES["latent_channel"], *sample.grid)
        for frame, noisy in enumerate(sample.vision_noisy().tolist()):
            assert bool(velocity.vision[i][:, frame].any()) == noisy
        for row, noisy in enumerate(sample.action_noisy().tolist()):
            assert bool(velocity.action[i][row].any()) == noisy


def test_halves_make_the_whole(network: Cosmos3Policy) -> None:
    """The captions can be run ahead: they do not depend on noise, and keep nothing for a backward pass."""
    packed = pack(case.POLICY, case.COMMANDS)
    understanding = network.understand(packed)
    assert not any(tensor.requires_grad for tensor in (*understanding.keys, *understanding.values))
    halves = network.generate(dataclasses.replace(packed), understanding)
    whole = network(packed)
    assert all(torch.equal(a, b) for a, b in zip(halves.vision, whole.vision, strict=True))


def test_padding_of_the_text_changes_nothing(network: Cosmos3Policy) -> None:
    packed = pack(case.POLICY, case.COMMANDS)
    padded = dataclasses.replace(packed, text_ids=torch.cat([packed.text_ids, torch.zeros(9, dtype=torch.int64)]))
    a, b = network(packed), network(padded)
    for x, y in zip((*a.vision, *a.action), (*b.vision, *b.action), strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=1e-6)


def test_every_trained_parameter_gets_a_gradient_without_actions(network: Cosmos3Policy) -> None:
    """Ranks without actions reduce the same set of gradients as those with."""
    sum(v.sum() for v in network(pack(case.VIDEO)).vision).backward()
    missing = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    assert not network.action_proj_in.fc.weight.grad.any()


def test_bfloat16_keeps_positions_and_levels_in_float32(network: Cosmos3Policy) -> None:
    """Under autocast the stream is bfloat16; a rotary table of bfloat16 would be off by whole turns."""
    packed = pack(case.POLICY, case.COMMANDS)
    exact = network(packed)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(packed)
    inputs: list[Tensor] = []
    network.layers[1].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        network(packed)
    assert inputs[0].dtype == torch.bfloat16
    for a, b in zip((*exact.vision, *exact.action), (*rounded.vision, *rounded.action), strict=True):
        assert b.dtype == torch.float32
        assert (a - b).norm() < 0.03 * a.norm()


def test_fresh_weights_are_a_function_of_the_seed() -> None:
    def made(seed: int) -> dict[str, Tensor]:
        network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
        network.init_weights(seed)
        return network.state_dict()

    a, b, c = made(0), made(0), made(1)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["action_proj_in.fc.weight"], c["action_proj_in.fc.weight"])
    heads = a["action_proj_in.fc.weight"]
    assert heads.std() == pytest.approx(8**-0.5, rel=0.05)
    assert heads.abs().max() <= 3 * 8**-0.5
