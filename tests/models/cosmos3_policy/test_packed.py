"""Layout of packed samples: positions of the reference recipe, patches and back, and what a pack refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.packed import Packed, generated_positions, patchify, text_positions, unpatchify

GOLDEN = Path(__file__).parent / "golden"
RELEASED = Cosmos3PolicyConfig()


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "parity.safetensors")


def reference(**changes: Any) -> Packed:
    """Shapes of the published recipe: 48x9x33x40 latents and 33 action rows at 15 fps, 150 caption tokens."""
    values: dict[str, Any] = {
        "text_ids": torch.zeros(150, dtype=torch.int64),
        "text_lengths": (150,),
        "latents": torch.zeros(1, 48, 9, 33, 40),
        "vision_noisy": torch.tensor([[False] + [True] * 8]),
        "action": torch.zeros(1, 33, 64),
        "action_noisy": torch.tensor([[False] + [True] * 32]),
        "action_start": (0,),
        "sigma": torch.tensor([0.5]),
        "domain": 8,
        "fps": (15.0,),
    }
    return Packed(**{**values, **changes})


def test_tokens_and_positions_of_the_reference_recipe(golden: dict[str, Tensor]) -> None:
    packed = reference()
    positions = generated_positions(packed, RELEASED)
    assert packed.generated_lengths(2) == (3060 + 33,)
    assert positions.dtype == torch.float32
    expected = golden["recipe/positions"]
    assert torch.equal(text_positions(packed), expected[:, :150])
    assert torch.equal(positions, expected[:, 150:])
    vision, action = positions[:, :3060].view(3, 9, 17, 20), positions[:, 3060:]
    assert vision[0, 0, 0, 0] == action[0, 0] == 15150.0
    torch.testing.assert_close(vision[0].diff(dim=0), torch.full((8, 17, 20), 1.6), rtol=0, atol=2e-3)
    torch.testing.assert_close(action[0].diff(), torch.full((32,), 0.4), rtol=0, atol=2e-3)
    # Four actions for each latent frame.
    torch.testing.assert_close(action[0, 4::4], vision[0, 1:, 0, 0], rtol=0, atol=1e-3)
    assert torch.equal(vision[1, 3, :, 5], torch.arange(17.0))
    assert torch.equal(vision[2, 3, 5], torch.arange(20.0))
    assert not action[1:].any()


def test_positions_equal_the_library_for_other_rates_and_starts(golden: dict[str, Tensor]) -> None:
    """5 rows without a state at 10 fps: they begin one frame after the first latent frame."""
    expected = golden["commands/positions"]
    packed = Packed(
        text_ids=torch.zeros(19, dtype=torch.int64),
        text_lengths=(7, 12),
        latents=[torch.zeros(3, 3, 5, 6), torch.zeros(3, 4, 4, 7)],
        vision_noisy=[torch.ones(3, dtype=torch.bool), torch.ones(4, dtype=torch.bool)],
        action=[torch.zeros(9, 6), torch.zeros(5, 6)],
        action_noisy=[torch.ones(9, dtype=torch.bool), torch.ones(5, dtype=torch.bool)],
        action_start=(0, 1),
        sigma=torch.ones(2),
        fps=(15.0, 10.0),
    )
    count = packed.generated_lengths(2)[1]
    assert torch.equal(generated_positions(packed, RELEASED)[:, -count:], expected[:, 12:])
    assert torch.equal(text_positions(packed)[:, 7:], expected[:, :12])


@pytest.mark.parametrize("shape", [(2, 3, 2, 5, 6), (1, 4, 3, 4, 7), (3, 2, 1, 1, 1), (1, 2, 2, 4, 4)])
def test_patches_go_there_and_back(shape: tuple[int, ...]) -> None:
    latents = torch.randn(shape)
    patches = patchify(latents, 2)
    n, channels, frames, height, width = shape
    assert patches.shape == (n, frames * -(-height // 2) * -(-width // 2), 4 * channels)
    assert torch.equal(unpatchify(patches, shape[1:], 2), latents)


def test_a_patch_is_rows_columns_channels_and_padding_is_zero() -> None:
    latents = 1 + torch.arange(2 * 3 * 3, dtype=torch.float32).view(1, 2, 1, 3, 3)
    patches = patchify(latents, 2)[0]
    a, b = latents[0, :, 0]
    assert patches[0].tolist() == [a[0, 0], b[0, 0], a[0, 1], b[0, 1], a[1, 0], b[1, 0], a[1, 1], b[1, 1]]
    assert patches[3].tolist() == [a[2, 2], b[2, 2], 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fps": (15.0, 15.0)}, "fps 2"),
        ({"text_lengths": (151,)}, "add up to at most the 150 text_ids"),
        ({"text_lengths": (0,)}, "1 or more"),
        ({"action_noisy": None}, "action_noisy 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reference(**changes)
