"""Outputs of a frozen backbone kept by sample: a second pass over the data runs the action head alone.

Exact: values are kept in the dtype they were made in, for the prompt and the pictures they were made from. A batch of
the same samples gets bit for bit what the backbone gave it before; a batch of other composition gets what each sample's
first batch gave, which differs from a fresh pass only by the rounding that another batch size or padding brings.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from models.gr00t_n17.feature_store import KEY_BYTES, FeatureCache, Stored
from models.gr00t_n17.inputs.image_settings import ImageSettings
from models.gr00t_n17.layers.backbone import Backbone, BackboneFeatures

KEYS = "feature_keys"
"""Entry of a batch's inputs: `SampleKeys`."""

_PADDING = bytes(KEY_BYTES)
"""Key of one row of padding."""


class SampleKeys(list[bytes]):
    """One key per sample among a batch's inputs; they stay on the host when the batch moves."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def pin_memory(self) -> Self:
        return self


def cache_key(
    *, weights: str, images: ImageSettings, cameras: Sequence[str], data: Sequence[str], precision: str, device: str
) -> str:
    """The `key` of a `FeatureCache`: all that features depend on besides the sample.

    Args:
        weights: digest of the backbone.
        data: fingerprint of each dataset in the order of the mixture.
        precision: under which the backbone runs, and `device` its type: both decide how sums are rounded.
    """
    values = {
        "weights": weights,
        "images": dataclasses.asdict(images),
        "cameras": list(cameras),
        "data": list(data),
        "precision": precision,
        "device": device,
        "torch": torch.__version__,
    }
    return json.dumps(values, sort_keys=True)


def with_keys(prepare: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """`Processor.prepare` that adds the samples' keys to the inputs of a batch."""

    def prepared(batch: Any) -> dict[str, Any]:
        inputs = prepare(batch)
        keys = sample_keys(batch.dataset, batch.episode, batch.frame, inputs["input_ids"], inputs["attention_mask"])
        return {**inputs, KEYS: keys}

    return prepared


def cache_problems(settings: ImageSettings, backbone: Backbone) -> list[str]:
    """What forbids keeping features: nothing where every pass over a sample gives the same ones."""
    problems = []
    if settings.is_random:
        problems.append(
            f"model.feature_cache: training images are random ({settings.describe()}); set processor.random_crop=false "
            "and no rotation or colour jitter, or model.feature_cache=0"
        )
    trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    if trained:
        problems.append(
            f"model.feature_cache: {len(trained)} tensors of the backbone are trained, such as {trained[0]}; give 0"
        )
    return problems


def sample_keys(
    dataset: Tensor, episode: Tensor, frame: Tensor, input_ids: Tensor, attention_mask: Tensor
) -> SampleKeys:
    """A key for each sample: where it is from (int64 [B] each) and what it is told (ids and mask [B, S] on the CPU).

    Padding is no part of it. Which data and settings these are is the cache's own key.
    """
    places = torch.stack([dataset, episode, frame], dim=1).to("cpu", torch.int64)
    keys = SampleKeys()
    for place, ids, mask in zip(places, input_ids, attention_mask, strict=True):
        digest = hashlib.blake2b(place.numpy().tobytes(), digest_size=KEY_BYTES)
        digest.update(ids[mask == 1].numpy().tobytes())
        keys.append(digest.digest())
    return keys


@torch.no_grad()
def cached_forward(
    backbone: Backbone, cache: FeatureCache, inputs: Mapping[str, Any], keys: Sequence[bytes]
) -> BackboneFeatures:
    """`backbone` of a batch, run for the samples the cache does not have, which are then kept.

    Args:
        inputs: input_ids, attention_mask, pixel_values, image_grid_thw.
        keys: of the samples in order, from `sample_keys`.
    """
    input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
    batch, length = input_ids.shape
    if len(keys) != batch:
        raise ValueError(f"{len(keys)} keys for a batch of {batch} samples")
    found = cache.get(keys)
    padding = _padding(cache, found, length)
    if padding is None:
        found = [s if s is None or s.mark or len(s.values) == length else None for s in found]
    missing = [i for i, stored in enumerate(found) if stored is None]
    valid, image_mask = attention_mask == 1, input_ids == backbone.image_token_id
    if len(missing) == batch:
        features = backbone(input_ids, attention_mask, inputs["pixel_values"], inputs["image_grid_thw"]).features
        _keep(cache, keys, missing, features, valid)
        return BackboneFeatures(features, valid, image_mask)
    device = input_ids.device
    width, dtype = next((s.values.shape[1], s.values.dtype) for s in found if s is not None)
    host = torch.empty(batch, length, width, dtype=dtype, pin_memory=device.type == "cuda")
    for row, stored in zip(host, found, strict=True):
        if stored is not None:
            _lay_out(stored, row, padding)
    features = host.to(device, non_blocking=True)
    if missing:
        made = backbone(**_part(backbone, inputs, _rounded(missing, batch))).features[: len(missing)]
        _keep(cache, [keys[i] for i in missing], range(len(missing)), made, valid[missing])
        features[missing] = made.to(dtype)
    return BackboneFeatures(features, valid, image_mask)


def _padding(cache: FeatureCache, found: Sequence[Stored | None], length: int) -> Tensor | None:
    """A padding row for samples that were kept without one and need it now; None also where none was seen yet.

    Padding attends to nothing and nothing precedes it, so its rows are alike in all batches.
    """
    if all(s is None or s.mark or len(s.values) == length for s in found):
        return None
    (stored,) = cache.get([_PADDING])
    return None if stored is None else stored.values[0]


def _lay_out(stored: Stored, row: Tensor, padding: Tensor | None) -> None:
    """Real tokens to the end of `row` [S, D], padding in front of them."""
    values = stored.values
    if stored.mark:
        padding, values = values[0], values[1:]
    if len(values) < len(row):
        assert padding is not None
        row[: len(row) - len(values)] = padding
    row[len(row) - len(values) :] = values


def _keep(cache: FeatureCache, keys: Sequence[bytes], rows: Sequence[int], features: Tensor, valid: Tensor) -> None:
    if cache.full:
        return
    on_host, counts = features.to("cpu"), valid.sum(1).tolist()
    items = []
    for i in rows:
        padded = counts[i] < features.shape[1]
        start = features.shape[1] - counts[i] - padded  # one padding row where there is any
        items.append((keys[i], Stored(values=on_host[i, start:], mark=padded)))
        if padded:
            items.append((_PADDING, Stored(values=on_host[i, :1], mark=False)))
    cache.put(items)


def _rounded(rows: list[int], limit: int) -> list[int]:
    """The rows and repeats of the last one up to a power of two: few shapes, so that a compiled backbone is kept."""
    size = min(1 << (len(rows) - 1).bit_length(), limit)
    return rows + rows[-1:] * (size - len(rows))


def _part(backbone: Backbone, inputs: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The backbone's inputs of some samples."""
    input_ids, pixels, grids = inputs["input_ids"], inputs["pixel_values"], inputs["image_grid_thw"]
    grids = grids.tolist() if isinstance(grids, Tensor) else [list(grid) for grid in grids]
    tokens = (input_ids == backbone.image_token_id).sum(1).tolist()
    images = _by_sample(grids, tokens, backbone.vision_config.spatial_merge_size**2)
    patches = [[t * h * w for t, h, w in sample] for sample in images]
    ends = list(itertools.accumulate(sum(sizes) for sizes in patches))
    starts = [0, *ends[:-1]]
    return {
        "input_ids": input_ids[rows],
        "attention_mask": inputs["attention_mask"][rows],
        "pixel_values": torch.cat([pixels[starts[i] : ends[i]] for i in rows]),
        "image_grid_thw": torch.tensor([grid for i in rows for grid in images[i]], dtype=torch.int64).view(-1, 3),
    }


def _by_sample(grids: list[list[int]], tokens: Sequence[int], merged: int) -> list[list[list[int]]]:
    """The images' grids, sample by sample: as many as fill the sample's image tokens, which may differ in number."""
    out, rest = [], iter(grids)
    for wanted in tokens:
        sample: list[list[int]] = []
        while wanted > 0:
            grid = next(rest, None)
            if grid is None:
                break
            sample.append(grid)
            wanted -= math.prod(grid) // merged
        if wanted:
            raise ValueError(f"the images of sample {len(out)} do not fill its image tokens: {wanted} are left over")
        out.append(sample)
    return out
