"""The frozen video encoder: uint8 clips to normalised latents, by Diffusers' Wan autoencoder.

Only its encoder is kept. A clip is encoded in pieces along time, the first frame alone and then a multiple of four
frames, with the causal convolutions' last frames carried from piece to piece: exactly as many frames as the clip has,
and any size of piece gives the same latents. Latents are the mode of the posterior, less the mean and over the standard
deviation that the autoencoder's configuration states for each channel.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.vae_flops import vae_flops
from models.cosmos3_policy.vision.canvas import latent_frames

MISSING = "the video encoder needs Diffusers: install the extra: pip install -e '.[cosmos3]'"

TINY = {
    "base_dim": 8,
    "decoder_base_dim": 8,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
"""Diffusers' configuration of a small autoencoder that patches and strides as the released one does; the channels and
their statistics are added."""


class VideoEncoder:
    """Encodes clips; not a module, so that its weights are in no state dict and in no optimizer.

    samples_at_once and frames_at_once bound the memory: activations of one piece of so many samples and frames.
    """

    def __init__(self, autoencoder: Any, *, samples_at_once: int = 1, frames_at_once: int = 4) -> None:
        if frames_at_once < 4 or frames_at_once % 4:
            raise ValueError(f"frames_at_once is {frames_at_once}; pieces are multiples of 4 frames")
        if samples_at_once < 1:
            raise ValueError(f"samples_at_once is {samples_at_once}; it must be 1 or more")
        config = autoencoder.config
        self.config = config
        self.channels = int(config.z_dim)
        self.spatial_factor = int(config.scale_factor_spatial)
        self.samples_at_once, self.frames_at_once = samples_at_once, frames_at_once
        self.encoder: nn.Module = autoencoder.encoder.requires_grad_(False).eval()
        self.quantize: nn.Module = autoencoder.quant_conv.requires_grad_(False).eval()
        # Each causal convolution keeps its last frames in one slot, in the order the encoder calls them.
        causal = type(autoencoder.quant_conv)
        self._slots = sum(isinstance(module, causal) for module in self.encoder.modules())
        self._run = self.encoder
        self._mean = torch.tensor(config.latents_mean, dtype=torch.float32).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std, dtype=torch.float32).view(1, -1, 1, 1, 1)

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.encoder.parameters()).dtype

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "VideoEncoder":
        """Move to `device`; without a dtype the weights become bfloat16 on a GPU and stay as they are elsewhere."""
        device = torch.device(device)
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else self.dtype
        for module in (self.encoder, self.quantize):
            module.to(device=device, dtype=dtype)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        return self

    def compile(self) -> "VideoEncoder":
        """Compile the encoder: once each for the first frame, the piece after it, and every length of later pieces."""
        self._run = torch.compile(self.encoder, dynamic=False)
        return self

    def flops(self, frames: int, height: int, width: int, *, upstream: bool = False) -> int:
        """FLOPs of encoding one clip; `upstream` counts as NVIDIA's framework does."""
        config = self.config
        return vae_flops(
            frames,
            height,
            width,
            base_dim=config.base_dim,
            z_dim=config.z_dim,
            dim_mult=config.dim_mult,
            num_res_blocks=config.num_res_blocks,
            temporal_downsample=config.temperal_downsample,
            upstream=upstream,
        )

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """uint8 [N, 3, F, H, W] -> float32 [N, C, 1 + (F - 1) / 4, H / 16, W / 16], normalised."""
        samples, _, frames, height, width = video.shape
        if height % self.spatial_factor or width % self.spatial_factor:
            raise ValueError(f"clips of {height}x{width} pixels are not whole latents of {self.spatial_factor} pixels")
        shape = (latent_frames(frames), height // self.spatial_factor, width // self.spatial_factor)
        out = torch.empty(samples, self.channels, *shape, dtype=torch.float32, device=video.device)
        for start in range(0, samples, self.samples_at_once):
            part = video[start : start + self.samples_at_once]
            out[start : start + len(part)] = self._encode(part)
        return out

    def _encode(self, video: Tensor) -> Tensor:
        # Autocast would choose other precisions than the encoder's own.
        with torch.autocast(video.device.type, enabled=False):
            memory: list[Any] = [None] * self._slots
            pieces = [self._piece(video[:, :, :1], memory)]
            for start in range(1, video.shape[2], self.frames_at_once):
                pieces.append(self._piece(video[:, :, start : start + self.frames_at_once], memory))
            moments = self.quantize(torch.cat(pieces, dim=2))
        mode = moments[:, : self.channels].to(torch.float32)
        return mode.sub_(self._mean).div_(self._std)

    def _piece(self, video: Tensor, memory: list[Any]) -> Tensor:
        pixels = video.to(torch.float32).div_(127.5).sub_(1.0).to(self.dtype)
        patch = self.config.patch_size
        if patch is not None and patch > 1:
            pixels = patchify(pixels, patch)
        return self._run(pixels, feat_cache=memory, feat_idx=[0])


def patchify(pixels: Tensor, patch: int) -> Tensor:
    """[N, C, F, H, W] -> [N, C * patch^2, F, H / patch, W / patch]; within a channel, columns of a patch come first."""
    count, channels, frames, height, width = pixels.shape
    blocks = pixels.view(count, channels, frames, height // patch, patch, width // patch, patch)
    return blocks.permute(0, 1, 6, 4, 2, 3, 5).reshape(
        count, channels * patch * patch, frames, height // patch, width // patch
    )


def load_vae(source: str | Path, *, device: torch.device | str = "cpu", **options: Any) -> VideoEncoder:
    """The encoder of a folder or hub repository in Diffusers' layout, or of the `vae` folder inside it.

    options: those of `VideoEncoder`. Weights are read from safetensors files only.
    """
    autoencoder = _autoencoder_class()
    folder = Path(source)
    if folder.is_dir():
        inner = folder / "vae"
        place = inner if (inner / "config.json").is_file() else folder
        if not (place / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json of an autoencoder, nor a vae folder with one (model.vae)"
            )
        model = autoencoder.from_pretrained(place, torch_dtype=torch.float32, use_safetensors=True)
    else:
        model = autoencoder.from_pretrained(
            str(source), subfolder="vae", torch_dtype=torch.float32, use_safetensors=True
        )
    return VideoEncoder(model, **options).to(device)


def tiny_vae(config: Cosmos3PolicyConfig | None = None, *, seed: int = 0, **options: Any) -> VideoEncoder:
    """A small encoder of the same class with random weights, for tests and smoke runs.

    It gives the latents `config` wants, of the tiny network where it is None. The weights are a function of the seed
    alone; torch's generator is left as it was.
    """
    channels = (config or Cosmos3PolicyConfig.tiny()).latent_channel
    shares = [channel / channels for channel in range(channels)]
    statistics = {
        "latents_mean": [0.2 * share - 0.1 for share in shares],
        "latents_std": [0.4 + share for share in shares],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _autoencoder_class()(**TINY, z_dim=channels, **statistics)
    return VideoEncoder(model, **options)


def _autoencoder_class() -> Any:
    try:
        from diffusers import AutoencoderKLWan
    except ImportError as error:
        raise ImportError(MISSING) from error
    return AutoencoderKLWan
