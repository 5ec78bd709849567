"""The input path of a batch: the layout of the reference recipe, windows of a data set, draws, host values, costs."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from knonik import Batch, Loader
from knonik import open as open_dataset
from knonik.write.lerobot import EpisodeData, write_lerobot
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.inputs.processor import Cosmos3Processor, ProcessorConfig
from models.cosmos3_policy.vision.canvas import crop_latents

CAMERAS = ["wrist", "left", "right"]
STATE, ACTION = {"observation.state": 3}, {"action": 3}
TEXT = "put the cube away | tidy up"
TINY = Cosmos3PolicyConfig.tiny()


def make(
    config: Cosmos3PolicyConfig = TINY, image_size: tuple[int, int] = (32, 48), **settings: Any
) -> Cosmos3Processor:
    values = {"tokenizer": "words", "tier": "fit", "horizon": 8, "fps": 10.0, "domain": 1, "gripper": ["action[2]"]}
    return Cosmos3Processor.for_dataset(
        config,
        ProcessorConfig(**{**values, **settings}),
        cameras=CAMERAS,
        state=STATE,
        action=ACTION,
        texts=[TEXT],
        image_size=image_size,
        seed=5,
    )


def batch(count: int, *, size: tuple[int, int] = (32, 48), horizon: int = 8, first: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(first)
    frames = horizon + 1
    images = {
        name: torch.randint(0, 256, (count, frames, *size, 3), dtype=torch.uint8, generator=generator)
        for name in CAMERAS
    }
    ids = torch.arange(first, first + count)
    return Batch(
        images=images,
        state={"observation.state": torch.rand(count, 1, 3, generator=generator)},
        action={"action": torch.rand(count, horizon, 3, generator=generator)},
        action_is_pad=torch.zeros(count, horizon, dtype=torch.bool),
        text=[TEXT] * count,
        dataset=torch.zeros_like(ids),
        episode=ids,
        frame=ids,
        position=ids,
    )


def network_inputs(processor: Cosmos3Processor, given: Batch, *, augment: bool = True) -> dict[str, Any]:
    given.inputs.update(processor.prepare(given))
    return processor.to_network(given, augment=augment)


def test_layout_of_the_reference_recipe() -> None:
    config = Cosmos3PolicyConfig()
    processor = Cosmos3Processor.for_dataset(
        config,
        ProcessorConfig(tokenizer="words", gripper=["observation.state.gripper_position", "action.gripper_position"]),
        cameras=CAMERAS,
        state={"observation.state.joint_positions": 7, "observation.state.gripper_position": 1},
        action={"action.joint_position": 7, "action.gripper_position": 1},
        texts=["Put the marker in the pot"],
        image_size=(360, 640),
    )
    canvas = processor.canvas()
    assert canvas.size == (544, 736)
    assert canvas.content == (540, 640)
    assert crop_latents(torch.empty(48, 9, *canvas.latent_size), canvas.content).shape == (48, 9, 33, 40)
    assert processor.vision_tokens() == 3060
    windows = processor.windows()
    assert windows == {
        **dict.fromkeys(CAMERAS, range(33)),
        **dict.fromkeys(["action.joint_position", "action.gripper_position"], range(32)),
    }
    sample: Any = SimpleNamespace(
        state={
            "observation.state.joint_positions": torch.rand(1, 1, 7),
            "observation.state.gripper_position": torch.ones(1, 1, 1),
        },
        action={"action.joint_position": torch.rand(1, 32, 7), "action.gripper_position": torch.rand(1, 32, 1)},
        text=["Put the marker in the pot"], position=torch.tensor([1]), images={},
    )  # fmt: skip
    text = len(
        processor.text.ids(processor.captions.prompts(sample.text, [1], processor.facts(), [0], random=False)[0])
    )
    assert processor.cost(sample) == [text + 3060 + 33]
    rows, _ = processor._described(sample, random=True)
    assert rows.shape == (1, 33, 8)
    assert rows[0, 0, 7] == 0  # the open gripper of the data set
    # 320x180 frames on the same canvas leave most of it to padding.
    small = make(config, (180, 320), tier="480", horizon=32)
    assert small.canvas().size == (544, 736)
    assert small.vision_tokens() == 720


def test_what_a_step_gets() -> None:
    processor = make()
    inputs = network_inputs(processor, batch(3))
    assert inputs["video"].shape == (3, 3, 9, 48, 48)
    assert inputs["video"].dtype == torch.uint8
    assert inputs["content_size"] == (48, 48)
    assert inputs["action"].shape == (3, 9, 8)
    assert (inputs["domain"], inputs["fps"], inputs["action_dim"]) == (1, 10.0, 3)
    assert torch.equal(inputs["position"], torch.arange(3))
    assert isinstance(inputs["text_lengths"], tuple)
    assert sum(inputs["text_lengths"]) == len(inputs["text_ids"])
    assert sorted(inputs) == [
        "action", "action_dim", "content_size", "domain", "fps", "position", "text_ids", "text_lengths", "video",
    ]  # fmt: skip


def test_costs_are_the_tokens_of_the_step() -> None:
    processor = make()
    given = batch(40)
    inputs = network_inputs(processor, given)
    latents = 3 * -(-3 // 2) * -(-3 // 2)
    assert processor.cost(given) == [length + latents + 9 for length in inputs["text_lengths"]]
    assert len(set(inputs["text_lengths"])) > 1  # dropped captions are shorter


def test_a_budget_that_the_longest_caption_breaks_is_known_before_any_batch() -> None:
    processor = make(caption_dropout=0.0)
    given = batch(40)
    longest = max(processor.cost(given))
    assert longest > min(processor.cost(given))  # of two paraphrases
    texts = ["tidy up", TEXT]
    for budget in (1, longest - 1):
        tokens, prompt = processor.beyond(texts, budget) or (0, "")
        assert tokens == longest
        assert "put the cube away" in prompt
    for budget in (longest, longest + 1, 10_000):
        assert processor.beyond(texts, budget) is None


def test_samples_do_not_depend_on_their_batch() -> None:
    processor = make()
    whole = network_inputs(processor, batch(4))
    given = batch(4)
    for i in (2, 0):
        alone = Batch(
            images={name: image[i : i + 1] for name, image in given.images.items()},
            state={name: value[i : i + 1] for name, value in given.state.items()},
            action={name: value[i : i + 1] for name, value in given.action.items()},
            action_is_pad=given.action_is_pad[i : i + 1],
            text=given.text[i : i + 1],
            dataset=given.dataset[i : i + 1],
            episode=given.episode[i : i + 1],
            frame=given.frame[i : i + 1],
            position=given.position[i : i + 1],
        )
        inputs = network_inputs(processor, alone)
        assert torch.equal(inputs["video"][0], whole["video"][i])
        assert torch.equal(inputs["action"][0], whole["action"][i])
        begin = sum(whole["text_lengths"][:i])
        assert torch.equal(inputs["text_ids"], whole["text_ids"][begin : begin + whole["text_lengths"][i]])


def test_without_augmentation_pictures_are_as_they_were() -> None:
    given = batch(2)
    plain = network_inputs(make(augment=None), given, augment=True)
    assert torch.equal(plain["video"], network_inputs(make(), batch(2), augment=False)["video"])
    assert torch.equal(plain["video"][:, :, :, :32], given.images["wrist"].permute(0, 4, 1, 2, 3))
    assert not torch.equal(plain["video"], network_inputs(make(), batch(2), augment=True)["video"])


def test_the_loader_may_augment_frame_by_frame() -> None:
    device, cpu = (network_inputs(make(augment_on=where), batch(3))["video"] for where in ("device", "cpu"))
    off = (device.int() - cpu.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3


def test_an_observation_has_one_frame_and_no_actions() -> None:
    processor = make(caption_dropout=0.9)
    given = batch(2)
    given.action.clear()
    given.images.update({name: image[:, :1] for name, image in given.images.items()})
    inputs = network_inputs(processor, given, augment=False)
    assert inputs["video"].shape == (2, 3, 1, 48, 48)
    assert inputs["action"].shape == (2, 1, 8)
    prompt = processor.captions.prompts([TEXT], [0], processor.facts(), None, random=False)[0]
    assert "idle_frame" not in prompt
    assert inputs["text_lengths"] == (len(processor.text.ids(prompt)),) * 2  # neither dropped nor paraphrased
    ids, lengths = processor.empty_prompts(3)
    assert torch.equal(ids, processor.text.ids("").repeat(3))
    assert lengths == (len(processor.text.ids("")),) * 3


def test_a_stored_processor_is_the_same() -> None:
    processor = make(augment={"crop": 0.9, "hue": 0.1})
    again = Cosmos3Processor.from_dict(json.loads(json.dumps(processor.to_dict())))
    assert again.to_dict() == processor.to_dict()
    assert again.settings == processor.settings
    ours, theirs = network_inputs(processor, batch(2)), network_inputs(again, batch(2))
    assert all(torch.equal(ours[key], theirs[key]) for key in ("video", "text_ids", "action"))


def test_windows_of_a_data_set(tmp_path: Any) -> None:
    """Frames t..t+8 and commands t..t+7 of every anchor; an episode of n rows has n - 8 of them."""

    def episode(number: int, length: int) -> EpisodeData:
        steps = np.arange(length, dtype=np.float32)[:, None]
        values = np.concatenate([steps, steps + 1000 * number, steps / 100], axis=1)
        level = (np.arange(length) * 9 + number)[:, None, None, None]
        frames = {name: np.broadcast_to(level + 3 * i, (length, 32, 48, 3)) for i, name in enumerate(CAMERAS)}
        return EpisodeData(
            columns={"observation.state": values, "action": values + 0.5},
            frames={f"observation.images.{name}": each.astype(np.uint8) for name, each in frames.items()},
            task=TEXT,
        )

    lengths = (12, 8, 15)
    folder = write_lerobot(
        tmp_path / "set", (episode(i, length) for i, length in enumerate(lengths)), fps=10, robot_type="none",
        codec="h264", episodes_per_file=2,
    )  # fmt: skip
    processor = Cosmos3Processor.for_dataset(
        TINY,
        ProcessorConfig(tokenizer="words", tier="fit", horizon=8, fps=10.0, domain=0, augment=None),
        cameras=[f"observation.images.{name}" for name in CAMERAS],
        state=STATE,
        action=ACTION,
        texts=[TEXT],
        image_size=(32, 48),
    )
    with open_dataset(folder, cache_dir=tmp_path / "cache") as dataset:
        loader = Loader(
            dataset, batch_size=4, windows=processor.windows(), edge="inside", transform=processor.prepare,
            decode_threads=1,
        )  # fmt: skip
        with loader:
            assert loader.num_anchors == (12 - 8) + (15 - 8)
            for _ in range(3):
                given = next(loader)
                inputs = processor.to_network(given, augment=False)
                for i, (number, frame) in enumerate(zip(given.episode.tolist(), given.frame.tolist(), strict=True)):
                    seen = np.stack(
                        [dataset.frame(episode=number, camera=processor.cameras[0], frame=frame + k) for k in range(9)]
                    )
                    wrist = inputs["video"][i, :, :, :32].permute(1, 2, 3, 0).numpy()
                    np.testing.assert_array_equal(wrist, seen)
                    rows = inputs["action"][i, :, 0].tolist()
                    assert rows == [frame, *(frame + k + 0.5 for k in range(8))]


@pytest.mark.parametrize(
    ("cameras", "settings", "said"),
    [
        (["a", "b"], {}, r"data\.cameras has 2"),
        (CAMERAS, {"views": {"wrist": "front"}}, r"views names cameras \['front'\]; data\.cameras has"),
        (CAMERAS, {"domain": 9}, r"domain=9, the network has num_embodiment_domains=4"),
        (CAMERAS, {"tokenizer": None}, r"there are no weights"),
    ],
)
def test_what_does_not_fit_is_named(cameras: list[str], settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        Cosmos3Processor.for_dataset(
            TINY,
            ProcessorConfig(**{"tokenizer": "words", "domain": 1, **settings}),
            cameras=cameras, state=STATE, action=ACTION, texts=[TEXT], image_size=(32, 48),
        )  # fmt: skip


def test_settings_that_do_nothing_or_cannot_be_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"views names.*prompt='xml'.*horizon=30.*caption_dropout=1"):
        ProcessorConfig(views={"top": "a"}, prompt="xml", horizon=30, caption_dropout=1)
    with pytest.raises(ValueError, match=r"augment\.crop=2.*augment\.hue=0\.7"):
        ProcessorConfig(augment={"crop": 2, "hue": 0.7})
    with pytest.raises(ValueError, match=r"augment\.brightness=nan: 0 or more, and finite; augment\.contrast=inf"):
        ProcessorConfig(augment={"brightness": float("nan"), "contrast": float("inf")})


def test_batches_of_other_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"camera wrist: frames are 30x48, expected 32x48"):
        make().prepare(batch(1, size=(30, 48)))
    with pytest.raises(ValueError, match=r"the batch has 4 action steps, the processor's horizon is 8"):
        make().prepare(batch(1, horizon=4))
