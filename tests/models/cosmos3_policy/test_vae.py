"""The video encoder gives Diffusers' latents, normalised, whatever the size of the pieces, and stays frozen."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.vision.vae import TINY, VideoEncoder, load_vae, tiny_vae


@pytest.fixture(scope="module")
def autoencoder() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(4)
    statistics = {"z_dim": 4, "latents_mean": [0.3, -0.2, 0.1, 0.0], "latents_std": [0.5, 2.0, 1.0, 0.25]}
    return diffusers.AutoencoderKLWan(**TINY, **statistics).eval()


def video(samples: int = 2, frames: int = 9) -> Tensor:
    return torch.randint(0, 256, (samples, 3, frames, 32, 48), dtype=torch.uint8)


def expected(autoencoder: nn.Module, clips: Tensor) -> Tensor:
    """The posterior's mode of every clip by itself, by the library, less the mean over the deviation."""
    with torch.no_grad():
        modes = [autoencoder.encode(one[None].float() / 127.5 - 1).latent_dist.mode() for one in clips]
    mean, std = (torch.tensor(values).view(1, 4, 1, 1, 1) for values in ([0.3, -0.2, 0.1, 0.0], [0.5, 2.0, 1.0, 0.25]))
    return (torch.cat(modes) - mean) / std


@pytest.mark.parametrize("options", [{}, {"frames_at_once": 8}, {"frames_at_once": 24, "samples_at_once": 2}])
def test_latents_are_the_librarys_for_any_pieces(autoencoder: nn.Module, options: dict[str, int]) -> None:
    clips = video(samples=3, frames=17)
    latents = VideoEncoder(autoencoder, **options).encode(clips)
    assert latents.shape == (3, 4, 5, 2, 3)
    assert latents.dtype == torch.float32
    torch.testing.assert_close(latents, expected(autoencoder, clips), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_it_is_traced_whole_for_three_kinds_of_piece(
    autoencoder: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = video(samples=2, frames=13)
    encoder = VideoEncoder(autoencoder)
    plain = encoder.encode(clips)
    counter, compile_module = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **given: compile_module(module, backend=counter, **given))
    assert torch.equal(encoder.compile().encode(clips), plain)
    assert counter.frame_count == 3  # the first frame, the piece after it, all others of both clips


def test_33_frames_are_encoded_as_33(autoencoder: nn.Module) -> None:
    clips = video(samples=1, frames=33)
    latents = VideoEncoder(autoencoder, frames_at_once=24).encode(clips)
    assert latents.shape == (1, 4, 9, 2, 3)
    shorter = VideoEncoder(autoencoder).encode(clips[:, :, :29])
    torch.testing.assert_close(latents[:, :, :8], shorter, rtol=1e-5, atol=1e-5)  # causal: the rest changes nothing


def test_it_is_frozen_and_no_module() -> None:
    pytest.importorskip("diffusers")
    encoder = tiny_vae()
    holder = nn.Module()
    holder.vae = encoder
    assert holder.state_dict() == {}
    assert not any(parameter.requires_grad for parameter in encoder.encoder.parameters())
    assert not encoder.encode(video()).requires_grad
    assert not hasattr(encoder, "decoder")


def test_a_tiny_one_fits_the_network_and_is_a_function_of_its_seed() -> None:
    pytest.importorskip("diffusers")
    state = torch.get_rng_state()
    clips = video(samples=1, frames=5)
    first = tiny_vae(seed=3).encode(clips)
    assert torch.equal(torch.get_rng_state(), state) is False  # the clips were drawn
    state = torch.get_rng_state()
    assert torch.equal(tiny_vae(seed=3).encode(clips), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(tiny_vae(seed=4).encode(clips), first)
    wide = tiny_vae(Cosmos3PolicyConfig.tiny(latent_channel=6, patch_latent_dim=24))
    assert wide.encode(clips).shape[1] == wide.channels == 6


def test_autocast_does_not_reach_it(autoencoder: nn.Module) -> None:
    clips = video()
    encoder = VideoEncoder(autoencoder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encoder.encode(clips)
    assert torch.equal(inside, encoder.encode(clips))


def test_bfloat16_weights_give_float32_latents(autoencoder: nn.Module) -> None:
    clips = video()
    exact = VideoEncoder(autoencoder).encode(clips)
    encoder = tiny_vae().to("cpu", torch.bfloat16)
    assert encoder.dtype == torch.bfloat16
    assert encoder.encode(clips).dtype == torch.float32
    assert encoder.to("cpu").dtype == torch.bfloat16  # moving alone does not change the weights
    assert exact.dtype == torch.float32


@pytest.mark.parametrize("inner", [False, True])
def test_loading_a_folder(autoencoder: nn.Module, tmp_path: Path, inner: bool) -> None:
    autoencoder.save_pretrained(tmp_path / "vae" if inner else tmp_path)
    clips = video()
    encoder = load_vae(tmp_path, frames_at_once=8)
    torch.testing.assert_close(encoder.encode(clips), expected(autoencoder, clips), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    encoder = tiny_vae()
    with pytest.raises(ValueError, match="30x48 pixels are not whole latents of 16"):
        encoder.encode(torch.zeros(1, 3, 5, 30, 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8 frames does not divide"):
        encoder.encode(torch.zeros(1, 3, 8, 32, 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiples of 4 frames"):
        tiny_vae(frames_at_once=6)
    with pytest.raises(FileNotFoundError, match=r"no config.json .* \(model.vae\)"):
        load_vae(tmp_path)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[cosmos3\]'"):
        tiny_vae()
