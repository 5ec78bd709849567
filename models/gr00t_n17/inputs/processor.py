"""Batches of robot data to network inputs, and predicted actions back to robot units."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from models.common import draws
from models.common.batch import Batch
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs import embodiments, modality_sources, processor_file, processor_sources
from models.gr00t_n17.inputs.frames import check_images, image_tokens
from models.gr00t_n17.inputs.image_settings import ImageSettings
from models.gr00t_n17.inputs.images import FirstResize, ImageTransform
from models.gr00t_n17.inputs.modality import Modalities
from models.gr00t_n17.inputs.normalize import Normalizer, Numbers, Statistics
from models.gr00t_n17.inputs.processor_sources import DatasetParts, Stored
from models.gr00t_n17.inputs.settings import ProcessorConfig
from models.gr00t_n17.inputs.state_action import StateAction, by_group
from models.gr00t_n17.inputs.text import PromptBuilder, ReleasedTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder

__all__ = ["DatasetParts", "Normalizer", "Processor", "ProcessorConfig"]


class Processor:
    """Network inputs of one embodiment with a fixed set of cameras, state and action groups.

    `prepare` is the per-sample work on the CPU, `to_network` the image work on the batch's device. Groups are
    concatenated in the order of the modalities, then padded with zeros to the network's widths.

    Args:
        statistics: by group (`Statistics`), or {column: {min, max, ...}} of whole columns.
        modalities: groups and cameras; or give cameras, state_keys, action_keys and horizon, which make every column a
            group of its own.
        embodiment: tag of the robot; embodiment_id: its slot. One follows from the other; neither means
            `new_embodiment`.
        relative_statistics: {action group: numbers [horizon, D]}, beside statistics of whole columns.
    """

    def __init__(
        self,
        config: GR00TN17Config,
        processor_config: ProcessorConfig,
        *,
        statistics: Statistics | Mapping[str, Mapping[str, Any]],
        cameras: Sequence[str] = (),
        state_keys: Sequence[str] = (),
        action_keys: Sequence[str] = (),
        horizon: int | None = None,
        modalities: Modalities | None = None,
        embodiment: str | None = None,
        embodiment_id: int | None = None,
        relative_statistics: Mapping[str, Numbers] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.processor_config = processor_config
        if modalities is None:
            if horizon is None or isinstance(statistics, Statistics):
                raise ValueError("a processor needs modalities, or cameras, state_keys, action_keys and horizon")
            data = DatasetParts(cameras=cameras, state=state_keys, action=action_keys, statistics=statistics)
            modalities = data.modalities(int(horizon))
        self.modalities = modalities
        if not isinstance(statistics, Statistics):
            statistics = by_group(modalities, statistics, relative_statistics)
        self.statistics = statistics
        self.embodiment, self.embodiment_id = _embodiment(embodiment, embodiment_id)
        self.seed = int(seed)
        self.state_action = StateAction(modalities, statistics, processor_config)
        self._check()
        if tokenizer is None:
            if processor_config.tokenizer == "words":
                raise ValueError("processor.tokenizer=words: pass tokenizer=WordTokenizer.from_texts(dataset tasks)")
            tokenizer = ReleasedTokenizer(processor_config.tokenizer)
        self.tokenizer = tokenizer
        self.prompts = PromptBuilder(tokenizer, config.backbone, formalize_language=processor_config.formalize_language)
        self.image_settings = ImageSettings.of(processor_config, config.backbone.vision)
        self.images = ImageTransform(self.image_settings, seed=self.seed)

    @classmethod
    def from_checkpoint(
        cls,
        folder: "CheckpointFolder | str | Path",
        *,
        embodiment: str,
        settings: Mapping[str, Any] | None = None,
        config: GR00TN17Config | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> Self:
        """The processor of a checkpoint folder alone; its inputs come by the names of the folder's modality config.

        Args:
            embodiment: a tag the folder has a modality config and statistics for.
            settings: what the caller says over the folder's processor_config.json.
            config: None reads the folder's config.json.

        Raises:
            ValueError: the folder has no processor files, or they do not know the embodiment; names what there is.
        """
        opened = processor_sources.opened_folder(folder)
        stored = processor_sources.known_embodiment(opened, embodiment)
        assert stored.statistics is not None
        assert stored.modality_config is not None
        chosen = {**stored.settings, **(settings or {})}
        if tokenizer is None and stored.tokenizer is not None and "tokenizer" not in (settings or {}):
            tokenizer = load_tokenizer(stored.tokenizer)
        return cls(
            config or opened.config,
            ProcessorConfig(**chosen),
            statistics=stored.statistics,
            modalities=modality_sources.from_checkpoint(stored.modality_config, stored.statistics),
            embodiment=embodiment,
            embodiment_id=embodiments.slot_of(embodiment, stored.ids),
            tokenizer=tokenizer,
            seed=seed,
        )

    @classmethod
    def for_dataset(
        cls,
        config: GR00TN17Config,
        settings: Mapping[str, Any],
        data: DatasetParts,
        *,
        horizon: int | None,
        embodiment: str | None = None,
        embodiment_id: int | None = None,
        checkpoint: "CheckpointFolder | str | Path | None" = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> Self:
        """The processor for training on a dataset, with the dataset's own statistics.

        Args:
            settings: what the recipe says, over a checkpoint's processor file, over the defaults.
            data: the dataset's columns, names and statistics, and the recipe's groups.
            horizon: action steps; None takes the checkpoint's.
            embodiment, embodiment_id: as for the constructor; a tag's slot is that of the checkpoint's table.
            checkpoint: the one training starts from; without processor files it changes nothing.
        """
        tag, slot = _embodiment(embodiment, embodiment_id)
        stored = Stored.read(checkpoint, tag)
        if ignored := processor_sources.ignored(settings, stored.settings):
            raise ValueError("processor settings: " + "; ".join(ignored))
        if embodiment is not None and embodiment_id is None:
            slot = embodiments.slot_of(embodiment, stored.ids)
        processor_config = ProcessorConfig(**{**stored.settings, **data.implied, **settings})
        if tokenizer is None and stored.tokenizer is not None and "tokenizer" not in settings:
            tokenizer = load_tokenizer(stored.tokenizer)
        modalities = data.modalities(horizon, stored.modality_config)
        needed = modalities.relative if processor_config.use_relative_action else ()
        return cls(
            config,
            processor_config,
            statistics=by_group(
                modalities, data.statistics, data.relative(modalities) if needed and data.relative else None
            ),
            modalities=modalities,
            embodiment=tag,
            embodiment_id=slot,
            tokenizer=tokenizer,
            seed=seed,
        )

    @property
    def cameras(self) -> list[str]:
        """Cameras of a batch in the network's order."""
        return list(self.modalities.cameras)

    @property
    def state_keys(self) -> list[str]:
        """Columns of `batch.state` that are read."""
        return list(dict.fromkeys(group.column for group in self.modalities.state))

    @property
    def action_keys(self) -> list[str]:
        """Columns of `batch.action` that are read."""
        return list(dict.fromkeys(group.column for group in self.modalities.action))

    @property
    def horizon(self) -> int:
        """Action steps of a chunk."""
        return self.modalities.horizon

    @property
    def parts(self) -> "tuple[Processor, ...]":
        """One processor for each dataset: this one, as a mixture of one."""
        return (self,)

    @property
    def active_slots(self) -> tuple[int, ...]:
        """Slots of the per-embodiment layers that samples of this processor use."""
        return (self.embodiment_id,)

    def by_group(self) -> Self:
        """The same processor for observations that come by group and camera name instead of by column."""
        values = {**self.to_dict(), "modalities": self.modalities.by_group().to_dict()}
        return type(self).from_dict(values, tokenizer=self.tokenizer)

    def _check(self) -> None:
        config, problems = self.config, []
        state_dim, action_dim = self.state_action.state_dim, self.state_action.action_dim
        if not self.cameras:
            problems.append("data.cameras is empty; the model needs at least one camera")
        if state_dim > config.max_state_dim:
            problems.append(f"the state has {state_dim} dimensions, max_state_dim is {config.max_state_dim}")
        if action_dim > config.max_action_dim:
            problems.append(f"the action has {action_dim} dimensions, max_action_dim is {config.max_action_dim}")
        if not 1 <= self.horizon <= config.action_horizon:
            problems.append(f"horizon={self.horizon} must lie in 1..action_horizon={config.action_horizon}")
        if not 0 <= self.embodiment_id < config.max_num_embodiments:
            problems.append(f"embodiment_id={self.embodiment_id} must lie in 0..{config.max_num_embodiments - 1}")
        if problems:
            raise ValueError("processor does not fit the model: " + "; ".join(problems))

    def prepare(self, batch: Batch) -> dict[str, Tensor]:
        """Per-sample CPU work: prompt ids, normalised and padded state, action and mask.

        Returns input_ids, attention_mask int64 [B, S]; state [B, 1, Ds], action and action_mask [B, H, Da] float32;
        embodiment_id, position int64 [B]. Action entries are left out where `batch.action` is empty.
        """
        check_images(batch, self.cameras, self.modalities.video_deltas)
        tokens = image_tokens(self.image_settings, [batch.images[camera] for camera in self.cameras])
        settings = self.processor_config
        input_ids, attention_mask = self.prompts.batch(
            batch.text, tokens, length=settings.prompt_length, multiple=settings.prompt_multiple or 1
        )
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "embodiment_id": torch.full((len(input_ids),), self.embodiment_id, dtype=torch.int64),
            "position": batch.position.to(torch.int64),
            **self.vectors(batch.state, batch.action, batch.action_is_pad, count=len(batch.text)),
        }

    def vectors(
        self,
        state: Mapping[str, Tensor],
        action: Mapping[str, Tensor],
        action_is_pad: Tensor,
        *,
        count: int | None = None,
    ) -> dict[str, Tensor]:
        """The `state`, `action` and `action_mask` of `prepare`, the latter two only with action columns.

        count: number of samples, where `action_is_pad` does not tell it.
        """
        states = {key: value.numpy() for key, value in state.items()}
        # Without state groups the network sees zeros.
        none = np.zeros((len(action_is_pad) if count is None else count, 1, 0), np.float32)
        values = self.state_action.state(states) if self.modalities.state else none
        if values.shape[1] != 1:
            raise ValueError(f"the state has {values.shape[1]} time steps, the model reads 1; use window [0] for it")
        if self.processor_config.exclude_state:
            values = np.zeros_like(values)
        out = {"state": padded(values, 1, self.config.max_state_dim)}
        if not action:
            return out
        values = self.state_action.action({key: value.numpy() for key, value in action.items()}, states)
        if values.shape[1] != self.horizon:
            raise ValueError(f"the batch has {values.shape[1]} action steps, the processor's horizon is {self.horizon}")
        out["action"] = padded(values, self.config.action_horizon, self.config.max_action_dim)
        mask = torch.zeros_like(out["action"])
        mask[:, : self.horizon, : self.state_action.action_dim] = 1.0
        if self.processor_config.mask_padded_steps:
            mask[:, : self.horizon] *= (~action_is_pad).unsqueeze(-1)
        out["action_mask"] = mask
        return out

    def frame_prefix(self) -> FirstResize | None:
        """What a data layer may do to frames once and keep; None where the path begins with a random step."""
        return FirstResize.of(self.image_settings)

    def to_network(self, batch: Batch, augment: bool) -> dict[str, Any]:
        """The network's inputs on the batch's device: `batch.inputs` with the images of all cameras.

        With `augment` the crop and the colours are random and the state is dropped, all as functions of (seed,
        position). `embodiment_id` becomes one integer: the whole batch shares it, and the per-embodiment layers then
        need no gather per sample. `image_grid_thw` stays on the CPU.
        """
        inputs: dict[str, Any] = dict(batch.inputs)
        inputs["embodiment_id"] = self.embodiment_id
        position, probability = inputs["position"], self.processor_config.state_dropout_prob
        if augment and probability > 0:
            keep = draws.uniform(self.seed, "state_dropout", position, (1, 1)) >= probability
            inputs["state"] = inputs["state"] * keep
        pixel_values, grids = self.images(batch.images, self.cameras, position, augment=augment)
        return {**inputs, "pixel_values": pixel_values, "image_grid_thw": grids}

    def decode_actions(
        self, actions: Tensor, state: Mapping[str, Tensor | np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Normalised actions [B, H, Da] -> {action group: float32 [B, horizon, D]} in robot units.

        Args:
            state: raw state columns [B, T, D] or [B, D] of the observation; needed where groups are relative to it.
        """
        values = actions.detach().to("cpu", torch.float32).numpy()
        columns = None if state is None else {key: _array(value) for key, value in state.items()}
        return self.state_action.decode(values, columns)

    def action_groups(self, columns: Mapping[str, Tensor | np.ndarray]) -> dict[str, np.ndarray]:
        """Action columns [..., D] of a dataset cut into groups: what `decode_actions` is compared with."""
        return self.state_action.groups({key: _array(value) for key, value in columns.items()})

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
        return {
            "config": self.config.to_dict(),
            "processor": dataclasses.asdict(self.processor_config),
            "modalities": self.modalities.to_dict(),
            "statistics": self.statistics.to_dict(),
            "embodiment": self.embodiment,
            "embodiment_id": self.embodiment_id,
            "tokenizer": self.tokenizer.to_dict(),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> Self:
        """The processor that `to_dict` described, also in the form of runs whose columns had no groups.

        Args:
            tokenizer: the one described, where it is at hand.
        """
        values = dict(values)
        described = values.pop("tokenizer")
        if "modalities" in values:
            values["modalities"] = Modalities.from_dict(values["modalities"])
            values["statistics"] = Statistics.from_dict(values["statistics"])
        return cls(
            GR00TN17Config.from_dict(values.pop("config")),
            ProcessorConfig(**values.pop("processor")),
            tokenizer=tokenizer or load_tokenizer(described),
            **values,
        )


def padded(values: np.ndarray, rows: int, width: int) -> Tensor:
    """float32 [B, T, D] at the front of zeros [B, rows, width]."""
    out = torch.zeros(len(values), rows, width)
    out[:, : values.shape[1], : values.shape[2]] = torch.from_numpy(values)
    return out


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _embodiment(tag: str | None, slot: int | None) -> tuple[str, int]:
    """Tag and slot, one following from the other where only one is given."""
    if slot is None:
        tag = tag or embodiments.NEW_EMBODIMENT
        return tag, embodiments.slot_of(tag)
    return tag or embodiments.tag_of(int(slot)), int(slot)
