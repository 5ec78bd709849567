"""A trained network as a policy: cameras, state and a sentence in, an action chunk in robot units out.

The network imagines the clip and the actions of a chunk together, both from noise; the frame of now and the state are
given and stay as they are. The empty prompt that guidance subtracts is the one that training drops captions to.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from models.common import draws
from models.common.observation import Observation
from models.cosmos3_policy.config import LATENT_STRIDE
from models.cosmos3_policy.inputs.observation import observe
from models.cosmos3_policy.inputs.processor import Cosmos3Processor
from models.cosmos3_policy.inputs.text import ReleasedTokenizer, Tokenizer
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed
from models.cosmos3_policy.sampler import Sampling
from models.cosmos3_policy.vision.canvas import crop_latents

if TYPE_CHECKING:
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder


class Encoder(Protocol):
    """The frozen encoder of clips; `vision.vae.VideoEncoder`."""

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [N, 3, F, H, W] -> float32 latents [N, C, 1 + (F - 1) / 4, H / 16, W / 16]."""


class Policy:
    """Network, encoder and processor together; batched, and deterministic for a seed.

    Args:
        network: on its device, in any training mode; weights may be bfloat16 or float32.
        encoder: on the same device.
        processor: as in training: its prompt format, cameras and action columns are those the weights know.
        sampling: solver, steps, guidance.
        seed: of the noise that a chunk starts from.
    """

    def __init__(
        self,
        network: Cosmos3Policy,
        encoder: Encoder,
        processor: Cosmos3Processor,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.network, self.encoder, self.processor = network, encoder, processor
        self.sampling = sampling or Sampling()
        self.seed = seed
        self._asked = 0

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        processor: Cosmos3Processor | None = None,
        encoder: Encoder | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> Self:
        """Load a repository in Diffusers' layout, exported or released.

        Args:
            folder: with transformer/, vae/ unless `encoder` is given, and the processor.json of an export unless
                `processor` is.
            processor: for a released repository, which names no cameras and columns.
            encoder: on `device`, in place of the folder's own.
            device: where network and encoder run.
            dtype: bfloat16 is what a bf16-mixed training computes in; float32 holds and computes all in float32.
            sampling, seed: as for the class.

        Raises:
            FileNotFoundError: no such folder, or one without weights, video encoder or processor.
            ValueError: weights that do not fit the config.json beside them, or another dtype.
        """
        from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
        from models.cosmos3_policy.checkpoint.weights import load_weights

        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype={dtype}: bfloat16 or float32")
        opened = CheckpointFolder(folder)
        if opened.vae is None and encoder is None:
            raise FileNotFoundError(
                f"{folder} has no vae/: copy the video encoder that it was trained with into it, or give `encoder`"
            )
        if processor is None:
            if opened.processor is None:
                raise FileNotFoundError(
                    f"{folder} has no processor.json, which exports of a run have; give `processor`, it says which "
                    "cameras and columns the policy reads"
                )
            processor = Cosmos3Processor.from_dict(opened.processor, _own_tokenizer(opened))
        config = opened.config
        with torch.device("meta"):
            network = Cosmos3Policy(processor.config if config is None else config)
        network.requires_grad_(False)
        network.to(dtype)
        network.time_embedder.float()  # its arithmetic is float32 in training too
        load_weights(network, folder, keep_action_heads=True, device=device)
        if encoder is None:
            from models.cosmos3_policy.vision.vae import load_vae  # this one alone needs the extra

            assert opened.vae is not None
            encoder = load_vae(opened.vae, device=device)
        return cls(network.eval(), encoder, processor, sampling=sampling, seed=seed)

    def act(
        self,
        images: Mapping[str, np.ndarray | Tensor],
        state: Mapping[str, np.ndarray | Tensor],
        text: Sequence[str],
        *,
        keys: Tensor | None = None,
    ) -> dict[str, np.ndarray]:
        """Action chunks for B observations.

        Args:
            images: {camera: uint8 [B, H, W, 3]}.
            state: {column: [B, D]} in robot units.
            text: B instructions, one sentence each.
            keys: int64 [B], which noise each chunk starts from, with the seed; None takes new noise for every chunk
                since `reset`.

        Returns:
            {action column: float32 [B, horizon, D]} in robot units: grippers as the data set counts them.

        Raises:
            ValueError: with every problem of the observation.
        """
        new = torch.arange(self._asked, self._asked + len(text))
        observed = observe(self.processor, images, state, text, new if keys is None else keys)
        if keys is None:
            self._asked += len(text)
        rows, _ = self.imagine(observed)
        return self.processor.to_robot(rows)

    def reset(self) -> None:
        """Begin with the first noise again."""
        self._asked = 0

    @torch.no_grad()
    def imagine(self, observed: Observation) -> tuple[Tensor, Tensor]:
        """Actions and clip that the network expects.

        Returns:
            Action rows float32 [B, horizon, action_dim of the network] as the network has them, without the state's;
            latents float32 [B, C, T, h, w] without the canvas' padding, the frame of now first.
        """
        device = next(self.network.parameters()).device
        prepared = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.processor.prepare(observed).items()
        }
        images = {camera: value.to(device) for camera, value in observed.images.items()}
        on_device = dataclasses.replace(observed, images=images, inputs=prepared)
        inputs = self.processor.to_network(on_device, augment=False)
        was_training = [(part, part.training) for part in self.network.modules()]
        self.network.eval()
        try:
            bf16 = any(p.dtype == torch.bfloat16 for p in self.network.parameters())
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                return self._sample(inputs, observed.position.to(device))
        finally:
            for part, mode in was_training:
                part.training = mode

    def _sample(self, inputs: Mapping[str, Any], keys: Tensor) -> tuple[Tensor, Tensor]:
        now = crop_latents(self.encoder.encode(inputs["video"]), inputs["content_size"]).float()
        horizon, wide = self.processor.horizon, inputs["action_dim"]
        count, device = len(now), now.device
        now, state = now[:, :, :1], inputs["action"][:, :1].float()

        shape = (now.shape[1], horizon // LATENT_STRIDE, *now.shape[3:])
        latents = draws.normal(self.seed, "policy.vision", keys, shape)
        actions = draws.normal(self.seed, "policy.action", keys, (horizon, state.shape[2]))
        actions[..., wide:] = 0.0  # columns that no robot has are zero in training too

        texts = [(inputs["text_ids"], inputs["text_lengths"])]
        guided = self.sampling.guidance != 1.0
        if guided:
            empty, lengths = self.processor.empty_prompts(count)
            texts.append((empty.to(device), lengths))
        twice = len(texts)
        packed = Packed(
            text_ids=torch.cat([ids for ids, _ in texts]),
            text_lengths=tuple(length for _, lengths in texts for length in lengths),
            latents=torch.cat([now, latents], dim=2).repeat(twice, 1, 1, 1, 1),
            vision_noisy=_all_but_first(count * twice, 1 + latents.shape[2], device),
            action=torch.cat([state, actions], dim=1).repeat(twice, 1, 1),
            action_noisy=_all_but_first(count * twice, 1 + horizon, device),
            action_start=(0,) * (count * twice),
            sigma=torch.ones(count * twice, device=device),
            domain=inputs["domain"],
            fps=(float(inputs["fps"]),) * (count * twice),
        )
        understanding = self.network.understand(packed)  # once: captions do not depend on the noise

        def velocity(x: list[Tensor], sigma: float) -> list[Tensor]:
            asked = dataclasses.replace(
                packed,
                latents=torch.cat([now, x[0]], dim=2).repeat(twice, 1, 1, 1, 1),
                action=torch.cat([state, x[1]], dim=1).repeat(twice, 1, 1),
                sigma=torch.full((count * twice,), sigma, device=device),
            )
            found = self.network.generate(asked, understanding)
            assert isinstance(found.vision, Tensor)
            assert isinstance(found.action, Tensor)
            speeds = [found.vision[:, :, 1:], found.action[:, 1:]]
            if guided:
                speeds = [part[count:] + self.sampling.guidance * (part[:count] - part[count:]) for part in speeds]
            speeds[1] = speeds[1].clone()
            speeds[1][..., wide:] = 0.0
            return speeds

        clip, rows = self.sampling.solve(velocity, [latents, actions])
        return rows, torch.cat([now, clip], dim=2)


def _own_tokenizer(folder: "CheckpointFolder") -> Tokenizer | None:
    """The tokenizer beside the weights, where processor.json names a released one by its place while training."""
    described = (folder.processor or {}).get("tokenizer") or {}
    if described.get("kind") != "released" or folder.tokenizer is None:
        return None
    return ReleasedTokenizer(str(folder.tokenizer))


def _all_but_first(count: int, length: int, device: torch.device) -> Tensor:
    noisy = torch.ones(count, length, dtype=torch.bool, device=device)
    noisy[:, 0] = False
    return noisy
