"""Keys of the `model` section: architecture, weights, precision, and how groups of values are treated."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ActionGroupConfig:
    """One named part of the action vector, in upstream's words."""

    rep: Literal["ABSOLUTE", "RELATIVE", "DELTA"] = "ABSOLUTE"
    """RELATIVE actions are turned into differences from the state at the observation, and back when they are used."""
    type: Literal["EEF", "NON_EEF"] = "NON_EEF"
    format: Literal["DEFAULT", "XYZ_ROT6D", "XYZ_ROTVEC"] = "DEFAULT"
    state_key: str | None = None
    """State group that a RELATIVE action is relative to; null means the one of the same name."""


@dataclass(frozen=True, kw_only=True)
class ModalityConfig:
    """Which named groups of modality.json the policy reads and predicts, in this order, and how.

    Given, it replaces what a checkpoint's processor_config.json says of its embodiment.
    """

    state: tuple[str, ...] | None = None
    """null means all of modality.json that lie in `data.state`."""
    action: dict[str, ActionGroupConfig] | None = None
    mean_std: tuple[str, ...] = ()
    """Groups normalised by mean and standard deviation instead of by their range."""
    sin_cos: tuple[str, ...] = ()
    """State groups of angles, given to the network as sine and cosine."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters in place of the full weights; needs the extra `lora`."""

    targets: tuple[Literal["llm", "vision", "dit", "vl_self_attention"], ...]
    rank: int = 16
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every model has; its `name` says which keys stand beside these."""

    name: str
    size: Literal["released", "tiny"] = "released"
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config class that differ from `size`."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's processor config that differ from its defaults."""
    weights: str | None = None
    """Checkpoint to start from: hub id, folder, s3://bucket/prefix or safetensors file; null trains from random
    weights. Sizes are those of the checkpoint's own files."""


@dataclass(frozen=True, kw_only=True)
class GR00TN17ModelConfig(ModelConfig):
    """GR00T N1.7. Normalisation and image path are those of a checkpoint's own files too."""

    name: Literal["gr00t_n17"] = "gr00t_n17"
    backbone_weights: str | None = None
    """Safetensors file for the backbone alone."""
    embodiment: str | None = None
    """Tag of the robot, such as new_embodiment or simpler_env_widowx: its slot and its settings in a checkpoint."""
    embodiment_id: int | None = None
    """Slot of the per-embodiment layers; null means that of `embodiment`, or of new_embodiment."""
    modality: ModalityConfig | None = None
    """Named groups of state and action; null means the checkpoint's for this embodiment, else whole columns."""
    precision: Literal["stock", "lean", "bf16"] = "stock"
    """`stock`: float32 weights, as upstream trains on one GPU. `lean`: frozen weights in bfloat16 and only the slots of
    the embodiments in use; the same numbers in less memory. `bf16`: all weights in bfloat16; not the same numbers."""
    lora: LoraConfig | None = None
    feature_cache: int | str = 0
    """Bound on local disk of the frozen backbone's outputs, kept by sample; for images without random augmentation. 0
    keeps none."""
    flow_draws: int = 1
    """Independent (noise, time) draws per sample; they share one pass through the backbone."""


@dataclass(frozen=True, kw_only=True)
class Cosmos3PolicyModelConfig(ModelConfig):
    """The Cosmos-3 policy: a generation tower, trained, beside an understanding tower that is frozen."""

    name: Literal["cosmos3_policy"] = "cosmos3_policy"
    vae: str | None = None
    """Folder of the video autoencoder; null takes `vae/` beside `weights`, or a small random one for size tiny."""
    compile_vae: bool = False
    """Compile the encoder too: once for the first frame of a clip and once for each length of the pieces after it."""
    keep_action_heads: bool = False
    """Start from the checkpoint's action heads; else they are drawn afresh, as for another robot."""
