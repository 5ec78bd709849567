"""Batches that mix datasets of several embodiments: every sample through the processor of its dataset."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.common import draws
from models.common.batch import MixedBatch
from models.gr00t_n17.inputs import processor_file
from models.gr00t_n17.inputs.frames import check_images, frame_size, num_times
from models.gr00t_n17.inputs.images import FirstResize, plan_cameras
from models.gr00t_n17.inputs.normalize import merged
from models.gr00t_n17.inputs.processor import Processor

# What may differ between the parts of a mixture; all else is one setting of the model.
_OWN = ("mask_padded_steps", "exclude_state", "use_relative_action", "apply_sincos_state_encoding")


class HostTensor:
    """A tensor among a batch's inputs that stays on the CPU when the batch moves: numbers the host plans by."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, *args: Any, **kwargs: Any) -> "HostTensor":
        return self

    def pin_memory(self) -> "HostTensor":
        return self


class MixedProcessor:
    """`Processor` for batches whose `dataset` [B] says which part a sample is from.

    Groups, statistics, cameras, horizon and embodiment are the part's own. The images of all samples are one call; the
    pictures of cameras that a part does not have are left out again, so its prompts name only its own.

    Args:
        parts: one processor per dataset, in the order of the mixture. Those of one embodiment get merged statistics:
            a deployed embodiment has one set of them.
        weights: share of each part's samples, for the merged means; None takes equal ones.

    Attributes:
        parts: the processors that are used.

    Raises:
        ValueError: parts do not go together; names what differs.
    """

    def __init__(self, parts: Sequence[Processor], weights: Sequence[float] | None = None) -> None:
        if not parts:
            raise ValueError("a mixture needs at least one part")
        first = parts[0]
        for number, part in enumerate(parts):
            for name, own, shared in (
                ("model config", part.config, first.config),
                ("tokenizer", part.tokenizer.to_dict(), first.tokenizer.to_dict()),
                ("seed", part.seed, first.seed),
                ("set of processor settings", _shared_settings(part), _shared_settings(first)),
                ("set of video steps", part.modalities.video_deltas, first.modalities.video_deltas),
            ):
                if own != shared:
                    raise ValueError(f"data.mixture[{number}] has another {name} than data.mixture[0]: {own}, {shared}")
        self.parts = _with_merged_statistics(parts, weights or [1.0] * len(parts))
        self.config, self.processor_config, self.seed = first.config, first.processor_config, first.seed
        self.tokenizer, self.prompts = first.tokenizer, first.prompts
        self.image_settings, self.images = first.image_settings, first.images
        self.cameras = list(dict.fromkeys(camera for part in parts for camera in part.cameras))
        self.horizon = max(part.horizon for part in parts)
        self.active_slots = tuple(sorted({part.embodiment_id for part in parts}))
        self._same_cameras = all(part.cameras == self.cameras for part in parts)

    def prepare(self, batch: MixedBatch) -> dict[str, Any]:
        """As `Processor.prepare`; where the parts' cameras differ also which patches belong to the samples' images."""
        check_images(batch, self.cameras, self.parts[0].modalities.video_deltas)
        dataset = batch.dataset.numpy()
        if (unknown := set(dataset.tolist()) - set(range(len(self.parts)))) or not len(dataset):
            raise ValueError(f"batch.dataset names the parts {sorted(unknown)}; there are {len(self.parts)}")
        images = {camera: batch.images[camera] for camera in self.cameras}
        plans = dict(
            zip(images, plan_cameras(self.image_settings, list(map(frame_size, images.values()))), strict=True)
        )
        times = num_times(images[self.cameras[0]])
        tokens = [[plans[camera].tokens for camera in part.cameras] * times for part in self.parts]
        settings = self.processor_config
        prompts = [self.prompts.ids(text, tokens[number]) for text, number in zip(batch.text, dataset, strict=True)]
        input_ids, attention_mask = self.prompts.padded(
            prompts, batch.text, length=settings.prompt_length, multiple=settings.prompt_multiple or 1
        )
        slots = torch.tensor([part.embodiment_id for part in self.parts])
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "embodiment_id": slots[batch.dataset],
            "position": batch.position.to(torch.int64),
            **self._vectors(batch, dataset),
        }
        if not self._same_cameras:
            inputs |= self._image_rows(plans, times, dataset)
        return inputs

    def frame_prefix(self) -> FirstResize | None:
        """As `Processor.frame_prefix`."""
        return self.parts[0].frame_prefix()

    def to_network(self, batch: MixedBatch, augment: bool) -> dict[str, Any]:
        """As `Processor.to_network`; `embodiment_id` stays [B] unless all parts share a slot."""
        inputs: dict[str, Any] = dict(batch.inputs)
        rows, grids = inputs.pop("image_rows", None), inputs.pop("image_grids", None)
        if len(self.active_slots) == 1:
            inputs["embodiment_id"] = self.active_slots[0]
        position, probability = inputs["position"], self.processor_config.state_dropout_prob
        if augment and probability > 0:
            keep = draws.uniform(self.seed, "state_dropout", position, (1, 1)) >= probability
            inputs["state"] = inputs["state"] * keep
        pixel_values, all_grids = self.images(batch.images, self.cameras, position, augment=augment)
        if rows is not None:
            pixel_values, all_grids = pixel_values[rows], grids.tensor
        return {**inputs, "pixel_values": pixel_values, "image_grid_thw": all_grids}

    def decode_actions(
        self, actions: Tensor, state: Mapping[str, Tensor | np.ndarray] | None = None, *, part: int
    ) -> dict[str, np.ndarray]:
        """As `Processor.decode_actions`, for samples that are all of one part."""
        return self.parts[part].decode_actions(actions, state)

    def to_file(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Content of processor_config.json; see `processor_file.to_file`."""
        return processor_file.to_file(self, base)

    def statistics_file(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Content of statistics.json; see `processor_file.statistics_file`."""
        return processor_file.statistics_file(self, base)

    def embodiment_file(self, base: Mapping[str, int] | None = None) -> dict[str, int]:
        """Content of embodiment_id.json; see `processor_file.embodiment_file`."""
        return processor_file.embodiment_file(self, base)

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes an equal processor."""
        return {"parts": [part.to_dict() for part in self.parts]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The processor that `to_dict` described."""
        parts: list[Processor] = []
        for described in values["parts"]:
            parts.append(Processor.from_dict(described, tokenizer=parts[0].tokenizer if parts else None))
        return cls(parts)

    def _vectors(self, batch: MixedBatch, dataset: np.ndarray) -> dict[str, Tensor]:
        """State, action and mask of all samples, part by part."""
        out: dict[str, Tensor] = {}
        for number in np.unique(dataset).tolist():
            part, chosen = self.parts[number], torch.from_numpy(np.flatnonzero(dataset == number))
            # A shorter chunk than the batch's: the other steps are another part's.
            action = {key: batch.action[key][chosen, : part.horizon] for key in part.action_keys if key in batch.action}
            found = part.vectors(
                {key: batch.state[key][chosen] for key in part.state_keys if key in batch.state},
                action if batch.action else {},
                batch.action_is_pad[chosen, : part.horizon] if batch.action else batch.action_is_pad,
                count=len(chosen),
            )
            for name, values in found.items():
                if name not in out:
                    out[name] = torch.zeros(len(dataset), *values.shape[1:])
                out[name][chosen] = values
        return out

    def _image_rows(self, plans: Mapping[str, Any], times: int, dataset: np.ndarray) -> dict[str, Any]:
        """Which patches of all cameras' images are those of the samples' own, in their order, and their grids."""
        first, patches = {}, 0
        for camera in self.cameras:
            first[camera] = patches
            patches += plans[camera].grid[0] * plans[camera].grid[1]
        own_rows, own_grids = [], []
        for part in self.parts:
            sizes = {camera: plans[camera].grid for camera in part.cameras}
            steps = [
                time * patches + first[camera] + np.arange(height * width)
                for time in range(times)
                for camera, (height, width) in sizes.items()
            ]
            own_rows.append(np.concatenate(steps))
            own_grids.append([(1, *size) for _ in range(times) for size in sizes.values()])
        rows = [sample * times * patches + own_rows[number] for sample, number in enumerate(dataset)]
        grids = [grid for number in dataset for grid in own_grids[number]]
        return {
            "image_rows": torch.from_numpy(np.concatenate(rows)),
            "image_grids": HostTensor(torch.tensor(grids, dtype=torch.int64)),
        }


def load_processor(values: Mapping[str, Any]) -> Processor | MixedProcessor:
    """The processor of a run, of one dataset or of a mixture, from what its `to_dict` gave."""
    return MixedProcessor.from_dict(values) if "parts" in values else Processor.from_dict(values)


def _shared_settings(part: Processor) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(part.processor_config).items() if k not in _OWN}


def _with_merged_statistics(parts: Sequence[Processor], weights: Sequence[float]) -> tuple[Processor, ...]:
    """The parts, those of one embodiment with the statistics of all of them."""
    made = list(parts)
    for tag in dict.fromkeys(part.embodiment for part in parts):
        members = [number for number, part in enumerate(parts) if part.embodiment == tag]
        statistics = [parts[number].statistics for number in members]
        if all(each.to_dict() == statistics[0].to_dict() for each in statistics):
            continue
        configs = [_without_cameras(parts[number]) for number in members]
        if any(config != configs[0] for config in configs):
            listed = ", ".join(f"data.mixture[{number}]" for number in members)
            raise ValueError(
                f"{listed} are the same embodiment {tag} with other groups or another horizon; a checkpoint holds one "
                "description of an embodiment: give them tags of their own, or the same groups"
            )
        together = merged(statistics, [weights[number] for number in members])
        for number in members:
            described = {**parts[number].to_dict(), "statistics": together.to_dict()}
            made[number] = Processor.from_dict(described, tokenizer=parts[number].tokenizer)
    return tuple(made)


def _without_cameras(part: Processor) -> dict[str, Any]:
    return {section: said for section, said in part.modalities.to_config().items() if section in ("state", "action")}
