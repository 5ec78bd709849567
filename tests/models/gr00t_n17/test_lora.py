"""Adapters train in place of frozen weights, are all a checkpoint keeps of them, and merge to the last bit."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from models.common.digest import weights_digest
from models.common.trained import load_trained
from models.gr00t_n17 import precision
from models.gr00t_n17.checkpoint.export import export
from models.gr00t_n17.checkpoint.folder import CheckpointFolder
from models.gr00t_n17.checkpoint.weights import load_weights
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.processor import Processor, ProcessorConfig
from models.gr00t_n17.inputs.text import WordTokenizer
from models.gr00t_n17.lora import (
    TARGETS,
    LoraConfig,
    add_lora,
    freeze_targets,
    lora_layers,
    low_rank_update,
    merge_lora,
)
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

ADAPTED = (".lora_A.default.weight", ".lora_B.default.weight")


def make_network(**config: Any) -> GR00TN17:
    torch.manual_seed(0)
    return GR00TN17(GR00TN17Config.tiny(**{"tune_llm": False, "tune_visual": False, **config}))


def make_inputs(config: GR00TN17Config, step: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    b, batch = config.backbone, 3
    row = [b.im_start_token_id, b.vision_start_token_id, b.image_token_id, b.vision_end_token_id, 10, 11]
    mask = torch.zeros(batch, config.action_horizon, config.max_action_dim)
    mask[:, :8, :7] = 1
    return {
        "input_ids": torch.tensor([row] * batch),
        "attention_mask": torch.ones(batch, len(row), dtype=torch.int64),
        "pixel_values": torch.rand(batch * 4, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * batch),
        "state": torch.rand(batch, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(batch, config.action_horizon, config.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": 1,
        "position": torch.arange(step * batch, (step + 1) * batch),
    }


def loss_of(network: GR00TN17, step: int = 0) -> Tensor:
    shape = (3, network.config.action_horizon, network.config.max_action_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return network(make_inputs(network.config, step), noise=noise, time=torch.tensor([0.1, 0.5, 0.9]))


def fill(network: GR00TN17) -> None:
    """Adapters as a training would leave them: of the size of the weights they change."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(ADAPTED):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_adapters_change_nothing_at_first_and_merge_to_what_they_computed() -> None:
    network = make_network().eval()
    names, before = list(network.state_dict()), loss_of(network)
    add_lora(network, LoraConfig(targets=TARGETS, rank=4), seed=1)
    network.eval()
    assert torch.equal(loss_of(network), before)
    fill(network)
    adapted = loss_of(network)
    assert abs(float(adapted / before) - 1) > 1e-3
    merge_lora(network)
    assert list(network.state_dict()) == names
    torch.testing.assert_close(loss_of(network), adapted, rtol=1e-5, atol=1e-6)
    state = weights_digest(network.state_dict())
    merge_lora(network)
    assert weights_digest(network.state_dict()) == state


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_trains_its_adapters_alone_and_other_parts_follow_their_switches(target: str) -> None:
    plain, network = make_network(), make_network()
    add_lora(network, LoraConfig(targets=(target,), rank=2), seed=1)
    prefix = {
        "llm": "backbone.model.model.language_model.",
        "vision": "backbone.model.model.visual.",
        "dit": "action_head.model.",
        "vl_self_attention": "action_head.vl_self_attention.",
    }[target]
    fill(network)  # with B at zero no gradient reaches A
    loss_of(network).backward()
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for name, parameter in network.named_parameters():
        expected = name.endswith(ADAPTED) if name.startswith(prefix) else name in trained
        assert parameter.requires_grad == expected, name
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached <= expected, name
        assert reached or not name.endswith(ADAPTED), name
    adapted = [name for name, _ in lora_layers(network)]
    assert adapted
    assert not any(name.endswith("norm1.linear") for name in adapted)


def test_the_first_adapters_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> str:
        network = make_network()
        torch.rand(seed + 5)
        add_lora(network, LoraConfig(targets=("dit",), rank=2), seed=seed)
        return weights_digest({n: p for n, p in network.named_parameters() if n.endswith(ADAPTED)})

    assert first(1) == first(1) != first(2)


def test_frozen_targets_in_bfloat16_give_the_same_loss_and_gradients() -> None:
    """`lean` with adapters: what they sit on is only ever read in bfloat16."""
    config, results = LoraConfig(targets=("llm", "dit"), rank=2), []
    for mode in ("stock", "lean"):
        network = make_network()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(parameter.bfloat16())  # as a released checkpoint stores them
        freeze_targets(network, config)
        precision.apply(network, mode)
        add_lora(network, config, seed=1)
        fill(network)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(network)
        loss.backward()
        results.append((loss, {n: p.grad for n, p in network.named_parameters() if p.grad is not None}))
        kinds = {n: p.dtype for n, p in network.named_parameters()}
        assert all(dtype == torch.float32 for name, dtype in kinds.items() if name.endswith(ADAPTED))
    assert kinds["action_head.model.transformer_blocks.0.attn1.to_q.base_layer.weight"] == torch.bfloat16
    (stock, gradients), (lean, others) = results
    assert torch.equal(stock, lean)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(others[name], value) for name, value in gradients.items())


def make_processor(config: GR00TN17Config) -> Processor:
    numbers = {name: [float(i)] * 7 for i, name in enumerate(("min", "q01", "mean", "std", "q99", "max"))}
    return Processor(
        config, ProcessorConfig(tokenizer="words"), cameras=["top"], statistics={"state": numbers, "action": numbers},
        state_keys=["state"], action_keys=["action"], horizon=8, embodiment="new_embodiment", embodiment_id=1,
        tokenizer=WordTokenizer.from_texts(["pick"], backbone=config.backbone),
    )  # fmt: skip


def test_an_export_rounds_the_merged_weights_once_and_keeps_the_rest(tmp_path: Path) -> None:
    network = make_network()
    processor = make_processor(network.config)
    export(network, processor, tmp_path / "base")
    load_weights(network, tmp_path / "base")
    add_lora(network, LoraConfig(targets=("llm", "dit", "vl_self_attention"), rank=4, alpha=16), seed=1)
    fill(network)
    merged = {
        f"{name}.weight": layer.base_layer.weight.detach() + low_rank_update(layer)
        for name, layer in lora_layers(network)
    }
    merge_lora(network)
    export(network, processor, tmp_path / "out", base=CheckpointFolder(tmp_path / "base"))
    before, after = (_tensors(tmp_path / name) for name in ("base", "out"))
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, merged[name].bfloat16() if name in merged else before[name]), name
    assert len(merged) > 20
    assert not any(torch.equal(after[name], before[name]) for name in merged)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


class Steps:
    def __init__(self, config: GR00TN17Config, start: int = 0) -> None:
        self.config, self.start = config, start

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self.start
        while True:
            yield make_inputs(self.config, step)
            step += 1


def fit(network: GR00TN17, folder: Path, steps: int, *, start: int = 0, checkpoint: Path | None = None) -> None:
    module = GR00TN17Module(
        network, seed=0, optimizer={"lr": 1e-2}, schedule={"max_steps": 4, "warmup_steps": 0}
    )  # fmt: skip
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, callbacks=[saver], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    data = Steps(network.config, start)
    trainer.fit(module, train_dataloaders=data, ckpt_path=checkpoint, weights_only=True)


def adapted_network() -> GR00TN17:
    network = make_network()
    add_lora(network, LoraConfig(targets=("dit",), rank=2, dropout=0.1), seed=1)
    return network


def test_a_checkpoint_holds_what_is_trained_and_a_run_continues_from_it(tmp_path: Path) -> None:
    whole = adapted_network()
    fit(whole, tmp_path / "a", 4)
    fit(adapted_network(), tmp_path / "b", 2)
    path = tmp_path / "b" / "step=2.ckpt"
    stored = torch.load(path, weights_only=True)
    trained = {f"network.{name}" for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert stored["state_dict"].keys() == trained
    assert any(name.endswith(ADAPTED) for name in trained)
    second = adapted_network()
    fit(second, tmp_path / "c", 4, start=2, checkpoint=path)
    assert weights_digest(second.state_dict()) == weights_digest(whole.state_dict())
    third = adapted_network()
    load_trained(third, torch.load(tmp_path / "a" / "step=4.ckpt", weights_only=True))
    assert weights_digest(third.state_dict()) == weights_digest(whole.state_dict())


def test_a_checkpoint_beside_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    fit(adapted_network(), tmp_path, 2)
    other = adapted_network()
    with torch.no_grad():
        next(other.backbone.parameters()).add_(1e-3)
    with pytest.raises(ValueError, match="the frozen weights are not those this checkpoint was trained with"):
        fit(other, tmp_path / "b", 4, checkpoint=tmp_path / "step=2.ckpt")


def test_what_cannot_be_adapted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"targets=\['head'\]: one or more of llm, vision, dit, vl_self_attention"):
        LoraConfig(targets=("head",))
    with pytest.raises(ValueError, match="rank=0: at least 1; alpha=0: above 0; dropout=1"):
        LoraConfig(targets=("dit",), rank=0, alpha=0, dropout=1)
    network, config = make_network(), LoraConfig(targets=("dit",))
    with torch.device("meta"):
        bare = GR00TN17(network.config)
    with pytest.raises(ValueError, match="on the meta device"):
        add_lora(bare, config, seed=0)
    add_lora(network, config, seed=0)
    with pytest.raises(ValueError, match="has adapters already"):
        add_lora(network, config, seed=0)
    none = make_network(vl_self_attention_cfg={"num_layers": 0})
    with pytest.raises(ValueError, match="vl_self_attention has no blocks"):
        add_lora(none, LoraConfig(targets=("vl_self_attention",)), seed=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install the extra: pip install -e '\.\[lora\]'"):
        add_lora(make_network(), config, seed=0)
