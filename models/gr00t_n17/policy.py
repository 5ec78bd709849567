"""A trained network as a policy: observations in, actions in robot units out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.gr00t_n17.inputs.processor import Processor
from models.gr00t_n17.network import GR00TN17


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One moment of B robots in the shape of a batch: images [B, 1, H, W, 3], state [B, 1, D], no actions."""

    images: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    text: Sequence[str]
    position: Tensor
    action: Mapping[str, Tensor] = field(default_factory=dict)
    action_is_pad: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Policy:
    """Network and processor together; batched, deterministic for given noise."""

    def __init__(self, network: GR00TN17, processor: Processor) -> None:
        self.network = network
        self.processor = processor

    @torch.no_grad()
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
        device = next(self.network.parameters()).device
        frames = {camera: torch.as_tensor(value).unsqueeze(1) for camera, value in images.items()}
        states = {key: torch.as_tensor(value).to("cpu", torch.float32).unsqueeze(1) for key, value in state.items()}
        observation = Observation(
            images=frames, state=states, text=list(text), position=torch.zeros(len(text), dtype=torch.int64)
        )
        prepared = self.processor.prepare(observation)
        on_device = Observation(
            images={camera: value.to(device) for camera, value in frames.items()},
            state=states,
            text=observation.text,
            position=observation.position,
            inputs={key: value.to(device) for key, value in prepared.items()},
        )
        inputs = self.processor.to_network(on_device, augment=False)
        was_training = [(part, part.training) for part in self.network.modules()]
        self.network.eval()
        try:
            features = self.network.backbone(
                inputs["input_ids"], inputs["attention_mask"], inputs["pixel_values"], inputs["image_grid_thw"]
            )
            actions = self.network.action_head.sample(
                *features, inputs["state"], inputs["embodiment_id"], noise=None if noise is None else noise.to(device)
            )
        finally:
            # Part by part: frozen parts are in eval mode inside a network that trains.
            for part, mode in was_training:
                part.training = mode
        return self.processor.decode_actions(actions)
