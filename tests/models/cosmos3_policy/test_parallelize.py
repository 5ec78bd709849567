"""Where the network is cut: what is trained, recomputed, compiled and sharded, each with equal gradients."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.mesh import bf16_policy
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed, Velocity
from models.cosmos3_policy.parallelize import (
    LENGTH_MULTIPLE,
    blocks,
    checkpoint_blocks,
    compile_network,
    shard,
    tuned_parameters,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
CONFIG = Cosmos3PolicyConfig.tiny(num_hidden_layers=3)


def make_network() -> Cosmos3Policy:
    network = Cosmos3Policy(CONFIG)
    network.init_weights(0)
    return network


def make_pack(texts: tuple[int, ...] = (5, 9), seed: int = 0) -> Packed:
    g = torch.Generator().manual_seed(seed)
    n = len(texts)
    return Packed(
        text_ids=torch.randint(256, (sum(texts),), generator=g),
        text_lengths=texts,
        latents=torch.randn(n, 4, 3, 5, 6, generator=g),
        vision_noisy=torch.tensor([[False, True, True]] * n),
        action=torch.randn(n, 9, 8, generator=g),
        action_noisy=torch.tensor([[False] + [True] * 8] * n),
        sigma=torch.rand(n, generator=g),
        domain=1,
        fps=(15.0,) * n,
    )


def loss(velocity: Velocity) -> Tensor:
    assert isinstance(velocity.vision, Tensor)
    assert isinstance(velocity.action, Tensor)
    return velocity.vision.square().mean() + velocity.action.square().mean()


def gradients(network: Cosmos3Policy, packed: Packed | None = None) -> dict[str, Tensor]:
    network.zero_grad()
    loss(network(make_pack() if packed is None else packed)).backward()
    found = {}
    for name, parameter in tuned_parameters(network).items():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=tolerance * float(gradient.abs().max()), msg=name
        )


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return gradients(make_network())


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({"mode": "full"}, (0, 1, 2)),
        ({"mode": "selective"}, (0, 1, 2)),
        ({"mode": "layers", "last_k": 2}, (1, 2)),
        ({"mode": "layers", "layers": (0,)}, (0,)),
        ({"mode": "auto", "memory_gb": 10.0}, ()),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_recomputing_layers_changes_no_gradient(
    plain: dict[str, Tensor], options: dict[str, Any], recomputed: tuple[int, ...]
) -> None:
    network = make_network()
    report = checkpoint_blocks(network, CheckpointingConfig(**options))
    assert report.blocks == {"layers": 3}
    found = gradients(network)
    assert report.recomputed.get("layers", ()) == recomputed
    assert_equal(found, plain, 0)


class Products(TorchDispatchMode):
    """Counts attention calls and products of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.attention += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def test_captions_are_not_recomputed() -> None:
    """Recomputing all layers runs the attention of the three generated passes again, that of the captions once."""
    network = make_network()
    checkpoint_blocks(network, CheckpointingConfig(mode="full"))
    packed = make_pack((5,))
    with Products() as forward:
        total = loss(network(packed))
    with Products() as backward:
        total.backward()
    assert forward.attention == 6
    assert backward.attention == 3


@pytest.mark.parametrize("mode", ["none", "layers"])
def test_compiled_layers_give_equal_gradients_with_one_graph(plain: dict[str, Tensor], mode: Any) -> None:
    """One graph for all layers of a kind, over packs whose captions differ in length."""
    network = make_network()
    if mode != "none":
        checkpoint_blocks(network, CheckpointingConfig(mode=mode, last_k=2 if mode == "layers" else None))
    config = CompileConfig(scope="blocks", on_failure="raise")
    report = compile_network(network, config, backend="aot_eager")
    assert_equal(gradients(network), plain, 1e-5)
    graphs = report.graphs
    reference = gradients(make_network(), make_pack((20, 3), seed=1))
    assert_equal(gradients(network, make_pack((20, 3), seed=1)), reference, 1e-5)
    assert report.graphs == graphs
    assert report.recompiles == 0
    assert report.failures == {}


def test_packs_of_a_compiled_network_are_padded() -> None:
    network = make_network()
    assert len(network.understand(make_pack()).keys[0]) == 14
    compile_network(network, CompileConfig(scope="none"))
    assert len(network.understand(make_pack()).keys[0]) == 14
    compile_network(network, backend="aot_eager")
    assert len(network.understand(make_pack()).keys[0]) == LENGTH_MULTIPLE


def test_the_whole_model_as_one_graph_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set compile\.scope=blocks"):
        compile_network(make_network(), CompileConfig(scope="model"))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("entry", ["forward", "generate"])
def test_only_what_is_trained_is_sharded(plain: dict[str, Tensor], mesh: Any, entry: str) -> None:
    network = make_network()
    trained = set(tuned_parameters(network))
    names = list(network.state_dict())
    shard(network, mesh)
    assert {name for name, p in network.named_parameters() if isinstance(p, DTensor)} == trained
    assert list(network.state_dict()) == names
    assert all(isinstance(layer, FSDPModule) for layer in blocks(network)["layers"])
    packed = make_pack()
    velocity = network(packed) if entry == "forward" else network.generate(packed, network.understand(packed))
    loss(velocity).backward()
    assert_equal({name: p.grad.full_tensor() for name, p in tuned_parameters(network).items()}, plain, 1e-6)


class Collectives(TorchDispatchMode):
    """Collectives of a pass by kind, and the numbers that were gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.calls[name] += 1
            if "allgather" in name:
                self.gathered += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_collectives_of_a_step_on_four_ranks(mode: Any) -> None:
    """HSDP 2x2. Captions need none; each layer is gathered once, and once more for its backward pass except the last,
    recomputing or not; nothing of the frozen tower is ever gathered."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        network = make_network()
        checkpoint_blocks(network, CheckpointingConfig(mode=mode))
        layer = sum(p.numel() for p in network.layers[0].parameters() if p.requires_grad)
        everything = sum(p.numel() for p in tuned_parameters(network).values())
        shard(network, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        packed = make_pack()
        with Collectives() as captions:
            understanding = network.understand(packed)
        with Collectives() as forward:
            velocity = network.generate(packed, understanding)
        with Collectives() as backward:
            loss(velocity).backward()
    finally:
        dist.destroy_process_group()
    assert captions.calls == {}
    assert forward.calls == {"_allgather_base_": 1 + 3}
    assert forward.gathered == everything
    assert backward.calls == {"_allgather_base_": 2, "_reduce_scatter_base_": 1 + 3, "allreduce_": 1 + 3}
    assert backward.gathered == 2 * layer


def test_levels_stay_float32_where_weights_are_gathered_in_bfloat16(mesh: Any) -> None:
    network = make_network()
    packed = make_pack()
    seen: list[Tensor] = []
    network.time_embedder.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    network(packed)
    inputs: list[Tensor] = []
    shard(network, mesh, bf16_policy())
    network.layers[0].register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        velocity = network(packed)
    assert inputs[0].dtype == torch.bfloat16
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[1], seen[0])
    loss(velocity).backward()
    assert {p.grad.dtype for p in tuned_parameters(network).values()} == {torch.float32}


def test_a_sharded_network_takes_listed_samples(mesh: Any, recwarn: pytest.WarningsRecorder) -> None:
    """Samples of different shapes; what comes back carries the hooks of sharding and may be changed in place."""
    network = make_network()
    shard(network, mesh)
    packed = make_pack()
    listed = dataclasses.replace(
        packed,
        latents=list(packed.latents),
        vision_noisy=list(packed.vision_noisy),
        action=list(packed.action),
        action_noisy=list(packed.action_noisy),
    )
    velocity = network(listed)
    sum(v.square().sum() for v in (*velocity.vision, *velocity.action)).backward()
    assert all(p.grad is not None for p in tuned_parameters(network).values())
    assert not [w for w in recwarn if "view tensor" in str(w.message)]
