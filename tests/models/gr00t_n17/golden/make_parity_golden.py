"""Make parity.safetensors and parity_step.safetensors: what the public port of the model answers on fixed weights.

Run in an environment of its own, on the CPU:
    python3.12 -m venv upstream
    upstream/bin/pip install "lerobot[groot]==0.6.1"
    OMP_NUM_THREADS=1 upstream/bin/python tests/models/gr00t_n17/golden/make_parity_golden.py

Float32 and SDPA throughout; dropout is off by the sizes. Weights and batches come from parity_case.py.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[3] / "benchmarks")]

import gr00t_upstream as upstream  # noqa: E402
import parity_case as case  # noqa: E402


def built(**changes: bool) -> torch.nn.Module:
    network = upstream.upstream_network({**case.SIZES, **changes})
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    upstream.load_tensors(network, case.weights(shapes))
    return network.train()


def forward_goldens() -> dict[str, Tensor]:
    network, out = built(), {}
    head = network.action_head
    with torch.no_grad():
        dit = {
            "hidden_states": case.normal("dit.x", 3, 8, 24),
            "encoder_hidden_states": case.normal("dit.context", 3, 13, 32),
            "timestep": torch.tensor([0, 437, 998]),
            "image_mask": torch.arange(13).expand(3, -1) % 3 == 1,
            "backbone_attention_mask": torch.arange(13) >= torch.tensor([[0], [2], [5]]),
        }
        out["dit"] = head.model(**dit)
        features = case.normal("adapter", 2, 13, 32)
        out["vlln"] = head.vlln(features)
        out["adapter"] = head.vl_self_attention(head.vlln(features))
        for name in case.BATCHES:
            batch = case.batch(name)
            noise, time = case.noise_and_time(name)
            features = network.backbone(network.prepare_input(batch)[0])
            out[f"{name}.features"] = features["backbone_features"]
            out[f"{name}.loss"] = upstream.loss(network, batch, noise, time)
            for key in ("action", "action_mask"):
                batch.pop(key)
            with upstream.injected(head, noise):
                out[f"{name}.sample"] = network.get_action(batch)["action_pred"]
    return out


def step_goldens() -> dict[str, Tensor]:
    """One optimiser step after clipping, stock switches: gradients before and weights behind it, head only."""
    network = built()
    optimizer = upstream.stock_optimizer(network, lr=1e-3, weight_decay=0.1)
    upstream.loss(network, case.batch("mixed"), *case.noise_and_time("mixed")).backward()
    named = {name: p for name, p in network.named_parameters() if p.requires_grad and p.grad is not None}
    out = {f"grad.{name}": p.grad.clone() for name, p in named.items()}
    before = {name: p.detach().clone() for name, p in named.items()}
    out["norm"] = torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
    optimizer.step()
    # Where nothing but weight decay acts the whole change is the same factor; gradients tell where that is.
    out |= {f"change.{name}": p.detach() - before[name] for name, p in named.items()}
    return out


def all_trained() -> dict[str, Tensor]:
    """Norm of every gradient and its product with a fixed direction, everything trained."""
    network = built(tune_llm=True, tune_visual=True)
    upstream.loss(network, case.batch("mixed"), *case.noise_and_time("mixed")).backward()
    out = {}
    for name, p in network.named_parameters():
        if p.grad is not None:
            direction = case.normal("direction." + name, *p.shape)
            out["all." + name] = torch.stack([p.grad.norm(), (p.grad * direction).sum()])
    return out


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    for file, tensors in {"parity": forward_goldens() | all_trained(), "parity_step": step_goldens()}.items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, str(HERE / f"{file}.safetensors"))
