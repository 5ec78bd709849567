"""The public port of GR00T N1.7 in LeRobot, built with any sizes; only for the environment that has LeRobot.

    python3.12 -m venv upstream
    upstream/bin/pip install "lerobot[groot]==0.6.1"

Nothing of it is imported by the code of this repository. Sizes are the plain values of `GR00TN17Config.to_dict`.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built from sizes; no name is ever looked up


def qwen_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `transformers`' Qwen3VLConfig for the section `backbone`."""
    backbone = sizes["backbone"]
    text, vision = dict(backbone["text"]), dict(backbone["vision"])
    text["rope_scaling"] = {
        "mrope_interleaved": True,
        "mrope_section": list(text.pop("mrope_section")),
        "rope_type": "default",
    }
    text |= {"hidden_act": "silu", "tie_word_embeddings": True}
    vision.pop("rope_theta")
    vision["deepstack_visual_indexes"] = list(vision["deepstack_visual_indexes"])
    vision |= {"hidden_act": "gelu_pytorch_tanh", "out_hidden_size": text["hidden_size"]}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
        **{name: backbone[name] for name in ids},
    }


@contextmanager
def backbone_folder(sizes: Mapping[str, Any]) -> Iterator[Path]:
    """A folder that stands for `model_name`: upstream reads the backbone's sizes from its config.json."""
    from transformers import Qwen3VLConfig

    with tempfile.TemporaryDirectory() as folder:
        Qwen3VLConfig(**qwen_config(sizes)).save_pretrained(folder)
        yield Path(folder)


def network_config(sizes: Mapping[str, Any], model_name: str) -> Any:
    """Upstream's configuration; attention stays on SDPA, weights on float32."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17Config

    own = {"backbone", "extra", "strict_action_padding_mask"}
    values = {key: value for key, value in sizes.items() if key not in own}
    fixed = {"model_name": model_name, "use_flash_attention": False, "load_bf16": False}
    return GR00TN17Config(**{**values, **fixed})


def upstream_network(sizes: Mapping[str, Any]) -> nn.Module:
    """The upstream class in float32 with the random weights of its constructors."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17

    with backbone_folder(sizes) as folder:
        return GR00TN17(network_config(sizes, str(folder)), load_backbone_weights=False).float()


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put named weights in; the only name that may be absent is the LM head, which is tied to the embedding."""
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    if unexpected or any(not name.endswith("lm_head.weight") for name in missing):
        raise ValueError(f"missing {missing}, unexpected {unexpected}")


@contextmanager
def injected(head: nn.Module, noise: Tensor | None = None, time: Tensor | None = None) -> Iterator[None]:
    """Make the action head use this noise and time: it asks `torch.randn` once and its own `sample_time` once."""
    randn, sample_time = torch.randn, head.sample_time
    if noise is not None:
        torch.randn = lambda *size, **options: noise.clone()
    if time is not None:
        head.sample_time = lambda *size, **options: time.clone()
    try:
        yield
    finally:
        torch.randn = randn
        head.__dict__.pop("sample_time", None)
        assert head.sample_time == sample_time


def loss(network: nn.Module, batch: Mapping[str, Any], noise: Tensor, time: Tensor) -> Tensor:
    """Upstream's training loss of a batch with given noise [B, H, A] and time [B]."""
    with injected(network.action_head, noise, time):
        return network(dict(batch))["loss"]


def stock_optimizer(network: nn.Module, *, lr: float, weight_decay: float, eps: float = 1e-8) -> torch.optim.AdamW:
    """AdamW in the two groups that `transformers`' Trainer makes of a model."""
    from transformers import Trainer

    decay = set(Trainer.get_decay_parameter_names(None, network))
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decay], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=eps)


def train(folder: Path) -> list[float]:
    """Train from weights.safetensors on the batches of a folder by its settings.json; the loss of every step."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "settings.json").read_text())
    network = upstream_network(json.loads((folder / "sizes.json").read_text()))
    load_tensors(network, load_file(folder / "weights.safetensors"))
    network.train()
    optimizer = stock_optimizer(network, lr=0.0, weight_decay=settings["weight_decay"], eps=settings["eps"])
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    losses = []
    for rate, file in zip(settings["rates"], sorted(folder.glob("batch-*.safetensors")), strict=True):
        batch = load_file(file)
        value = loss(network, batch, batch.pop("noise"), batch.pop("time"))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings["clip"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(value.item())
    return losses


def act(folder: Path) -> dict[str, Tensor]:
    """LeRobot's policy and its processors on the checkpoint `out`, fed with the inputs of ours.safetensors.

    State and actions go through the steps LeRobot makes of the folder's files. Prompt ids and patches are taken as they
    are: the step that makes them needs a tokenizer that no checkpoint holds.
    """
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.groot import groot_n1_7
    from lerobot.policies.groot.configuration_groot import GrootConfig
    from lerobot.policies.groot.modeling_groot import GrootPolicy
    from lerobot.policies.groot.processor_groot import GrootN17PackInputsStep, make_groot_pre_post_processors
    from safetensors.torch import load_file
    from transformers import Qwen3VLConfig

    out, given = folder / "out", load_file(folder / "ours.safetensors")
    sizes = json.loads((out / "config.json").read_text())
    # Where the released sizes are written down for the gated name, those of the tiny checkpoint stand.
    groot_n1_7._cosmos_reason2_qwen3_vl_config = lambda: Qwen3VLConfig(**qwen_config(sizes))
    action_dim = given["actions"].shape[-1]
    config = GrootConfig(
        base_model_path=str(out),
        embodiment_tag="new_embodiment",
        max_state_dim=sizes["max_state_dim"],
        max_action_dim=sizes["max_action_dim"],
        chunk_size=sizes["action_horizon"],
        n_action_steps=given["actions"].shape[1],
        device="cpu",
        use_bf16=False,
        input_features={
            "observation.images.front": PolicyFeature(type=FeatureType.VISUAL, shape=(3, 240, 320)),
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(action_dim,)),
        },
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(action_dim,))},
    )
    policy = GrootPolicy.from_pretrained(str(out), config=config)
    before, after = make_groot_pre_post_processors(config)
    pack = next(step for step in before.steps if isinstance(step, GrootN17PackInputsStep))
    packed = pack(
        {
            TransitionKey.OBSERVATION: {"observation.state": given["raw_state"]},
            TransitionKey.COMPLEMENTARY_DATA: {"task": [""] * len(given["raw_state"])},
        }
    )
    batch = {name: given[name] for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}
    batch["state"] = packed[TransitionKey.OBSERVATION]["state"]
    batch["embodiment_id"] = packed[TransitionKey.COMPLEMENTARY_DATA]["embodiment_id"].long()
    network = policy._groot_model
    with injected(network.action_head, given["noise"]):
        chunk = network.get_action(dict(batch))["action_pred"]
    with injected(network.action_head, given["noise"]):
        actions = after(policy.predict_action_chunk(batch))
    return {"state": batch["state"], "chunk": chunk, "actions": actions}


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["train", folder]:
            (Path(folder) / "curve.json").write_text(json.dumps(train(Path(folder))))
        case ["act", folder]:
            from safetensors.torch import save_file

            tensors = {name: tensor.contiguous() for name, tensor in act(Path(folder)).items()}
            save_file(tensors, str(Path(folder) / "theirs.safetensors"))
        case _:
            raise SystemExit(__doc__)
