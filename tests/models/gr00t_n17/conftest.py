"""A tiny checkpoint in the exact layout of the released one: names, orientation, shards, dtype and side files.

Names and shapes are written down here from the released layout, not taken from the network under test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

VISUAL, LANGUAGE = "backbone.model.model.visual.", "backbone.model.model.language_model."

SIZES: dict[str, Any] = {
    "text": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-06,
    },
    "vision": {
        "hidden_size": 32,
        "depth": 3,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [0, 1],
        "rope_theta": 10000.0,
    },
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "pad_token_id": 0,
}

CONFIG: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "transformers_version": "4.57.3",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "model_dtype": "bfloat16",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_model_type": "qwen",
    "select_layer": 3,
    "reproject_vision": False,
    "use_flash_attention": True,
    "load_bf16": True,
    "tune_llm": False,
    "tune_visual": False,
    "tune_top_llm_layers": 0,
    "tune_projector": True,
    "tune_diffusion_model": True,
    "tune_vlln": True,
    "backbone_embedding_dim": 64,
    "input_embedding_dim": 48,
    "hidden_size": 40,
    "max_state_dim": 24,
    "max_action_dim": 20,
    "action_horizon": 10,
    "state_history_length": 1,
    "max_num_embodiments": 32,
    "max_seq_len": 32,
    "add_pos_embed": True,
    "use_vlln": True,
    "use_vl_self_attention": True,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "output_dim": 40,
        "dropout": 0.2,
        "final_dropout": True,
        "interleave_self_attention": True,
        "norm_type": "ada_norm",
        "positional_embeddings": None,
    },
    "vl_self_attention_cfg": {
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "dropout": 0.2,
        "final_dropout": True,
        "positional_embeddings": None,
    },
    "num_inference_timesteps": 4,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
    "noise_s": 0.999,
    "num_timestep_buckets": 1000,
    "state_dropout_prob": 0.2,
    "attn_dropout": 0.2,
    "rtc_ramp_rate": 6.0,
    "shortest_image_edge": 256,
    "crop_fraction": 0.95,
    "image_crop_size": [230, 230],
    "image_target_size": [256, 256],
    "formalize_language": True,
    "apply_sincos_state_encoding": False,
    "use_percentiles": True,
    "use_mean_std": False,
    "use_relative_action": True,
    # not stored by a released checkpoint, whose backbone sizes follow from `model_name`
    "backbone": SIZES,
}


def _action(rep: str = "ABSOLUTE", kind: str = "NON_EEF", form: str = "DEFAULT", state: str | None = None) -> dict:
    return {"rep": rep, "type": kind, "format": form, "state_key": state}


def _modalities(video: list[str], state: dict[str, int], action: dict[str, tuple[int, dict]], horizon: int) -> dict:
    return {
        "video": {"delta_indices": [0], "modality_keys": video},
        "state": {"delta_indices": [0], "modality_keys": list(state)},
        "action": {
            "delta_indices": list(range(horizon)),
            "modality_keys": list(action),
            "action_configs": [config for _, config in action.values()],
        },
        "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
    }


STATE_DIMS: dict[str, dict[str, int]] = {
    "simpler_env_widowx": dict.fromkeys(("x", "y", "z", "roll", "pitch", "yaw", "pad", "gripper"), 1),
    "libero_sim": {"x": 1, "y": 1, "z": 1, "gripper": 2},
    "new_embodiment": {"single_arm": 5, "gripper": 1},
}
ACTIONS: dict[str, dict[str, tuple[int, dict]]] = {
    "simpler_env_widowx": dict.fromkeys(("x", "y", "z", "roll", "pitch", "yaw", "gripper"), (1, _action())),
    "libero_sim": dict.fromkeys(("x", "y", "z", "gripper"), (1, _action())),
    "new_embodiment": {"single_arm": (5, _action("RELATIVE", state="single_arm")), "gripper": (1, _action())},
}
CAMERAS = {
    "simpler_env_widowx": ["image_0"],
    "libero_sim": ["image", "wrist_image"],
    "new_embodiment": ["front", "wrist"],
}
HORIZON = 8

PROCESSOR: dict[str, Any] = {
    "processor_class": "Gr00tN1d7Processor",
    "processor_kwargs": {
        "modality_configs": {
            tag: _modalities(CAMERAS[tag], STATE_DIMS[tag], ACTIONS[tag], HORIZON) for tag in STATE_DIMS
        },
        "image_crop_size": [230, 230],
        "image_target_size": [256, 256],
        "use_albumentations": True,
        "random_rotation_angle": None,
        "color_jitter_params": {"brightness": 0.3, "contrast": 0.4, "saturation": 0.5, "hue": 0.08},
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "letter_box_transform": False,
        "model_name": "nvidia/Cosmos-Reason2-2B",
        "model_type": "qwen",
        "formalize_language": True,
        "max_state_dim": 24,
        "max_action_dim": 20,
        "max_action_horizon": 10,
        "use_percentiles": True,
        "use_mean_std": False,
        "clip_outliers": True,
        "apply_sincos_state_encoding": False,
        "use_relative_action": True,
        "exclude_state": False,
        "state_dropout_prob": 0.2,
        "key_of_a_later_version": {"kept": True},
    },
}

EMBODIMENT_IDS = {"simpler_env_widowx": 1, "libero_sim": 2, "new_embodiment": 10, "robot_of_a_later_version": 29}


def _numbers(*shape: int, seed: int) -> dict[str, list]:
    """Statistics of one group in their natural order: min < q01 < mean < q99 < max."""
    base = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    steps = {"min": -2.0, "max": 2.0, "mean": 0.1, "std": 0.7, "q01": -1.5, "q99": 1.4}
    return {name: (base * 0.3 + step).tolist() for name, step in steps.items()}


def statistics() -> dict[str, Any]:
    """statistics.json: tag -> modality -> group -> numbers [D], relative actions [horizon, D]."""
    out: dict[str, Any] = {}
    for seed, tag in enumerate(STATE_DIMS):
        groups = out[tag] = {"state": {}, "action": {}, "relative_action": {}}
        for key, dim in STATE_DIMS[tag].items():
            groups["state"][key] = _numbers(dim, seed=100 + seed)
        for key, (dim, config) in ACTIONS[tag].items():
            groups["action"][key] = _numbers(dim, seed=200 + seed)
            if config["rep"] == "RELATIVE":
                groups["relative_action"][key] = _numbers(HORIZON, dim, seed=300 + seed)
    return out


def upstream_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint with this config.json (its backbone sizes in `backbone`)."""
    text, vision = config["backbone"]["text"], config["backbone"]["vision"]
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, dim: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (dim,)

    def per_embodiment(name: str, into: int, out: int) -> None:
        shapes[f"{name}.W"] = (config["max_num_embodiments"], into, out)
        shapes[f"{name}.b"] = (config["max_num_embodiments"], out)

    v, t, merge = vision["hidden_size"], text["hidden_size"], vision["spatial_merge_size"] ** 2
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    shapes[f"{VISUAL}patch_embed.proj.weight"], shapes[f"{VISUAL}patch_embed.proj.bias"] = (v, *patch), (v,)
    shapes[f"{VISUAL}pos_embed.weight"] = (vision["num_position_embeddings"], v)
    for i in range(vision["depth"]):
        block = f"{VISUAL}blocks.{i}."
        norm(f"{block}norm1", v)
        norm(f"{block}norm2", v)
        linear(f"{block}attn.qkv", 3 * v, v)
        linear(f"{block}attn.proj", v, v)
        linear(f"{block}mlp.linear_fc1", vision["intermediate_size"], v)
        linear(f"{block}mlp.linear_fc2", v, vision["intermediate_size"])
    mergers = [(f"{VISUAL}merger.", v)]
    mergers += [
        (f"{VISUAL}deepstack_merger_list.{i}.", merge * v) for i in range(len(vision["deepstack_visual_indexes"]))
    ]
    for merger, normed in mergers:
        norm(f"{merger}norm", normed)
        linear(f"{merger}linear_fc1", merge * v, merge * v)
        linear(f"{merger}linear_fc2", t, merge * v)

    shapes[f"{LANGUAGE}embed_tokens.weight"] = (text["vocab_size"], t)
    shapes[f"{LANGUAGE}norm.weight"] = (t,)
    head = text["head_dim"]
    for i in range(config["select_layer"]):
        layer = f"{LANGUAGE}layers.{i}."
        linear(f"{layer}self_attn.q_proj", text["num_attention_heads"] * head, t, bias=False)
        linear(f"{layer}self_attn.k_proj", text["num_key_value_heads"] * head, t, bias=False)
        linear(f"{layer}self_attn.v_proj", text["num_key_value_heads"] * head, t, bias=False)
        linear(f"{layer}self_attn.o_proj", t, text["num_attention_heads"] * head, bias=False)
        shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
        linear(f"{layer}mlp.gate_proj", text["intermediate_size"], t, bias=False)
        linear(f"{layer}mlp.up_proj", text["intermediate_size"], t, bias=False)
        linear(f"{layer}mlp.down_proj", t, text["intermediate_size"], bias=False)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (t,)

    vl, width, hidden = config["backbone_embedding_dim"], config["input_embedding_dim"], config["hidden_size"]
    dit, vlsa = config["diffusion_model_cfg"], config["vl_self_attention_cfg"]
    norm("action_head.vlln", vl)
    for i in range(vlsa["num_layers"]):
        block = f"action_head.vl_self_attention.transformer_blocks.{i}."
        norm(f"{block}norm1", vl)
        norm(f"{block}norm3", vl)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{block}attn1.{name}", vl, vl)
        linear(f"{block}ff.net.0.proj", 4 * vl, vl)
        linear(f"{block}ff.net.2", vl, 4 * vl)
    shapes["action_head.position_embedding.weight"] = (config["max_seq_len"], width)
    per_embodiment("action_head.state_encoder.layer1", config["max_state_dim"], hidden)
    per_embodiment("action_head.state_encoder.layer2", hidden, width)
    per_embodiment("action_head.action_encoder.W1", config["max_action_dim"], width)
    per_embodiment("action_head.action_encoder.W2", 2 * width, width)
    per_embodiment("action_head.action_encoder.W3", width, width)
    per_embodiment("action_head.action_decoder.layer1", hidden, hidden)
    per_embodiment("action_head.action_decoder.layer2", hidden, config["max_action_dim"])
    linear("action_head.model.timestep_encoder.timestep_embedder.linear_1", width, 256)
    linear("action_head.model.timestep_encoder.timestep_embedder.linear_2", width, width)
    for i in range(dit["num_layers"]):
        block = f"action_head.model.transformer_blocks.{i}."
        linear(f"{block}norm1.linear", 2 * width, width)
        linear(f"{block}attn1.to_q", width, width)
        for name in ("to_k", "to_v"):
            linear(f"{block}attn1.{name}", width, width if i % 2 else vl)
        linear(f"{block}attn1.to_out.0", width, width)
        linear(f"{block}ff.net.0.proj", 4 * width, width)
        linear(f"{block}ff.net.2", width, 4 * width)
    linear("action_head.model.proj_out_1", 2 * width, width)
    linear("action_head.model.proj_out_2", dit["output_dim"], width)
    return shapes


def _write(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 3,
    lm_head: bool = False,
    processor: bool = True,
) -> Path:
    """Write a checkpoint with random weights; `config` changes keys of config.json, `processor` adds the side files."""
    values = {**CONFIG, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in upstream_shapes(values).items():
        scale, shift = (0.05, 1.0) if "norm" in name and name.endswith("weight") else (0.08, 0.0)
        tensors[name] = (torch.randn(shape, generator=generator) * scale + shift).to(dtype)
    if lm_head:
        tensors["backbone.model.lm_head.weight"] = tensors[f"{LANGUAGE}embed_tokens.weight"].clone()
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[part * len(names) // shards : (part + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
        (folder / "statistics.json").write_text(json.dumps(statistics(), indent=2) + "\n")
        (folder / "embodiment_id.json").write_text(json.dumps(EMBODIMENT_IDS, indent=2) + "\n")
    return folder


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """`write_checkpoint(folder, config={...}, seed=, dtype=, shards=, lm_head=, processor=)`; see `_write`."""
    return _write


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all tests that only read it: bf16, three shards, three embodiments in its processor file."""
    return _write(tmp_path_factory.mktemp("gr00t") / "checkpoint")


@pytest.fixture(scope="session")
def tensor_shapes() -> Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]:
    """Names and shapes that a config.json stands for, written down from the released layout."""
    return upstream_shapes
