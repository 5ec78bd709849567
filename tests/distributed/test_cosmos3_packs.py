"""Packs of unequal sizes on two ranks: every sample counts as much as every other, as in one pack in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))
import cosmos3_worker as worker
from parallel_runs import train

from models.common.mesh import MeshStrategy

ROOT = Path(__file__).resolve().parents[2]
# (first sample, samples) of both micro-batches of rank 0, then of rank 1
PACKS = ((0, 1), (1, 2), (3, 4), (7, 1))


def unequal(step: int, first: int, size: int) -> dict[str, Any]:
    return worker.part(step, *PACKS[first // size])


@pytest.mark.distributed
def test_packs_of_unequal_sizes_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    plain = worker.train(worker.make_module())
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    assert set(results) == {"ddp", "fsdp"}
    largest = max(float(value.abs().max()) for value in plain["gradients"].values())
    for name, result in results.items():
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5), name
        assert result["gradients"].keys() == plain["gradients"].keys()
        for key, value in plain["gradients"].items():
            assert float((result["gradients"][key] - value).abs().max()) <= 1e-5 * largest, (name, key)


def _rank_main(folder: Path) -> None:
    strategies = {"ddp": DDPStrategy(gradient_as_bucket_view=True), "fsdp": MeshStrategy(1, 2)}
    results = {
        name: train(worker.make_module(), unequal, strategy, micro_batches=2) for name, strategy in strategies.items()
    }
    if os.environ["RANK"] == "0":
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
