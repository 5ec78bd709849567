"""CPU time of a training step: this repository's network beside the public port of the model, driven the stock way.

    python benchmarks/gr00t_step.py --upstream-python PYTHON [--ours-python PYTHON] [--batch 4] [--turns 7]

Sizes: every depth of the released model (24 vision blocks, 16 decoder layers of 28, 4 + 32 layers in the head) at a
quarter of its widths (vision 256, decoder 512, DiT 384, vocabulary 37,984), all 32 embodiment slots, horizon 40 and 132
dimensions as released: 201 M parameters. Each sample has three images of 128x160 and a prompt of 83 tokens. The head
is trained with dropout, the backbone is frozen, AdamW follows clipping at 1: the stock fine-tune.

The stock way: LM head over every position, weights of the embodiment gathered for every sample, attention of the vision
tower image by image, AdamW over all slots by the loop over tensors that `transformers` calls `adamw_torch`. Upstream
runs in the environment of `gr00t_upstream.py`.

Every side is a process of its own on one thread; all start from the same weights and take one step each in turn on the
same batch. The first turn warms up. Seconds are medians over the other turns; a part's time is
without the parts inside it. With --autocast the products run in bfloat16, weights stay float32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from models.gr00t_n17.config import GR00TN17Config  # noqa: E402
from models.gr00t_n17.network import GR00TN17  # noqa: E402

SIDES = {"upstream": "upstream", "ours": "ours", "ours-slots": "ours, active slot"}
PARTS = (
    "vision",
    "decoder layers",
    "LM head",
    "rest of the backbone",
    "VL adapter",
    "per-embodiment layers",
    "DiT",
    "rest of the forward",
    "backward",
    "clip",
    "AdamW",
)
GRID, CAMERAS, WORDS = (8, 10), 3, 12


def mid_size() -> GR00TN17Config:
    """The released depths at a quarter of the widths."""
    text = {
        "vocab_size": 37984,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    special = ("image", "video", "vision_start", "vision_end", "im_start", "im_end", "pad")
    vision = {"hidden_size": 256, "num_heads": 4, "intermediate_size": 1024}
    return GR00TN17Config(
        model_name="mid",
        backbone_embedding_dim=512,
        input_embedding_dim=384,
        hidden_size=256,
        diffusion_model_cfg={"num_attention_heads": 8, "output_dim": 256},
        vl_self_attention_cfg={"num_attention_heads": 8},
        backbone={
            "text": text,
            "vision": vision,
            **{f"{name}_token_id": 37900 + i for i, name in enumerate(special)},
        },
    )


def make_batch(config: GR00TN17Config, size: int) -> dict[str, Tensor]:
    """Prompts of one length, as from one dataset with one instruction; one embodiment."""
    ids, generator = config.backbone, torch.Generator().manual_seed(0)
    image = [ids.vision_start_token_id, *[ids.image_token_id] * (GRID[0] * GRID[1] // 4), ids.vision_end_token_id]
    row = [ids.im_start_token_id, 7, 8, *image * CAMERAS, *range(20, 20 + WORDS), ids.im_end_token_id, 9]
    horizon, width = config.action_horizon, config.max_action_dim
    mask = torch.zeros(size, horizon, width)
    mask[:, :8, :7] = 1
    draw = {"generator": generator}
    frames = torch.randn(size * CAMERAS * GRID[0] * GRID[1], 3, 1, 256, **draw)
    return {
        "input_ids": torch.tensor([row] * size),
        "attention_mask": torch.ones(size, len(row), dtype=torch.int64),
        "pixel_values": frames.expand(-1, -1, 2, -1).flatten(1),
        "image_grid_thw": torch.tensor([[1, *GRID]] * (size * CAMERAS)),
        "state": torch.randn(size, 1, config.max_state_dim, **draw),
        "action": torch.randn(size, horizon, width, **draw) * mask,
        "action_mask": mask,
        "embodiment_id": torch.full((size,), 10),
        "noise": torch.randn(size, horizon, width, **draw),
        "time": torch.rand(size, **draw) * 0.999,
    }


class Side:
    """A running `gr00t_step_worker.py`."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.steps: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [python, str(HERE / "gr00t_step_worker.py"), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ready = self._answer()

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def seconds(self, clock: str, part: str | None = None) -> float:
        """Median of a part, or of the whole step, behind the first turn."""
        turns = [step[clock] for step in self.steps[1:]]
        return statistics.median(sum(t.values()) if part is None else t.get(part, 0.0) for t in turns)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}; its own message stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def report(sides: dict[str, Side]) -> None:
    names = list(sides)
    print(f"{'CPU s of a step':<24}" + "".join(f"{SIDES[name]:>20}" for name in names))
    for part in PARTS:
        print(f"  {part:<22}" + "".join(f"{sides[name].seconds('cpu', part):20.3f}" for name in names))
    for clock, label in (("cpu", "CPU, whole step"), ("wall", "wall, whole step")):
        print(f"{label:<24}" + "".join(f"{sides[name].seconds(clock):20.3f}" for name in names))
        base = sides[names[0]].seconds(clock)
        print(f"{'  upstream / this':<24}" + "".join(f"{base / sides[name].seconds(clock):20.2f}" for name in names))
    print(f"{'trained parameters, M':<24}" + "".join(f"{sides[name].ready['trained'] / 1e6:20.1f}" for name in names))
    print(f"{'loss without dropout':<24}" + "".join(f"{sides[name].ready['loss']:20.6f}" for name in names))
    print(f"{'PyTorch':<24}" + "".join(f"{sides[name].ready['torch']:>20}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", required=True, help="Python of an environment with LeRobot's groot extra")
    parser.add_argument(
        "--ours-python", default=sys.executable, help="give the same one: builds of PyTorch differ in speed"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=7, help="steps of every side, the first one left out")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products; slow on CPUs without them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns: at least 2, since the first one is left out")
    with tempfile.TemporaryDirectory() as temporary:
        folder, config = Path(temporary), mid_size()
        network = GR00TN17(config)
        network.init_weights(0)
        print(f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f} M parameters, batch {arguments.batch}")
        save_file(network.state_dict(), str(folder / "weights.safetensors"))
        del network
        save_file(make_batch(config, arguments.batch), str(folder / "batch.safetensors"))
        (folder / "sizes.json").write_text(json.dumps(config.to_dict()))
        (folder / "settings.json").write_text(json.dumps({"autocast": arguments.autocast}))
        pythons = dict.fromkeys(SIDES, arguments.ours_python) | {"upstream": arguments.upstream_python}
        sides = {name: Side(name, pythons[name], folder) for name in SIDES}
        for _ in range(arguments.turns):
            for side in sides.values():
                side.step()
        for side in sides.values():
            side.close()
    report(sides)
    if arguments.json:
        rows = {name: {**side.ready, "steps": side.steps} for name, side in sides.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
