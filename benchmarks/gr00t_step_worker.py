"""One side of `gr00t_step.py`: builds a network, then makes one training step for every line on standard input.

    python gr00t_step_worker.py ours|ours-slots|upstream FOLDER

Answers each line with the loss and the wall and CPU seconds of every part of the step, as JSON. Imports nothing of this
repository for `upstream`, and nothing of LeRobot otherwise.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

LR, WEIGHT_DECAY = 1e-4, 1e-5


class Parts:
    """Seconds by part; a part inside another one is taken out of it."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._inner: list[list[float]] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._inner.append([0.0, 0.0])
            begin = (time.perf_counter(), time.process_time())
            result = call(*args, **kwargs)
            wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
            inner = self._inner.pop()
            if self._inner:
                self._inner[-1][0] += wall
                self._inner[-1][1] += cpu
            self.wall[part] = self.wall.get(part, 0.0) + wall - inner[0]
            self.cpu[part] = self.cpu.get(part, 0.0) + cpu - inner[1]
            return result

        return wrapped

    def watch(self, part: str, owner: Any, name: str = "forward") -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def watch_head(parts: Parts, head: nn.Module) -> None:
    parts.watch("VL adapter", head.vlln)
    parts.watch("VL adapter", head.vl_self_attention)
    for name in ("state_encoder", "action_encoder", "action_decoder"):
        parts.watch("per-embodiment layers", getattr(head, name))
    parts.watch("DiT", head.model)


def ours(folder: Path, parts: Parts, *, slots: bool) -> tuple[nn.Module, Any, Any]:
    """(network, loss of the batch, optimiser): the recipe's way, with `embodiment_id` as an integer."""
    from models.common.optim import OptimizerConfig, build_optimizer
    from models.gr00t_n17.checkpoint.weights import load_weights
    from models.gr00t_n17.config import GR00TN17Config
    from models.gr00t_n17.network import GR00TN17

    config = GR00TN17Config.from_dict(json.loads((folder / "sizes.json").read_text()))
    batch: dict[str, Any] = load_file(folder / "batch.safetensors")
    batch["embodiment_id"] = int(batch["embodiment_id"][0])
    network = GR00TN17(config, slots=(batch["embodiment_id"],) if slots else None)
    load_weights(network, folder / "weights.safetensors")
    network.train()
    parts.watch("vision", network.backbone, "encode_images")
    for layer in network.backbone.language_model.layers:
        parts.watch("decoder layers", layer)
    parts.watch("rest of the backbone", network.backbone)
    watch_head(parts, network.action_head)
    noise, flow_time = batch.pop("noise"), batch.pop("time")
    optimizer = build_optimizer(network, OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY))
    return network, lambda: network(batch, noise, flow_time), optimizer


def upstream(folder: Path, parts: Parts) -> tuple[nn.Module, Any, Any]:
    """(network, loss of the batch, optimiser): the upstream class as its trainer drives it."""
    import gr00t_upstream

    network = gr00t_upstream.upstream_network(json.loads((folder / "sizes.json").read_text()))
    gr00t_upstream.load_tensors(network, load_file(folder / "weights.safetensors"))
    network.train()
    backbone = network.backbone
    parts.watch("vision", backbone.visual)
    for layer in backbone.language_model.layers:
        parts.watch("decoder layers", layer)
    parts.watch("LM head", backbone.model.lm_head)
    parts.watch("rest of the backbone", backbone)
    watch_head(parts, network.action_head)
    batch = load_file(folder / "batch.safetensors")
    noise, flow_time = batch.pop("noise"), batch.pop("time")
    optimizer = gr00t_upstream.stock_optimizer(network, lr=LR, weight_decay=WEIGHT_DECAY)
    return network, lambda: gr00t_upstream.loss(network, batch, noise, flow_time), optimizer


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    # the answers alone go to the parent: libraries print warnings of their own
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parts = Parts()
    if side == "upstream":
        network, forward, optimizer = upstream(folder, parts)
    else:
        network, forward, optimizer = ours(folder, parts, slots=side == "ours-slots")
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    autocast = json.loads((folder / "settings.json").read_text())["autocast"]

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = parts.timed("rest of the forward", forward)()
        parts.timed("backward", loss.backward)()
        parts.timed("clip", torch.nn.utils.clip_grad_norm_)(trained, 1.0)
        parts.timed("AdamW", optimizer.step)()
        return float(loss.detach())

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        network.eval()
        loss = float(forward())  # without dropout, to compare
        network.train()
    ready = {"torch": torch.__version__, "trained": sum(p.numel() for p in trained), "loss": loss}
    print(json.dumps(ready), file=answers, flush=True)
    for _ in sys.stdin:
        parts.wall.clear()
        parts.cpu.clear()
        loss = step()
        print(json.dumps({"loss": loss, "wall": parts.wall, "cpu": parts.cpu}), file=answers, flush=True)


if __name__ == "__main__":
    main()
