"""A network that holds some embodiment slots computes what the full one computes, and refuses the others."""

from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17, ActionHead
from models.gr00t_n17.slots import full_shapes, is_slot_tensor, merge_rows, pick_rows

HORIZON, BATCH, LENGTH = 5, 3, 7


def make_heads(slots: tuple[int, ...]) -> tuple[ActionHead, ActionHead]:
    """The full head and one of these slots with the same weights."""
    config = GR00TN17Config.tiny(action_horizon=HORIZON)
    full, few = ActionHead(config), ActionHead(config, slots)
    few.load_state_dict(
        {n: pick_rows(t, few.slots) if is_slot_tensor(n) else t for n, t in full.state_dict().items()}, strict=True
    )
    return full, few


def make_batch(ids: torch.Tensor | int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    image_mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    image_mask[:, 1:4] = True
    return {
        "features": torch.randn(BATCH, LENGTH, 64, generator=g),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool),
        "image_mask": image_mask,
        "state": torch.randn(BATCH, 1, 32, generator=g),
        "action": torch.randn(BATCH, HORIZON, 32, generator=g),
        "action_mask": torch.ones(BATCH, HORIZON, 32),
        "embodiment_id": ids,
        "noise": torch.randn(BATCH, HORIZON, 32, generator=g),
        "time": torch.rand(BATCH, generator=g),
    }


@pytest.mark.parametrize(
    ("slots", "ids"),
    [((2,), 2), ((2,), torch.tensor([2, 2, 2])), ((0, 1, 2, 3), torch.tensor([1, 3, 3])), ((1, 3), 3)],
    ids=["one", "one as tensor", "all of them mixed", "one of two"],
)
def test_few_slots_equal_the_full_tensors_bit_for_bit(slots: tuple[int, ...], ids: torch.Tensor | int) -> None:
    full, few = make_heads(slots)
    assert few.slots == tuple(sorted(slots))
    batch = make_batch(ids)
    losses = [head.loss(**batch) for head in (full, few)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in full.named_parameters()}
    for name, parameter in few.named_parameters():
        expected = pick_rows(gradients[name], few.slots) if is_slot_tensor(name) else gradients[name]
        assert torch.equal(parameter.grad, expected), name


def test_few_mixed_slots_equal_the_gather_without_a_copy_of_the_weights_per_sample() -> None:
    full, few = make_heads((1, 3))
    batch = make_batch(torch.tensor([1, 3, 3]))

    class Gathers(TorchDispatchMode):
        shapes: ClassVar[list[tuple[int, ...]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.index:
                self.shapes.append(tuple(out.shape))
            return out

    with Gathers() as seen:
        loss = few.loss(**batch)
        loss.backward()
        assert not seen.shapes
        expected = full.loss(**batch)
        expected.backward()
        assert (BATCH, 2 * 64, 64) in seen.shapes
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    gradients = {name: p.grad for name, p in full.named_parameters()}
    for name, parameter in few.named_parameters():
        wanted = pick_rows(gradients[name], few.slots) if is_slot_tensor(name) else gradients[name]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_an_inactive_slot_is_refused() -> None:
    _, few = make_heads((1, 3))
    for ids in (2, torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match=r"embodiment_id=2 is not active.*slots=\(1, 3\)"):
            few.loss(**make_batch(ids))
    for wrong in ((), (1, 1), (4,), (-1, 2)):
        with pytest.raises(ValueError, match=r"each once, of 0\.\.3"):
            ActionHead(GR00TN17Config.tiny(), wrong)


def test_rows_go_back_to_their_places() -> None:
    full = torch.arange(12.0, dtype=torch.bfloat16).view(4, 3)
    rows = pick_rows(full, (1, 3)).float() + 100
    merged = merge_rows(full, rows, (1, 3))
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged[[0, 2]], full[[0, 2]])
    assert torch.equal(merged[[1, 3]], full[[1, 3]] + 100)
    assert torch.equal(full, torch.arange(12.0, dtype=torch.bfloat16).view(4, 3))


def test_released_slot_tensors_and_what_one_slot_saves() -> None:
    with torch.device("meta"):
        full, one = GR00TN17(GR00TN17Config()), GR00TN17(GR00TN17Config(), slots=[10])
    assert (full.slots, one.slots) == (None, (10,))
    shapes = {name: tuple(p.shape) for name, p in one.state_dict().items()}
    assert full_shapes(shapes, 32) == {name: tuple(p.shape) for name, p in full.state_dict().items()}
    names = [name for name in shapes if is_slot_tensor(name)]
    assert len(names) == 14
    assert all(shapes[name][0] == 1 for name in names)
    saved = sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in one.parameters())
    assert saved == 31 * (233_127_936 + 54_738_944 + 37_916_800) // 32
