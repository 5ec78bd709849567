"""Make parity.safetensors: outputs and gradients of Diffusers' Cosmos3OmniTransformer, sample by sample, in float32.

Run in an environment of its own:
    python3.12 -m venv golden
    golden/bin/pip install "torch==2.11.*" "diffusers==0.39.*" "transformers==5.5.4" numpy safetensors
    golden/bin/python tests/models/cosmos3_policy/golden/make_parity_golden.py
Diffusers 0.42.1 with PyTorch 2.13 gives the same bits.
"""

from pathlib import Path
from typing import Any

import parity_case as case
import torch
from diffusers import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as pipeline
from safetensors.torch import save_file
from torch import Tensor

OUT = Path(__file__).with_name("parity.safetensors")


def positions(text: int, grid: tuple[int, int, int], rows: int, start: int, fps: float) -> Tensor:
    """[3, tokens] by the pipeline's own functions; `grid` counts patches."""
    parts = [pipeline.get_3d_mrope_ids_text_tokens(text, 0, use_float_positions=True)[0]]
    offset = text + 15000
    parts.append(pipeline.get_3d_mrope_ids_vae_tokens(*grid, offset, True, fps, 24.0)[0])
    if rows:
        parts.append(pipeline.get_3d_mrope_ids_vae_tokens(rows, 1, 1, offset, True, fps, 24.0, 1, 4, start)[0])
    return torch.cat([part.float() for part in parts], dim=1)


def patch_grid(sample: case.Sample) -> tuple[int, int, int]:
    frames, height, width = sample.grid
    return frames, -(-height // 2), -(-width // 2)


def arguments(sample: case.Sample) -> dict[str, Any]:
    """The call of the library's class for one sample."""
    grid = patch_grid(sample)
    patches = grid[1] * grid[2]
    vision = torch.arange(sample.text, sample.text + grid[0] * patches)
    frames = sample.vision_noisy().nonzero().flatten()
    noisy = vision.view(grid[0], patches)[frames].flatten()
    total = sample.text + len(vision) + sample.rows
    call: dict[str, Any] = {
        "input_ids": sample.text_ids(),
        "text_indexes": torch.arange(sample.text),
        "position_ids": positions(sample.text, grid, sample.rows, sample.start, sample.fps),
        "und_len": sample.text,
        "sequence_length": total,
        "vision_tokens": [sample.latents().unsqueeze(0)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": noisy,
        "vision_timesteps": torch.full((len(noisy),), 1000 * sample.sigma),
        "vision_noisy_frame_indexes": [frames],
    }
    if sample.rows:
        rows = sample.action_noisy().nonzero().flatten()
        action = torch.arange(total - sample.rows, total)
        call |= {
            "action_tokens": [sample.action()],
            "action_token_shapes": [(sample.rows, 1, 1)],
            "action_sequence_indexes": action,
            "action_mse_loss_indexes": action[rows],
            "action_timesteps": torch.full((len(rows),), 1000 * sample.sigma),
            "action_noisy_frame_indexes": [rows],
            "action_domain_ids": [torch.tensor(sample.domain)],
        }
    return call


def outputs(network: Cosmos3OmniTransformer, sample: case.Sample) -> tuple[list[Tensor], list[Tensor] | None]:
    """Velocities of video and actions; releases differ in what they are returned in."""
    found = network(**arguments(sample))
    return (found[0], found[2]) if isinstance(found, tuple) else (found.sample, found.action)


def main() -> None:
    network = Cosmos3OmniTransformer(**case.SIZES).float()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(case.weights(shapes))
    tensors: dict[str, Tensor] = {}
    inputs: list[Tensor] = []
    network.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[1].detach().clone()))
    for sample in case.SAMPLES:
        network.zero_grad(set_to_none=True)
        vision, action = outputs(network, sample)
        tensors[f"{sample.name}/tokens"] = inputs.pop()
        tensors[f"{sample.name}/vision"] = vision[0][0]
        tensors[f"{sample.name}/positions"] = arguments(sample)["position_ids"]
        loss = (vision[0][0] * case.values(sample.name + "/d_vision", vision[0][0].shape)).sum()
        if action is not None:
            tensors[f"{sample.name}/action"] = action[0]
            loss = loss + (action[0] * case.values(sample.name + "/d_action", action[0].shape)).sum()
        loss.backward()
        if sample is case.POLICY:
            for name, parameter in network.named_parameters():
                if parameter.grad is not None:
                    tensors[f"gradient/{name}"] = parameter.grad
    # Both samples of a pack: the sum of their gradients.
    network.zero_grad(set_to_none=True)
    for sample in (case.POLICY, case.COMMANDS):
        vision, action = outputs(network, sample)
        loss = (vision[0][0] * case.values(sample.name + "/d_vision", vision[0][0].shape)).sum()
        (loss + (action[0] * case.values(sample.name + "/d_action", action[0].shape)).sum()).backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            tensors[f"pack_gradient/{name}"] = parameter.grad
    # Only the trained half is compared, and the tables of the other half would be most of the file.
    trained = ("moe_gen", ".add_", "to_add_out", "norm_added", "proj_in", "proj_out", "time_embedder", "modality_embed")
    kept = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in tensors.items()
        if "gradient/" not in name or any(part in name for part in trained)
    }
    kept["recipe/positions"] = positions(150, (9, 17, 20), 33, 0, 15.0)
    save_file(kept, OUT)


if __name__ == "__main__":
    main()
