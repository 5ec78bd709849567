"""The next micro-batch's frozen part ahead of its step: the same features, losses and weights, bit for bit."""

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from models.common.digest import weights_digest
from models.common.lookahead import AHEAD, Lookahead, Prepared
from models.gr00t_n17.ahead import frozen_layers, lookahead_problem, run_frozen
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

STEPS = 50
CONFIG: dict[str, Any] = {
    "diffusion_model_cfg": {"dropout": 0.2, "num_layers": 2},
    "vl_self_attention_cfg": {"dropout": 0.2},
    "state_dropout_prob": 0.2,
    "tune_llm": False,
    "tune_visual": False,
}


class Recorded(GR00TN17Module):
    """Keeps the loss of every micro-batch and a digest of the features that its head got."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []
        self.features: list[str] = []
        loss = self.network.action_head.loss

        def noting(features: Tensor, *rest: Any) -> Tensor:
            self.features.append(hashlib.sha256(features.detach().numpy().tobytes()).hexdigest())
            return loss(features, *rest)

        self.network.action_head.loss = noting  # type: ignore[method-assign]

    def _loss(self, *args: Any) -> Tensor:
        loss = super()._loss(*args)
        self.losses.append(float(loss.detach()))
        return loss


class Varied(IterableDataset):
    """Micro-batch 0, 1, ... of this rank: prompts of many lengths, one to three cameras."""

    def __init__(self, config: GR00TN17Config, rank: int = 0, ranks: int = 1) -> None:
        self.config, self.rank, self.ranks = config, rank, ranks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        turn = 0
        while True:
            yield make_inputs(self.config, turn * self.ranks + self.rank)
            turn += 1


def make_inputs(config: GR00TN17Config, number: int, batch: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    b, cameras = config.backbone, 1 + number % 3
    images = [b.vision_start_token_id, b.image_token_id, b.vision_end_token_id] * cameras
    rows = [[b.im_start_token_id, *images, *range(10, 12 + (number * 7 + i * 3) % 5)] for i in range(batch)]
    length = max(len(row) for row in rows)
    ids = torch.tensor([[b.pad_token_id] * (length - len(row)) + row for row in rows])
    mask = torch.zeros(batch, config.action_horizon, config.max_action_dim)
    mask[:, : 4 + number % 4, :7] = 1
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
        "pixel_values": torch.rand(batch * cameras * 4, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * (batch * cameras)),
        "state": torch.rand(batch, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(batch, config.action_horizon, config.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": torch.ones(batch, dtype=torch.int64),
        "position": torch.arange(number * batch, (number + 1) * batch),
    }


def make_module(lookahead: str, **config: Any) -> Recorded:
    torch.manual_seed(0)
    return Recorded(
        GR00TN17(GR00TN17Config.tiny(**{**CONFIG, **config})),
        seed=0,
        optimizer={"lr": 3e-3},
        schedule={"max_steps": STEPS, "warmup_steps": 2},
        lookahead=lookahead,
    )


def trained(
    lookahead: str, folder: Path, *, steps: int = STEPS, accumulate: int = 1, ranks: int = 1, **config: Any
) -> Recorded:
    module = make_module(lookahead, **config)
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=steps,
        accumulate_grad_batches=accumulate, gradient_clip_val=1.0, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Varied(module.network.config, rank, ranks), batch_size=None))
    return module


def assert_equal(one: Recorded, other: Recorded, micro_batches: int) -> None:
    assert len(one.losses) == micro_batches
    assert one.features == other.features
    assert one.losses == other.losses
    assert weights_digest(one.network.state_dict()) == weights_digest(other.network.state_dict())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_features_losses_and_weights_are_those_of_the_plain_run(accumulate: int, tmp_path: Path) -> None:
    plain = trained("none", tmp_path, accumulate=accumulate)
    ahead = trained("stream", tmp_path, accumulate=accumulate)
    assert ahead._ahead is not None
    # all but the first were made ahead, and none for a step that never comes
    assert (ahead._ahead.made, ahead._ahead.taken) == (STEPS * accumulate - 1,) * 2
    assert len(set(plain.features)) == STEPS * accumulate
    assert_equal(plain, ahead, STEPS * accumulate)


def test_layers_below_the_trained_ones_run_ahead_alone(tmp_path: Path) -> None:
    plain = trained("none", tmp_path, steps=10, tune_top_llm_layers=1)
    ahead = trained("stream", tmp_path, steps=10, tune_top_llm_layers=1)
    layers = ahead.network.backbone.language_model.layers
    assert frozen_layers(ahead.network) == len(layers) - 1
    assert ahead._ahead is not None
    assert ahead._ahead.taken == 9
    assert_equal(plain, ahead, 10)


@pytest.mark.parametrize("switch", ["tune_llm", "tune_visual"])
def test_a_trained_backbone_turns_it_off_with_one_line(
    switch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ahead = trained("stream", tmp_path, steps=2, **{switch: True})
    assert ahead._ahead is None
    lines = [r.message for r in caplog.records if r.message.startswith("lookahead")]
    assert len(lines) == 1
    assert "lookahead: off, the backbone is trained (" in lines[0]
    assert_equal(trained("none", tmp_path, steps=2, **{switch: True}), ahead, 2)


def test_a_backbone_compiled_as_one_graph_is_not_cut() -> None:
    network = make_module("none", tune_top_llm_layers=1).network
    assert lookahead_problem(network) is None
    network.backbone.compute = lambda *args: None
    assert "compile.scope=blocks" in str(lookahead_problem(network))


def test_the_frozen_part_draws_nothing_and_keeps_no_graph() -> None:
    module = make_module("stream", tune_top_llm_layers=1)
    state = torch.get_rng_state()
    features = run_frozen(module.network, None, False, make_inputs(module.network.config, 1)).features
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in features)


def test_only_the_very_batch_is_swapped_for_its_inputs() -> None:
    ahead = Lookahead(lambda inputs: inputs["x"] + 1, torch.device("cpu"))
    first, second = {"x": torch.ones(2)}, {"x": torch.ones(2)}
    ahead.start(first, dict)
    assert ahead.swap(second) is second
    assert torch.equal(ahead.result(second), torch.full((2,), 2.0))  # made now
    prepared = ahead.swap(first)
    assert isinstance(prepared, Prepared)
    assert prepared.drawn is first
    assert prepared.to("cpu") is prepared
    assert ahead.result(prepared) is prepared[AHEAD]
    assert ahead.swap(first) is first  # handed out once
    assert (ahead.made, ahead.taken) == (1, 1)


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.glob("equal-*")) == [
        "equal-0-1",
        "equal-0-4",
        "equal-1-1",
        "equal-1-4",
    ]


def _rank_main(folder: Path) -> None:
    """One of two ranks: both runs with and without accumulation, compared on this rank."""
    torch.set_num_threads(1)
    for accumulate, steps in ((1, STEPS), (4, STEPS // 4)):
        runs = [trained(word, folder, steps=steps, accumulate=accumulate, ranks=2) for word in ("none", "stream")]
        assert runs[1]._ahead is not None
        assert runs[1]._ahead.taken == steps * accumulate - 1
        assert_equal(*runs, steps * accumulate)
        (folder / f"equal-{os.environ['RANK']}-{accumulate}").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
