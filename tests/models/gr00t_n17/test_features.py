"""Features kept by sample: what a batch gets from them is what the backbone gives."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.feature_store import FeatureCache
from models.gr00t_n17.features import (
    KEYS,
    SampleKeys,
    cache_key,
    cache_problems,
    cached_forward,
    sample_keys,
    with_keys,
)
from models.gr00t_n17.inputs.image_settings import ImageSettings
from models.gr00t_n17.network import GR00TN17

LENGTHS = (9, 12, 10, 13, 12, 11)
SETTINGS = ImageSettings.from_processor_kwargs({})


class Counted:
    """A backbone that counts the samples it was run for."""

    def __init__(self, backbone: Any) -> None:
        self.backbone, self.samples = backbone, 0
        self.image_token_id, self.vision_config = backbone.image_token_id, backbone.vision_config

    def __call__(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        self.samples += len(input_ids)
        return self.backbone(input_ids, *args, **options)


@pytest.fixture(scope="module")
def network() -> GR00TN17:
    network = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False))
    network.init_weights(0)
    return network.eval()


def num_images(sample: int) -> int:
    return 2 if sample == 3 else 1


def batch_of(rows: list[int], config: GR00TN17Config, length: int | None = None) -> dict[str, Any]:
    """Left-padded prompts; the sample's number decides text and pictures: one of 4x4 patches, two for number 3."""
    b, size = config.backbone, length or max(LENGTHS[i] for i in rows)
    input_ids = torch.full((len(rows), size), b.pad_token_id)
    pixels = []
    for place, i in enumerate(rows):
        generator = torch.Generator().manual_seed(i)
        text = torch.randint(10, 100, (LENGTHS[i] - 6 * num_images(i),), generator=generator).tolist()
        images = [b.vision_start_token_id, *[b.image_token_id] * 4, b.vision_end_token_id] * num_images(i)
        row = [*images, *text]
        input_ids[place, size - len(row) :] = torch.tensor(row)
        pixels.append(torch.rand(16 * num_images(i), 3 * 2 * b.vision.patch_size**2, generator=generator) * 2 - 1)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != b.pad_token_id).long(),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * sum(map(num_images, rows))),
    }


def keys_of(rows: list[int], inputs: dict[str, Any]) -> SampleKeys:
    numbers = torch.tensor(rows)
    return sample_keys(numbers * 0, numbers, numbers * 0, inputs["input_ids"], inputs["attention_mask"])


def forward(backbone: Any, cache: FeatureCache, rows: list[int], config: GR00TN17Config, **options: Any) -> Any:
    inputs = batch_of(rows, config, **options)
    return cached_forward(backbone, cache, inputs, keys_of(rows, inputs))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_pass_gets_the_same_bits_without_the_backbone(
    network: GR00TN17, tmp_path: Path, autocast: bool
) -> None:
    config, backbone = network.config, Counted(network.backbone)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = FeatureCache(tmp_path, 10**8, "a")
        inputs = batch_of([0, 1, 2], config)
        fresh = network.backbone(**inputs)
        first = forward(backbone, cache, [0, 1, 2], config)
        cache.close()
        again = forward(backbone, FeatureCache(tmp_path, 10**8, "a"), [0, 1, 2], config)
    assert backbone.samples == 3
    for name in ("features", "attention_mask", "image_mask"):
        assert torch.equal(getattr(first, name), getattr(fresh, name))
        assert torch.equal(getattr(again, name), getattr(fresh, name))
    assert again.features.dtype == fresh.features.dtype


def test_only_what_is_missing_is_computed(network: GR00TN17, tmp_path: Path) -> None:
    config, backbone, cache = network.config, Counted(network.backbone), FeatureCache(tmp_path, 10**8, "a")
    forward(backbone, cache, [0, 1, 2], config)
    assert backbone.samples == 3
    mixed = forward(backbone, cache, [2, 4, 0, 1], config)
    assert backbone.samples == 4
    torch.testing.assert_close(mixed.features, network.backbone(**batch_of([2, 4, 0, 1], config)).features)
    again = forward(backbone, cache, [2, 4, 0, 1], config)
    assert backbone.samples == 4
    torch.testing.assert_close(again.features, mixed.features, rtol=0, atol=1e-5)


def test_samples_may_have_different_numbers_of_images(network: GR00TN17, tmp_path: Path) -> None:
    config, backbone, cache = network.config, Counted(network.backbone), FeatureCache(tmp_path, 10**8, "a")
    forward(backbone, cache, [0, 5], config)
    mixed = forward(backbone, cache, [0, 3, 1, 5], config)
    torch.testing.assert_close(mixed.features, network.backbone(**batch_of([0, 3, 1, 5], config)).features)
    assert backbone.samples == 4


def test_other_padding_is_laid_out_anew(network: GR00TN17, tmp_path: Path) -> None:
    """Kept in one batch, used in longer ones: real tokens at the end, padding rows before them."""
    config, backbone, cache = network.config, Counted(network.backbone), FeatureCache(tmp_path, 10**8, "a")
    forward(backbone, cache, [0, 1], config)  # 0 was padded, 1 was not
    for length in (12, 16, 20):
        wanted = network.backbone(**batch_of([0, 1], config, length)).features
        torch.testing.assert_close(forward(backbone, cache, [0, 1], config, length=length).features, wanted)
    assert backbone.samples == 2


def test_without_a_padding_row_a_sample_is_computed(network: GR00TN17, tmp_path: Path) -> None:
    config, backbone, cache = network.config, Counted(network.backbone), FeatureCache(tmp_path, 10**8, "a")
    forward(backbone, cache, [1, 4], config)  # both of one length
    found = forward(backbone, cache, [1, 4], config, length=15).features
    torch.testing.assert_close(found, network.backbone(**batch_of([1, 4], config, 15)).features)
    assert backbone.samples == 4


def test_a_full_cache_computes_the_rest(network: GR00TN17, tmp_path: Path) -> None:
    config, backbone = network.config, Counted(network.backbone)
    cache = FeatureCache(tmp_path, 2 * 14 * config.backbone.text.hidden_size * 4 + 200, "a")
    for _ in range(2):
        for rows in ([0, 1, 2], [3, 4, 5]):
            found = forward(backbone, cache, rows, config).features
            torch.testing.assert_close(found, network.backbone(**batch_of(rows, config)).features)
    assert 1 <= len(cache) <= 3  # one of them may be the padding row
    assert backbone.samples < 12 + 2  # what is kept is not computed again, up to rounding to a power of two


def test_keys_tell_samples_and_prompts_apart(network: GR00TN17) -> None:
    inputs = batch_of([0, 1], network.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    zero, one = torch.tensor([0, 0]), torch.tensor([1, 1])
    keys = {
        key
        for places in ((zero, zero, zero), (one, zero, zero), (zero, one, zero), (zero, zero, one))
        for key in sample_keys(*places, ids, mask)
    }
    assert len(keys) == 8
    longer = batch_of([0, 1], network.config, 20)
    assert sample_keys(zero, zero, zero, longer["input_ids"], longer["attention_mask"]) == sample_keys(
        zero, zero, zero, ids, mask
    )


def test_keys_travel_with_the_inputs(network: GR00TN17) -> None:
    @dataclasses.dataclass
    class Places:
        dataset: Tensor
        episode: Tensor
        frame: Tensor

    inputs = batch_of([0, 1], network.config)
    batch = Places(*(torch.tensor([0, number]) for number in range(3)))
    keys = with_keys(lambda _: inputs)(batch)[KEYS]
    assert keys == sample_keys(batch.dataset, batch.episode, batch.frame, inputs["input_ids"], inputs["attention_mask"])
    assert keys.to("cpu", non_blocking=True) is keys.pin_memory() is keys


def test_the_caches_key_says_what_features_depend_on() -> None:
    same = {
        "weights": "w",
        "images": SETTINGS,
        "cameras": ["a", "b"],
        "data": ["d"],
        "precision": "bf16-mixed",
        "device": "cuda",
    }
    other = {
        "weights": "x",
        "images": dataclasses.replace(SETTINGS, crop_fraction=0.9),
        "cameras": ["b", "a"],
        "data": ["e"],
        "precision": "32-true",
        "device": "cpu",
    }
    keys = {cache_key(**{**same, name: value}) for name, value in other.items()}
    assert len(keys | {cache_key(**same)}) == 7


def test_random_images_and_trained_backbones_are_refused(network: GR00TN17) -> None:
    still = dataclasses.replace(SETTINGS, random_crop=False)
    assert cache_problems(still, network.backbone) == []
    (problem,) = cache_problems(SETTINGS, network.backbone)
    assert "processor.random_crop=false" in problem
    trained = GR00TN17(GR00TN17Config.tiny(tune_visual=True)).backbone
    (problem,) = cache_problems(still, trained)
    assert "visual" in problem
