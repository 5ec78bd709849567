"""The fast backbone path gives what the stock transformers forward gives, forward and backward."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.backbone import Backbone, transformers_config
from models.gr00t_n17.layers.grids import build_tables, mrope_positions, read_grids
from models.gr00t_n17.network import GR00TN17

PAD, START, END, IMAGE = 0, 3, 4, 5


def make_config() -> GR00TN17Config:
    """Three layers, two DeepStack stages and sections that use all three position axes."""
    return GR00TN17Config.tiny(
        select_layer=3,
        backbone={
            "text": {"num_hidden_layers": 5, "head_dim": 32, "mrope_section": (6, 5, 5)},
            "vision": {"depth": 3, "deepstack_visual_indexes": (0, 1)},
        },
    )


def make_inputs(grids: list[list[tuple[int, int]]], text: list[int]) -> dict[str, Tensor]:
    """Left-padded prompts: the images of each sample, then `text` words."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for images, words in zip(grids, text, strict=True):
        row = [1]
        for h, w in images:
            row += [START, *[IMAGE] * (h * w // 4), END]
        rows.append([*row, *torch.randint(10, 256, (words,), generator=generator).tolist(), 2])
    length = max(map(len, rows))
    flat = [grid for images in grids for grid in images]
    return {
        "input_ids": torch.tensor([[PAD] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
        "pixel_values": torch.randn(sum(h * w for h, w in flat), 1536, generator=generator),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in flat]),
    }


BATCHES = {
    "one grid": ([[(4, 4), (4, 4)], [(4, 4), (4, 4)]], [3, 8]),
    "wide grid": ([[(4, 6)], [(4, 6)], [(4, 6)]], [5, 5, 2]),
    "two grids": ([[(4, 4), (8, 6)], [(8, 6), (4, 4)], [(4, 4)]], [7, 3, 9]),
}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    network = GR00TN17(make_config())
    network.init_weights(0)
    return network.backbone


@pytest.fixture(scope="module")
def stock(backbone: Backbone) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration(transformers_config(make_config()))
    missing, unexpected = model.load_state_dict(backbone.model.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def stock_features(stock: Qwen3VLForConditionalGeneration, inputs: dict[str, Tensor]) -> Tensor:
    """Input of the final norm in the stock forward."""
    seen = []
    hook = stock.model.language_model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    stock.model(**inputs, mm_token_type_ids=(inputs["input_ids"] == IMAGE).int(), use_cache=False)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("batch", BATCHES)
def test_features_equal_the_stock_forward(
    backbone: Backbone, stock: Qwen3VLForConditionalGeneration, batch: str
) -> None:
    """Padding rows included: they are keys of the unmasked self-attention that follows."""
    inputs = make_inputs(*BATCHES[batch])
    features, attention_mask, image_mask = backbone(**inputs)
    expected = stock_features(stock, inputs)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention_mask, inputs["attention_mask"] == 1)
    assert torch.equal(image_mask, inputs["input_ids"] == IMAGE)


def test_autocast_rounds_where_the_stock_forward_rounds(
    backbone: Backbone, stock: Qwen3VLForConditionalGeneration
) -> None:
    """float32 weights under bfloat16 autocast: embedding, residual streams and norms stay float32 on both sides.

    The releases of transformers that GR00T is trained with add float32 positions to the bfloat16 patches, so the vision
    stream is float32; later ones cast the positions down. Lifting the patches gives the former from either.
    """
    inputs = make_inputs(*BATCHES["two grids"])
    lift = stock.model.visual.patch_embed.register_forward_hook(lambda module, args, out: out.float())
    with torch.autocast("cpu", torch.bfloat16):
        features, expected = backbone(**inputs).features, stock_features(stock, inputs)
    lift.remove()
    assert features.dtype == expected.dtype == torch.float32
    rounding = (features - backbone(**inputs).features).abs().mean()
    assert (features - expected).abs().mean() < 0.05 * rounding


def test_gradients_equal_the_stock_backward(backbone: Backbone, stock: Qwen3VLForConditionalGeneration) -> None:
    inputs = make_inputs(*BATCHES["two grids"])
    weight = torch.randn(64, generator=torch.Generator().manual_seed(1))
    backbone.zero_grad()
    stock.zero_grad()
    (backbone(**inputs).features @ weight).square().mean().backward()
    (stock_features(stock, inputs) @ weight).square().mean().backward()
    expected = dict(stock.named_parameters())
    for name, parameter in backbone.model.named_parameters():
        if name.endswith("language_model.norm.weight"):
            assert parameter.grad is None
            continue
        scale = expected[name].grad.abs().max()
        assert (parameter.grad - expected[name].grad).abs().max() <= 2e-5 * scale, name


@pytest.mark.parametrize("batch", BATCHES)
def test_positions_equal_the_stock_rope_index(stock: Qwen3VLForConditionalGeneration, batch: str) -> None:
    inputs = make_inputs(*BATCHES[batch])
    ids, valid = inputs["input_ids"], inputs["attention_mask"] == 1
    grids = read_grids(inputs["image_grid_thw"], 2)
    tables = build_tables(grids, make_config().backbone.vision, torch.device("cpu"))
    places = (ids == IMAGE).flatten().nonzero().squeeze(1)
    expected, _ = stock.model.get_rope_index(
        ids, (ids == IMAGE).int(), image_grid_thw=inputs["image_grid_thw"], attention_mask=inputs["attention_mask"]
    )
    assert torch.equal(mrope_positions(valid, places, tables), expected)


def test_still_frames_without_the_copy_in_time_give_the_same_features(backbone: Backbone) -> None:
    inputs = make_inputs(*BATCHES["two grids"])
    frame = inputs["pixel_values"].view(-1, 3, 2, 256)[:, :, :1]
    doubled = {**inputs, "pixel_values": frame.expand(-1, -1, 2, -1).reshape(-1, 1536)}
    single = {**inputs, "pixel_values": frame.reshape(-1, 768)}
    torch.testing.assert_close(backbone(**single).features, backbone(**doubled).features, rtol=1e-5, atol=1e-5)


def test_a_sample_does_not_depend_on_the_padding_of_others(backbone: Backbone) -> None:
    batch = make_inputs([[(4, 4)], [(4, 4)]], [3, 9])
    alone = {
        "input_ids": batch["input_ids"][:1, 6:],
        "attention_mask": batch["attention_mask"][:1, 6:],
        "pixel_values": batch["pixel_values"][:16],
        "image_grid_thw": batch["image_grid_thw"][:1],
    }
    together = backbone(**batch).features[:1, 6:]
    torch.testing.assert_close(backbone(**alone).features, together, rtol=1e-5, atol=1e-5)


def test_tables_made_in_inference_mode_serve_training() -> None:
    network = GR00TN17(make_config())
    network.init_weights(0)
    inputs = make_inputs(*BATCHES["one grid"])
    with torch.inference_mode():
        network.backbone(**inputs)
    network.backbone(**inputs).features.sum().backward()
    assert network.backbone.visual.pos_embed.weight.grad is not None


def test_rotary_tables_stay_float32_in_a_bfloat16_backbone(backbone: Backbone) -> None:
    inputs = make_inputs(*BATCHES["two grids"])
    half = Backbone(make_config())
    half.load_state_dict(backbone.state_dict())
    half.bfloat16()
    features = half(**inputs).features
    assert features.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(features.float(), backbone(**inputs).features, dim=-1).min() > 0.99
    assert not list(half.buffers())
    (tables,) = half._tables.values()
    assert {group.cos.dtype for group in tables.groups} == {torch.float32}


def test_wrong_inputs_are_named(backbone: Backbone) -> None:
    inputs = make_inputs(*BATCHES["one grid"])
    with pytest.raises(ValueError, match="holds 16 image tokens but image_grid_thw stands for 12"):
        backbone(**{**inputs, "image_grid_thw": inputs["image_grid_thw"][:3]})
    with pytest.raises(ValueError, match=r"row \[2, 4, 4\].*multiples of 2"):
        backbone(**{**inputs, "image_grid_thw": [[2, 4, 4]] * 4})


def test_frozen_parts_build_no_graph() -> None:
    inputs = make_inputs(*BATCHES["one grid"])
    frozen = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False)).backbone
    assert not frozen(**inputs).features.requires_grad
    top = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False, tune_top_llm_layers=1)).backbone
    top(**inputs).features.sum().backward()
    trained = {name for name, p in top.named_parameters() if p.grad is not None}
    assert trained
    assert all(name.startswith("model.model.language_model.layers.1.") for name in trained)
    # The same gradients as when everything trains.
    whole = GR00TN17(GR00TN17Config.tiny()).backbone
    whole.load_state_dict(top.state_dict())
    whole(**inputs).features.sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert all(torch.equal(p.grad, gradients[name]) for name, p in top.named_parameters() if name in trained)
    visual = GR00TN17(GR00TN17Config.tiny(tune_llm=False)).backbone
    visual(**inputs).features.sum().backward()
    with_gradient = {name.split(".")[2] for name, p in visual.named_parameters() if p.grad is not None}
    assert with_gradient == {"visual"}
