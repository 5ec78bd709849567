"""Predicted memory: the published totals at released size, and the tensors a training step really holds."""

import pytest
import torch
from torch import Tensor

from models.common.optim import OptimizerConfig, build_optimizer
from models.gr00t_n17 import precision
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.memory import PARTS, Memory, measure, predict
from models.gr00t_n17.network import GR00TN17

GPU_24 = 24 * 2**30


@pytest.fixture(scope="module")
def released() -> dict[str, Memory]:
    config = GR00TN17Config()
    slots = {"stock": None, "lean": [10], "bf16": [10]}
    return {mode: predict(config, mode=mode, slots=held) for mode, held in slots.items()}


def test_static_memory_at_released_size(released: dict[str, Memory]) -> None:
    stock, lean, bf16 = (released[mode] for mode in precision.MODES)
    assert stock.static_total == pytest.approx(32e9, rel=0.03)
    assert stock.trained == 1_620_515_968
    assert lean.static_total <= 24.5e9
    assert lean.trained == 1_620_515_968 - 31 * (233_127_936 + 54_738_944 + 37_916_800) // 32
    # A batch has to fit beside it on a card of 24 GB, its context and the float32 temporaries of an update too.
    assert bf16.static_total + bf16.autocast_copies < GPU_24 - 4e9
    assert lean.static_total + lean.autocast_copies > GPU_24
    assert stock.weights["vision"] == 4 * 406_957_056
    assert stock.weights["token_embedding"] == 4 * 311_164_928
    assert stock.weights["decoder"] == 4 * 805_378_048
    assert stock.weights["dit"] == 4 * 1_091_722_240
    assert stock.gradients["decoder"] == stock.optimizer["vision"] == 0
    assert stock.optimizer["dit"] == 8 * 1_091_722_240
    assert sum(lean.weights[part] for part in PARTS[:3]) == pytest.approx(2 * 1_523_500_032, rel=1e-3)


def test_the_table_names_every_part_and_the_total(released: dict[str, Memory]) -> None:
    lines = released["lean"].table().splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*PARTS, "static"]
    assert "autocast keeps" in lines[-1]
    assert float(lines[-2].split()[-1]) == pytest.approx(released["lean"].static_total / 1e9, abs=0.01)


def test_what_is_trained_is_split_over_a_shard_and_the_rest_is_not(released: dict[str, Memory]) -> None:
    with torch.device("meta"):
        network = GR00TN17(GR00TN17Config())
    whole, split = released["stock"], measure(network, shard=8, averaged=True)
    assert whole.averages == dict.fromkeys(PARTS, 0)
    for part in ("vision", "token_embedding", "decoder"):
        assert split.weights[part] == whole.weights[part]
        assert split.averages[part] == split.gradients[part] == 0
    for part in ("dit", "vl_adapter", "encoders"):
        # rows that eight do not divide leave the first rank at most one more of each tensor
        assert 1 <= split.weights[part] * 8 / whole.weights[part] < 1.01
        assert split.averages[part] == split.gradients[part] == split.weights[part] == split.optimizer[part] / 2
    assert split.static_total == sum(sum(c.values()) for c in (split.weights, split.gradients, split.optimizer)) + sum(
        split.averages.values()
    )
    assert split.autocast_copies == 0
    assert "autocast" not in split.table()


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("mode", "slots"), [("stock", None), ("lean", (1,)), ("bf16", (1, 2))])
def test_prediction_counts_what_a_step_holds(mode: str, slots: tuple[int, ...] | None, device: str) -> None:
    config = GR00TN17Config.tiny(tune_llm=False, tune_visual=False)
    with torch.device(device):
        network = GR00TN17(config, slots)
    precision.apply(network, mode)
    trained = [p for p in network.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(network, OptimizerConfig(fused=device == "cpu"))
    optimizer.step()
    memory = predict(config, mode=mode, slots=slots)
    assert sum(memory.weights.values()) == nbytes(list(network.parameters()))
    assert sum(memory.gradients.values()) == nbytes([p.grad for p in trained if p.grad is not None])
    state = [value for values in optimizer.state.values() for name, value in values.items() if name != "step"]
    assert sum(memory.optimizer.values()) == nbytes(state)


def test_autocast_copies_are_those_of_trained_float32_weights_in_products() -> None:
    config = GR00TN17Config.tiny(tune_llm=False, tune_visual=False)
    head = GR00TN17(config, (1,)).action_head
    linear = [p for module in head.modules() if isinstance(module, torch.nn.Linear) for p in module.parameters()]
    own = [p for name, p in head.named_parameters() if name.endswith(".W")]
    assert predict(config, mode="lean", slots=(1,)).autocast_copies == 2 * sum(p.numel() for p in (*linear, *own))
    assert predict(config, mode="bf16", slots=(1,)).autocast_copies == 0
