"""The policy around network, encoder and processor: what is given stays, what is asked comes back in robot units."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.common.observation import Observation
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.inputs.processor import Cosmos3Processor, ProcessorConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed, Velocity
from models.cosmos3_policy.policy import Policy
from models.cosmos3_policy.sampler import Sampling, told

CAMERAS = ("wrist", "left", "right")
HORIZON, ROBOTS = 8, 3
TEXTS = ["pick up the red block", "open the drawer", "pick up the red block"]


class Encoder:
    """In the place of the VAE: means of 16 x 16 pixels, the mean of the colours as the fourth channel."""

    def encode(self, video: Tensor) -> Tensor:
        assert video.dtype == torch.uint8
        assert video.shape[2] == 1, "only the frame of now is there"
        means = torch.nn.functional.avg_pool3d(video.float() / 127.5 - 1.0, (1, 16, 16))
        return torch.cat([means, means.mean(dim=1, keepdim=True)], dim=1)


@pytest.fixture(scope="module")
def processor() -> Cosmos3Processor:
    settings = ProcessorConfig(
        tier="fit", horizon=HORIZON, tokenizer="words", gripper=("action[3]", "state[3]"), domain=2
    )
    return Cosmos3Processor.for_dataset(
        Cosmos3PolicyConfig.tiny(),
        settings,
        cameras=CAMERAS,
        state={"state": 4},
        action={"action": 4},
        texts=sorted(set(TEXTS)),
        image_size=(32, 64),
    )


@pytest.fixture(scope="module")
def network() -> Cosmos3Policy:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    network.init_weights(0)
    return network


def seen(robots: int = ROBOTS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = {c: torch.randint(256, (ROBOTS, 32, 64, 3), dtype=torch.uint8, generator=generator) for c in CAMERAS}
    state = {"state": torch.rand(ROBOTS, 4, generator=generator)}
    return {c: image[:robots] for c, image in images.items()}, {"state": state["state"][:robots]}


def moment(robots: int = ROBOTS) -> Observation:
    images, state = seen(robots)
    return Observation(
        images={camera: value.unsqueeze(1) for camera, value in images.items()},
        state={name: value.unsqueeze(1) for name, value in state.items()},
        text=TEXTS[:robots],
        position=torch.arange(robots),
    )


def test_chunks_are_in_robot_units(network: Cosmos3Policy, processor: Cosmos3Processor) -> None:
    policy = Policy(network, Encoder(), processor)
    images, state = seen()
    chunk = policy.act(images, state, TEXTS)
    assert chunk["action"].shape == (ROBOTS, HORIZON, 4)
    assert chunk["action"].dtype == np.float32
    rows, latents = policy.imagine(moment())
    np.testing.assert_allclose(chunk["action"][..., :3], rows[..., :3], rtol=1e-6)
    np.testing.assert_allclose(chunk["action"][..., 3], 1.0 - rows[..., 3], rtol=1e-6)  # grippers are turned back
    assert latents.shape == (ROBOTS, 4, 1 + HORIZON // 4, 3, 4)
    assert float(rows[..., 4:].abs().max()) == 0.0
    numpy_images = {camera: value.numpy() for camera, value in images.items()}
    policy.reset()
    again = policy.act(numpy_images, {"state": state["state"].numpy()}, TEXTS)
    np.testing.assert_array_equal(again["action"], chunk["action"])


def test_noise_follows_seed_and_key(network: Cosmos3Policy, processor: Cosmos3Processor) -> None:
    policy = Policy(network, Encoder(), processor)
    images, state = seen()
    first, second = policy.act(images, state, TEXTS)["action"], policy.act(images, state, TEXTS)["action"]
    assert np.abs(first - second).max() > 1e-3
    named = policy.act(images, state, TEXTS, keys=torch.arange(ROBOTS))["action"]
    np.testing.assert_array_equal(named, first)
    other = Policy(network, Encoder(), processor, seed=1).act(images, state, TEXTS)["action"]
    assert np.abs(other - first).max() > 1e-3


def test_a_robot_does_not_see_the_others(network: Cosmos3Policy, processor: Cosmos3Processor) -> None:
    policy = Policy(network, Encoder(), processor)
    together, _ = policy.imagine(moment())
    alone, _ = policy.imagine(moment(1))
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-5)


def test_text_image_and_state_matter(network: Cosmos3Policy, processor: Cosmos3Processor) -> None:
    policy, now = Policy(network, Encoder(), processor), moment()
    rows, _ = policy.imagine(now)
    changes: dict[str, Any] = {
        "text": [TEXTS[1], TEXTS[0], TEXTS[1]],
        "images": {**now.images, "left": 255 - now.images["left"]},
        "state": {"state": now.state["state"] + 0.5},
    }
    for name, value in changes.items():
        other, _ = policy.imagine(dataclasses.replace(now, **{name: value}))
        assert float((other - rows).abs().max()) > 1e-4, name


class Scripted(torch.nn.Module):
    """A network whose velocities are known: towards `clip` and `rows` with a caption, away from them without."""

    def __init__(self, clip: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.clip, self.rows = clip, rows
        self.asked: list[tuple[float, Packed]] = []
        self.understood = 0

    def understand(self, packed: Packed) -> tuple[int, ...]:
        self.understood += 1
        return packed.text_lengths

    def generate(self, packed: Packed, understanding: tuple[int, ...]) -> Velocity:
        self.asked.append((float(packed.sigma[0]), packed))
        sign = torch.ones(len(understanding))
        sign[ROBOTS:] = -1.0
        assert isinstance(packed.latents, Tensor)
        assert isinstance(packed.action, Tensor)
        noisy = torch.ones(packed.latents.shape[2])
        noisy[0] = 0.0
        vision = self.clip.expand_as(packed.latents) * sign.view(-1, 1, 1, 1, 1) * noisy.view(1, 1, -1, 1, 1)
        action = self.rows.expand_as(packed.action) * sign.view(-1, 1, 1)
        return Velocity(vision=vision, action=action)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_guidance_and_what_the_network_is_asked(processor: Cosmos3Processor, solver: Any) -> None:
    """Velocity v with a caption and -v without: guidance g makes (2 g - 1) v of them, g = 1 asks once."""
    scripted = Scripted(torch.full((1, 4, 3, 3, 4), 0.25), torch.full((1, 1 + HORIZON, 8), 0.5))
    results = {}
    for guidance in (1.0, 3.0):
        scripted.asked, scripted.understood = [], 0
        sampling = Sampling(solver=solver, steps=3, guidance=guidance)
        policy = Policy(scripted, Encoder(), processor, sampling=sampling)  # type: ignore[arg-type]
        results[guidance] = policy.imagine(moment())
        twice = ROBOTS * (1 if guidance == 1.0 else 2)
        assert [sigma for sigma, _ in scripted.asked] == pytest.approx([told(s) for s in sampling.sigmas[:-1]])
        assert scripted.understood == 1
        first = scripted.asked[0][1]
        assert len(first) == twice
        empty, lengths = processor.empty_prompts(ROBOTS)
        assert first.text_lengths[ROBOTS:] == lengths[: twice - ROBOTS]
        assert twice == ROBOTS or torch.equal(first.text_ids[-len(empty) :], empty)
        assert isinstance(first.action, Tensor)
        assert isinstance(first.latents, Tensor)
        assert first.action_start == (0,) * twice
        assert first.domain == 2
        assert first.fps == (15.0,) * twice
        for _, packed in scripted.asked:  # the state and the frame of now are the same in every step
            assert torch.equal(packed.action[:, 0], first.action[:, 0])  # type: ignore[index]
            assert torch.equal(packed.latents[:, :, 0], first.latents[:, :, 0])  # type: ignore[index]
        state = moment().state["state"][:, 0]
        torch.testing.assert_close(first.action[:ROBOTS, 0, :3], state[:, :3])
        torch.testing.assert_close(first.action[:ROBOTS, 0, 3], 1.0 - state[:, 3])
        assert not first.action_noisy[:, 0].any()  # type: ignore[index]
        assert first.action_noisy[:, 1:].all()  # type: ignore[index]
    start = scripted.asked[0][1].action[:ROBOTS, 1:, :4]  # type: ignore[index]
    for guidance, factor in ((1.0, 1.0), (3.0, 5.0)):
        expected = start - factor * 0.5 * Sampling(steps=3).sigmas[0]
        torch.testing.assert_close(results[guidance][0][..., :4], expected, atol=2e-3, rtol=0)


def test_an_observation_that_is_none_is_told_with_all_its_problems(
    network: Cosmos3Policy, processor: Cosmos3Processor
) -> None:
    """Levels in 0..1 would be black pictures, and one state that is no number a chunk of such."""
    policy = Policy(network, Encoder(), processor)
    images, state = seen()
    wrong = {**images, "wrist": images["wrist"] / 255, "left": images["left"][:1]}
    state["state"][1, 2] = torch.nan
    words = r"'wrist'\] is torch.float32.*'left'\] has the shape \[1, 32, 64, 3\].*'state'\] holds values that are no"
    with pytest.raises(ValueError, match=words):
        policy.act(wrong, state, TEXTS)
    images, state = seen()
    with pytest.raises(ValueError, match=r"text is one string.*'wrist'\] has the shape \[3, 32"):
        policy.act(images, state, TEXTS[0])
    with pytest.raises(ValueError, match=r"text is empty"):
        policy.act({c: image[:0] for c, image in images.items()}, {"state": state["state"][:0]}, [])
    with pytest.raises(ValueError, match=r"images has \['wrist'\].*state has \[\].*keys has the shape \[1\]"):
        policy.act({"wrist": images["wrist"]}, {}, TEXTS, keys=torch.arange(1))
    # what was refused has taken no noise
    fresh = Policy(network, Encoder(), processor).act(images, state, TEXTS)["action"]
    np.testing.assert_array_equal(policy.act(images, state, TEXTS)["action"], fresh)


def test_modes_of_the_network_stay(network: Cosmos3Policy, processor: Cosmos3Processor) -> None:
    network.train()
    Policy(network, Encoder(), processor).imagine(moment())
    assert all(part.training for part in network.modules())


def test_a_network_in_bfloat16_acts_like_it_in_float32(processor: Cosmos3Processor) -> None:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    network.init_weights(0)
    rows, _ = Policy(network, Encoder(), processor).imagine(moment())
    network.to(torch.bfloat16)
    rounded, _ = Policy(network, Encoder(), processor).imagine(moment())
    assert rounded.dtype == torch.float32
    assert float((rounded - rows).abs().mean()) < 0.1 * float(rows.abs().mean())


def test_a_folder_without_its_parts_says_so(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with pytest.raises(FileNotFoundError, match="no vae/"):
        Policy.from_pretrained(tmp_path)
    (tmp_path / "vae").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no processor\.json"):
        Policy.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="float16"):
        Policy.from_pretrained(tmp_path, dtype=torch.float16)
