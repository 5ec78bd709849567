"""Write unipc.json: what the UniPC scheduler of Diffusers makes of a made-up velocity, step by step.

Environment, and the command in it (about a second):

    python3 -m venv oracle && oracle/bin/pip install torch diffusers==0.39.0 transformers
    oracle/bin/python make_unipc.py
"""

import json
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

CASES = ((1, 5.0), (2, 5.0), (4, 5.0), (4, 1.0), (10, 3.0))


def velocity(x: Tensor, timestep: float, clean: Tensor) -> Tensor:
    """Smooth, not linear in x, and of another strength at every timestep, as the network's is."""
    return x - clean * (1.0 + 0.2 * torch.sin(3.0 * x)) + 0.1 * torch.cos(torch.tensor(timestep / 100.0))


def solve(scheduler: UniPCMultistepScheduler, start: Tensor, clean: Tensor) -> dict:
    states, x = [], start
    for timestep in scheduler.timesteps:
        x = scheduler.step(velocity(x, float(timestep), clean), timestep, x, return_dict=False)[0]
        states.append(x[0].tolist())
    return {"sigmas": scheduler.sigmas.tolist(), "timesteps": scheduler.timesteps.tolist(), "states": states}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    start, clean = torch.randn(1, 12, generator=generator), torch.randn(1, 12, generator=generator)
    cases = []
    for steps, shift in CASES:
        options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        own = UniPCMultistepScheduler(**options, flow_shift=shift)
        own.set_timesteps(steps)
        cases.append({"grid": "diffusers", "steps": steps, "shift": shift, **solve(own, start, clean)})
        # the grid of the policy server: its scheduler spaces sigma from 0.999 to 0 before the shift
        even = [0.999 * (1.0 - k / steps) for k in range(steps)]
        served = UniPCMultistepScheduler(**options, flow_shift=shift)
        served.set_timesteps(sigmas=torch.tensor(even, dtype=torch.float64).numpy())
        cases.append({"grid": "server", "steps": steps, "shift": shift, **solve(served, start, clean)})
    found = {"start": start[0].tolist(), "clean": clean[0].tolist(), "cases": cases}
    Path(__file__).with_name("unipc.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
