"""Compiling in place: options, counts, failures that name their block, and equal results."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.common import checkpointing
from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.compile import apply, apply_to_functions, inductor_options

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(breaks), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(x)

    def tail(self, x: Tensor) -> Tensor:
        return x.square().mean()


def step(model: Model, rows: int = 4) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, rows * 8).view(rows, 8).requires_grad_())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def equal(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def blocks(model: Model) -> dict[str, list[nn.Module]]:
    return {"part": list(model.blocks)}


def test_names_stay_and_graphs_recompiles_and_seconds_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = Model(), Model()
    report = apply(blocks(model), CompileConfig(scope="blocks"), backend="aot_eager")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert report.units == ("part.0", "part.1", "part.2")
    assert equal(step(model), step(plain))
    assert (report.graphs, report.recompiles) == (1, 0)  # blocks of one class and shape share a graph
    seconds = report.seconds
    assert seconds > 0
    assert equal(step(model), step(plain))
    assert (report.graphs, report.seconds) == (1, seconds)
    assert equal(step(model, rows=6), step(plain, rows=6))
    assert (report.graphs, report.recompiles) == (2, 1)
    assert report.seconds > seconds
    assert "part.0 was compiled again" in caplog.text
    assert "3 of 3 blocks, 2 graphs (1 recompiles)" in report.summary()


def test_a_block_that_fails_is_named_and_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = Model(breaks=True), Model(breaks=True)
    report = apply(blocks(model), CompileConfig(scope="blocks"), backend="aot_eager")
    for _ in range(2):
        assert equal(step(model), step(plain))
    assert list(report.failures) == ["part.1"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"compile: part.1 does not compile and runs as it is ({report.failures['part.1']})"
    ]
    assert "2 of 3 blocks" in report.summary()
    assert "uncompiled: part.1 (Unsupported: " in report.summary()


def test_a_failure_can_end_the_run() -> None:
    model = Model(breaks=True)
    apply(blocks(model), CompileConfig(scope="blocks", on_failure="raise"), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"part\.1 does not compile \(Unsupported: .*on_failure=eager"):
        step(model)
    model = Model(breaks=True)
    report = apply(blocks(model), CompileConfig(scope="blocks", fullgraph=False), backend="aot_eager")
    assert equal(step(model), step(Model(breaks=True)))
    assert report.failures == {}


def test_a_backward_that_does_not_compile_is_met_while_eager_can_take_over() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such kernel")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=refuse)
    model = Model()
    report = apply(blocks(model), CompileConfig(scope="blocks"), backend=backend)
    assert equal(step(model), step(Model()))
    assert set(report.failures) == {"part.0", "part.1", "part.2"}
    assert "no such kernel" in report.summary()


def test_mistakes_of_the_model_are_its_own() -> None:
    model = Model()
    report = apply(blocks(model), CompileConfig(scope="blocks"), backend="aot_eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 5))
    assert step(model)[0].isfinite()
    assert report.units == ("part.0", "part.1", "part.2")


def test_functions_compile_in_place() -> None:
    model = Model()
    config = CompileConfig(scope="model")
    assert apply(blocks(model), config).scope == "none"
    report = apply_to_functions({"tail": (model, "tail")}, config, backend="aot_eager")
    assert equal(step(model), step(Model()))
    assert (report.units, report.graphs) == (("tail",), 1)
    assert list(model.state_dict()) == list(Model().state_dict())


def test_blocks_that_are_measured_wait_with_compiling() -> None:
    plain, model = Model(), Model()
    plan = checkpointing.apply(blocks(model), CheckpointingConfig(mode="auto", memory_gb=1e-6))
    report = apply(blocks(model), CompileConfig(scope="blocks"), backend="aot_eager")
    assert equal(step(model), step(plain))
    assert (plan.pending, report.graphs) == (False, 0)
    assert equal(step(model), step(plain))
    assert report.graphs > 0
    assert report.failures == {}


def test_mode_defaults_and_own_options_are_merged() -> None:
    assert inductor_options(CompileConfig()) == {"triton.mix_order_reduction": False}
    config = CompileConfig(mode="max-autotune", inductor={"triton.cudagraphs": False, "epilogue_fusion": False})
    options = inductor_options(config)
    assert options["max_autotune"] is True
    assert options["triton.cudagraphs"] is False
    assert options["epilogue_fusion"] is False
    assert options["triton.mix_order_reduction"] is False
    assert inductor_options(CompileConfig(inductor={"triton": {"mix_order_reduction": True}})) == {
        "triton.mix_order_reduction": True
    }


def test_unknown_options_are_named_together() -> None:
    config = CompileConfig(scope="blocks", inductor={"triton.cudagraph": True, "max_autotun": True})
    with pytest.raises(ValueError, match=r"triton\.cudagraphs.*max_autotune"):
        apply(blocks(Model()), config)


def test_kernels_of_a_node_lie_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    config = CompileConfig(scope="blocks", cache_dir=str(tmp_path))
    assert apply(blocks(Model()), config).cache_dir == str(tmp_path / "node7")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")  # the environment wins
    assert apply(blocks(Model()), config).cache_dir == "elsewhere"
