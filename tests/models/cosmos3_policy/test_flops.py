"""FLOPs of a pack: the published figures by both countings, and PyTorch's own count of a real step."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from models.common.block_options import CheckpointingConfig
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.flops import PackShape, count_flops, recompute_flops, step_flops, upstream_flops
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed
from models.cosmos3_policy.parallelize import checkpoint_blocks
from models.cosmos3_policy.vae_flops import vae_flops

RELEASED = Cosmos3PolicyConfig()
TERA = 1e12


def droid(text: int, vision: int = 3060) -> PackShape:
    return PackShape(text=(text,), vision=(vision,), action=(33,))


@pytest.mark.parametrize(
    ("shape", "forward", "honest", "plain", "checkpointed"),
    [
        (droid(150), 51.06, 149.0, 153.2, 204.2),
        (droid(200), 51.86, 150.0, 155.6, 207.4),
        (droid(150, vision=720), 12.97, 34.7, 38.9, 51.9),
    ],
)
def test_published_figures(shape: PackShape, forward: float, honest: float, plain: float, checkpointed: float) -> None:
    """TFLOP of one sample by the framework's callback: 640x360 cameras, the same with a longer caption, 320x180."""
    counted = upstream_flops(RELEASED, shape)
    assert round(counted.forward / TERA, 2) == forward
    assert round(counted.frozen / TERA, 1) == honest
    assert round(counted.training / TERA, 1) == plain
    assert round(counted.checkpointed / TERA, 1) == checkpointed


def test_the_numerator_of_mfu_is_the_honest_figure_without_elementwise_work() -> None:
    ours, theirs = count_flops(RELEASED, droid(150)), upstream_flops(RELEASED, droid(150))
    assert round(ours.training / TERA, 2) == 148.77
    assert 0.997 < ours.training / theirs.frozen < 1
    # what upstream divides by the peak is 1.37 times that, before the video encoder
    assert round(theirs.checkpointed / ours.training, 2) == 1.37


def test_a_step_of_32_samples_on_a_rank() -> None:
    """Published: 8.00 PFLOP by upstream's count with the video encoder, 4.77 honest."""
    shape = PackShape(text=(150,) * 32, vision=(3060,) * 32, action=(33,) * 32)
    counted = upstream_flops(RELEASED, shape)
    encoder = 32 * vae_flops(33, 544, 736, upstream=True)
    assert round((counted.checkpointed + encoder) / 1e15, 2) == 8.00
    assert round(counted.frozen / 1e15, 2) == 4.77


def test_the_video_encoder() -> None:
    """46.64 TFLOP is what PyTorch counts of Diffusers' AutoencoderKLWan encoding this clip on the meta device."""
    assert vae_flops(33, 544, 736) == 46_640_495_132_672
    assert round(vae_flops(33, 544, 736, upstream=True) / TERA, 1) == 45.9
    assert round(vae_flops(33, 256, 320, upstream=True) / TERA, 1) == 9.4


def pack(config: Cosmos3PolicyConfig, texts: tuple[int, ...], *, height: int = 5, rows: int = 5) -> Packed:
    """Samples of equal shape with captions of several lengths; an odd latent height."""
    generator = torch.Generator().manual_seed(0)
    n = len(texts)
    return Packed(
        text_ids=torch.randint(config.vocab_size, (sum(texts),), generator=generator),
        text_lengths=texts,
        latents=torch.randn(n, config.latent_channel, 3, height, 6, generator=generator),
        vision_noisy=torch.arange(3).expand(n, -1) > 0,
        action=torch.randn(n, rows, config.action_dim, generator=generator),
        action_noisy=torch.arange(rows).expand(n, -1) > 0,
        sigma=torch.rand(n, generator=generator),
        fps=(15.0,) * n,
    )


def counted(run: Any) -> int:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def forward(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * sdpa_flop_count(q, k, v)

    mapping = {attention: forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return counter.get_total_flops()


@pytest.fixture
def network() -> Cosmos3Policy:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    network.init_weights(0)
    return network


def loss(network: Cosmos3Policy, packed: Packed) -> torch.Tensor:
    velocity = network(packed)
    assert isinstance(velocity.vision, torch.Tensor)
    assert isinstance(velocity.action, torch.Tensor)
    return velocity.vision.square().sum() + velocity.action.square().sum()


def test_a_real_step_runs_what_is_counted(network: Cosmos3Policy) -> None:
    packed = pack(network.config, (7, 12))
    shape = PackShape.of(packed, network.config)
    assert shape == PackShape(text=(7, 12), vision=(27, 27), action=(5, 5))
    with torch.no_grad():
        assert counted(lambda: network(packed)) == count_flops(network.config, shape).forward
    assert counted(lambda: loss(network, packed).backward()) == step_flops(network, shape)


def test_samples_of_different_shapes_count_each_by_its_own(network: Cosmos3Policy) -> None:
    short, long = pack(network.config, (7,)), pack(network.config, (9,), height=8)
    parts = [PackShape.of(part, network.config) for part in (short, long)]
    both = PackShape(text=(7, 9), vision=parts[0].vision + parts[1].vision, action=(5, 5))
    total = count_flops(network.config, both).training
    assert total == sum(count_flops(network.config, part).training for part in parts)
    assert both.vision == (27, 36)


@pytest.mark.parametrize("config", [CheckpointingConfig(mode="full"), CheckpointingConfig(mode="layers", layers=(0,))])
def test_what_recomputes_is_counted_apart(network: Cosmos3Policy, config: CheckpointingConfig) -> None:
    packed = pack(network.config, (7, 12))
    shape = PackShape.of(packed, network.config)
    assert recompute_flops(network, shape) == 0
    checkpoint_blocks(network, config)
    again = recompute_flops(network, shape)
    assert counted(lambda: loss(network, packed).backward()) == step_flops(network, shape) + again
    assert again > 0
