"""Validation of the Cosmos-3 policy: the training's loss without its random parts, the same for any batch size."""

from typing import Any

import numpy as np
import pytest
import torch

from knonik import Batch
from models.common import draws
from models.common.held_out import sample_keys
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.inputs.processor import Cosmos3Processor, ProcessorConfig
from models.cosmos3_policy.module import Cosmos3PolicyModule
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.objective import ObjectiveConfig
from models.cosmos3_policy.policy import Policy
from models.cosmos3_policy.validation import Validation, error_sums

SAMPLES, HORIZON = 5, 4
CAMERAS = ("wrist", "left", "right")
TEXTS = ("pick up the red block", "open the drawer")
OBJECTIVE = ObjectiveConfig(shift=3.0, vision_weight=2.0, action_weight=5.0)


class Encoder:
    """In the place of the VAE: means of 16 x 16 pixels, the mean of the colours as the fourth channel."""

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        means = torch.nn.functional.avg_pool3d(video[:, :, ::4].float() / 127.5 - 1.0, (1, 16, 16))
        return torch.cat([means, means.mean(dim=1, keepdim=True)], dim=1)

    def flops(self, frames: int, height: int, width: int, *, upstream: bool = False) -> int:
        return frames * height * width


@pytest.fixture(scope="module")
def processor() -> Cosmos3Processor:
    return Cosmos3Processor.for_dataset(
        Cosmos3PolicyConfig.tiny(),
        ProcessorConfig(tier="fit", horizon=HORIZON, tokenizer="words", caption_dropout=0.9, domain=2),
        cameras=CAMERAS,
        state={"arm": 3, "hand": 1},
        action={"arm": 3, "hand": 1},
        texts=TEXTS,
        image_size=(32, 64),
    )


@pytest.fixture
def module() -> Cosmos3PolicyModule:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    network.init_weights(0)
    options: dict[str, Any] = {"optimizer": {"lr": 1e-3}, "schedule": {"max_steps": 4, "warmup_steps": 0}}
    seed = draws.stream_key(7, "validation")  # that of the noise which the validation draws
    return Cosmos3PolicyModule(network, Encoder(), seed=seed, objective=OBJECTIVE, **options)


def batch(indices: list[int], processor: Cosmos3Processor, frames: int = HORIZON + 1) -> Batch:
    """Samples by number, whatever batch they are in; `position` counts within it."""
    generators = [np.random.default_rng(index) for index in indices]

    def floats(*shape: int) -> torch.Tensor:
        return torch.stack([torch.from_numpy(g.normal(size=shape).astype(np.float32)) for g in generators])

    images = {
        camera: torch.stack(
            [torch.from_numpy(g.integers(0, 256, (HORIZON + 1, 32, 64, 3), dtype=np.uint8)) for g in generators]
        )[:, :frames]
        for camera in CAMERAS
    }
    pad = torch.zeros(len(indices), HORIZON, dtype=torch.bool)
    pad[:, 2:] = torch.tensor([index % 2 for index in indices]).bool()[:, None]  # some episodes end within the chunk
    made = Batch(
        images=images,
        state={"arm": floats(1, 3), "hand": floats(1, 1)},
        action={"arm": floats(HORIZON, 3), "hand": floats(HORIZON, 1)},
        action_is_pad=pad,
        text=[TEXTS[index % 2] for index in indices],
        dataset=torch.zeros(len(indices), dtype=torch.int64),
        episode=torch.tensor([index // 2 for index in indices]),
        frame=torch.tensor([index % 2 for index in indices]),
        position=torch.tensor(indices) if frames == 1 else torch.arange(len(indices)),
    )
    prepared = {} if frames == 1 else processor.prepare(made, augment=False)
    return Batch(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, "inputs": prepared})


def batches(processor: Cosmos3Processor, size: int, frames: int = HORIZON + 1) -> list[Batch]:
    numbers = list(range(SAMPLES))
    return [batch(numbers[start : start + size], processor, frames) for start in range(0, SAMPLES, size)]


def validation(processor: Cosmos3Processor, size: int) -> Validation:
    return Validation(
        processor,
        seed=7,
        objective=OBJECTIVE,
        loss_batches=batches(processor, size),
        open_loop_batches=batches(processor, size, frames=1),
    )


def test_the_figures_depend_on_weights_and_samples_alone(
    module: Cosmos3PolicyModule, processor: Cosmos3Processor
) -> None:
    network = module.train().network
    modes = [part.training for part in network.modules()]
    first = module.held_out_figures(validation(processor, 2))
    torch.manual_seed(3)
    assert module.held_out_figures(validation(processor, 2)) == first
    assert [part.training for part in network.modules()] == modes
    assert set(first) == {
        "val/loss", "val/loss/vision", "val/loss/action", "val/action_mse", "val/action_mae",
        "val/action_mse/arm", "val/action_mae/arm", "val/action_mse/hand", "val/action_mae/hand",
    }  # fmt: skip
    assert first["val/loss"] == pytest.approx(2 * first["val/loss/vision"] + 5 * first["val/loss/action"], rel=1e-9)
    assert first["val/action_mse"] == pytest.approx(
        0.75 * first["val/action_mse/arm"] + 0.25 * first["val/action_mse/hand"], rel=1e-9
    )
    for size in (1, SAMPLES):
        assert module.held_out_figures(validation(processor, size)) == pytest.approx(first, rel=1e-5), size
    with torch.no_grad():
        network.action_proj_out.fc.weight.mul_(1.5)
    assert module.held_out_figures(validation(processor, 2))["val/loss"] != pytest.approx(first["val/loss"], rel=1e-4)


def test_the_loss_is_that_of_training_without_its_random_parts(
    module: Cosmos3PolicyModule, processor: Cosmos3Processor
) -> None:
    """The module's own step on the same samples, given the noise of the validation by its seed and positions."""
    (whole,) = batches(processor, SAMPLES)
    assert "augmentations" not in whole.inputs
    assert min(whole.inputs["text_lengths"]) > len(processor.empty_prompts(1)[0])  # no caption is dropped
    inputs = {**processor.to_network(whole, augment=False), "position": sample_keys(whole)}
    with torch.no_grad():
        mean, _, parts = module.micro_batch_loss(inputs)
    found = module.held_out_figures(Validation(processor, seed=7, objective=OBJECTIVE, loss_batches=[whole]))
    assert set(found) == {"val/loss", "val/loss/vision", "val/loss/action"}
    assert found["val/loss"] == pytest.approx(float(mean), rel=1e-5)
    assert found["val/loss/vision"] == pytest.approx(float(parts["vision"]), rel=1e-5)


def test_steps_behind_the_end_of_an_episode_are_left_out(processor: Cosmos3Processor) -> None:
    class HalfOff(Policy):
        def __init__(self) -> None:
            self.processor = processor

        def act(self, images: Any, state: Any, text: Any, *, keys: Any = None) -> dict[str, np.ndarray]:
            recorded = batch([int(key) for key in keys], processor, 1)
            off = {"arm": 0.5, "hand": 0.0}
            chunk = {name: recorded.action[name].numpy() + off[name] for name in off}
            for name in chunk:
                chunk[name][recorded.action_is_pad.numpy()] = 1e6
            return chunk

    sums, predictions = error_sums(HalfOff(), batches(processor, 2, frames=1), steps=3)
    assert predictions == SAMPLES
    steps = 3 * 3 + 2 * 2  # three episodes go on, two end after two steps
    np.testing.assert_allclose(sums, [[0.25 * 3 * steps, 0.5 * 3 * steps, 3 * steps], [0, 0, steps]], rtol=1e-5)
