"""A trained network as a policy: observations in, actions in robot units out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.common.observation import Observation
from models.common.stored import StoredTensors
from models.gr00t_n17 import precision
from models.gr00t_n17.checkpoint.folder import CheckpointFolder
from models.gr00t_n17.checkpoint.weights import load_weights
from models.gr00t_n17.inputs.chunks import Overlap
from models.gr00t_n17.inputs.observation import ModalityConfig, modality_config, read_observation
from models.gr00t_n17.inputs.processor import Processor
from models.gr00t_n17.inputs.text import Tokenizer
from models.gr00t_n17.network import GR00TN17

RAMP_RATE = 6.0
"""`rtc_ramp_rate` where neither the caller nor config.json gives one; the value of the public ports."""


class Policy:
    """Network and processor together; batched, deterministic for given noise."""

    def __init__(self, network: GR00TN17, processor: Processor) -> None:
        self.network = network
        self.processor = processor

    def act(
        self,
        images: Mapping[str, np.ndarray | Tensor],
        state: Mapping[str, np.ndarray | Tensor],
        text: Sequence[str],
        noise: Tensor | None = None,
    ) -> dict[str, np.ndarray]:
        """Action chunks for B observations.

        Args:
            images: {camera: uint8 [B, H, W, 3]}.
            state: {key: [B, D]} in robot units.
            text: B instructions.
            noise: start of the sampler, [B, action_horizon, max_action_dim]; drawn from torch's generator if None.

        Returns:
            {action key: float32 [B, horizon, D]} in robot units.
        """
        frames = {camera: torch.as_tensor(value).unsqueeze(1) for camera, value in images.items()}
        states = {key: torch.as_tensor(value).to("cpu", torch.float32).unsqueeze(1) for key, value in state.items()}
        return self.processor.decode_actions(self.predict(frames, states, text, noise=noise), states)

    @torch.no_grad()
    def predict(
        self,
        images: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        text: Sequence[str],
        *,
        noise: Tensor | None = None,
        velocity_scale: Tensor | None = None,
    ) -> Tensor:
        """Normalised actions [B, action_horizon, max_action_dim] for images [B, T, H, W, 3] and state [B, 1, D]."""
        device = next(self.network.parameters()).device
        position = torch.zeros(len(text), dtype=torch.int64)
        prepared = self.processor.prepare(Observation(images=images, state=state, text=text, position=position))
        on_device = Observation(
            images={camera: value.to(device) for camera, value in images.items()},
            state=state,
            text=text,
            position=position,
            inputs={key: value.to(device) for key, value in prepared.items()},
        )
        inputs = self.processor.to_network(on_device, augment=False)
        was_training = [(part, part.training) for part in self.network.modules()]
        self.network.eval()
        try:
            with precision.context(self.network):
                features = self.network.backbone(
                    inputs["input_ids"], inputs["attention_mask"], inputs["pixel_values"], inputs["image_grid_thw"]
                )
                return self.network.action_head.sample(
                    *features,
                    inputs["state"],
                    inputs["embodiment_id"],
                    noise=None if noise is None else noise.to(device),
                    action_mask=self._action_mask(len(text)).to(device),
                    velocity_scale=None if velocity_scale is None else velocity_scale.to(device),
                    image_tokens=self.network.image_tokens(inputs),
                )
        finally:
            # Part by part: frozen parts are in eval mode inside a network that trains.
            for part, mode in was_training:
                part.training = mode

    def _action_mask(self, batch: int) -> Tensor:
        """1 on the steps and elements of a real chunk, as in training."""
        config = self.network.config
        mask = torch.zeros(batch, config.action_horizon, config.max_action_dim)
        mask[:, : self.processor.horizon, : self.processor.state_action.action_dim] = 1.0
        return mask


class GR00TPolicy:
    """A policy with the calls of upstream's own: `get_action`, `get_modality_config`, `reset`.

    Args:
        network: in any training mode; it is judged in eval mode.
        processor: of one embodiment; inputs come by group and camera name, whatever columns it was trained on.
    """

    def __init__(self, network: GR00TN17, processor: Processor) -> None:
        self.policy = Policy(network, processor.by_group())

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        embodiment: str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Self:
        """Load a checkpoint folder for one robot; only its embodiment's weights are held.

        Args:
            folder: exported or released.
            embodiment: tag that the folder has a modality config and statistics for.
            device: where the network runs.
            dtype: None or float32 computes in float32. bfloat16 is what a bf16-mixed training computes: frozen weights
                in bfloat16, norms and flow variables in float32. Upstream's server casts everything to bfloat16.
            tokenizer: None takes the one the folder names.

        Raises:
            ValueError: the folder does not know the embodiment, or its weights do not fit its config.json.
            FileNotFoundError: no such folder, or one without weights.
        """
        modes = {None: "stock", torch.float32: "stock", torch.bfloat16: "lean"}
        if dtype not in modes:
            raise ValueError(f"dtype={dtype}: float32 (None) or bfloat16")
        opened = CheckpointFolder(folder)
        processor = Processor.from_checkpoint(opened, embodiment=embodiment, tokenizer=tokenizer)
        with torch.device("meta"):
            network = GR00TN17(opened.config, slots=(processor.embodiment_id,))
        network.requires_grad_(False)
        with StoredTensors(opened.path) as stored:
            dtypes = precision.weight_dtypes(network, modes[dtype], stored.dtypes)
        load_weights(network, opened.path, device=device, dtypes=dtypes)
        return cls(network.eval(), processor)

    def get_action(
        self, observation: Mapping[str, Any], options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Action chunks for B observations.

        Args:
            observation: {"video": {key: uint8 [B, T, H, W, 3]}, "state": {key: float32 [B, T, D]}, "language":
                {key: [[text]]}}, or the flat form of upstream's simulation wrapper; see `read_observation`.
            options: to go on from the chunk under way, as `Overlap.read` takes them: `action` (that chunk in robot
                units), `action_horizon`, `rtc_overlap_steps`, `rtc_frozen_steps`, `rtc_ramp_rate`. `noise`, the
                sampler's start [B, action_horizon, max_action_dim], makes the call deterministic.

        Returns:
            ({key: float32 [B, horizon, D]} in robot units, absolute; flat observations get flat keys "action.key"),
            and an empty dictionary.

        Raises:
            ValueError: with every problem of the observation, or an option out of its range.
        """
        options = dict(options or {})
        processor, config = self.policy.processor, self.policy.network.config
        observed = read_observation(observation, processor.modalities)
        state = {name: torch.from_numpy(values) for name, values in observed.state.items()}
        noise = options.pop("noise", None)
        if noise is not None:
            noise = torch.as_tensor(noise)
            shape = (len(observed.text), config.action_horizon, config.max_action_dim)
            if tuple(noise.shape) != shape:
                raise ValueError(f"options: noise has the shape {list(noise.shape)}; it must be {list(shape)}")
        overlap = Overlap.read(
            options,
            groups={group.name: group.dim for group in processor.modalities.action},
            horizon=processor.horizon,
            ramp_rate=float(config.extra.get("rtc_ramp_rate", RAMP_RATE)),
        )
        scale = None
        if overlap is not None:
            noise, scale = self._begin(overlap, state, noise, len(observed.text))
        actions = self.policy.predict(
            {name: torch.from_numpy(frames) for name, frames in observed.video.items()},
            state,
            observed.text,
            noise=noise,
            velocity_scale=scale,
        )
        decoded = processor.decode_actions(actions, state)
        prefix = "action." if observed.flat else ""
        return {f"{prefix}{name}": values for name, values in decoded.items()}, {}

    def get_modality_config(self) -> dict[str, ModalityConfig]:
        """Keys and steps of video, state, action and language."""
        return modality_config(self.policy.processor.modalities)

    def reset(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Nothing is kept between calls."""
        return {}

    def _begin(
        self, overlap: Overlap, state: Mapping[str, Tensor], noise: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor]:
        """Start of the sampler with the overlap in its first rows, relative to the state of now; and its speed."""
        processor, config = self.policy.processor, self.policy.network.config
        rows = config.action_horizon
        wrong = {name: len(values) for name, values in overlap.action.items() if len(values) != batch}
        if wrong:
            raise ValueError(f"options: action has the batch sizes {wrong}, the observation has {batch}")
        is_pad = torch.zeros(batch, processor.horizon, dtype=torch.bool)
        chunk = processor.vectors(state, overlap.columns(processor.horizon), is_pad)["action"]
        if noise is None:
            noise = torch.randn(batch, rows, config.max_action_dim)
        start = torch.cat([chunk[:, : overlap.steps].to(noise), noise[:, overlap.steps :]], dim=1)
        return start, overlap.velocity_scale(rows)
