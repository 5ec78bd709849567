"""Configuration of GR00T N1.7 by the field names of a checkpoint's config.json; defaults are the released 3B shape."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from models.gr00t_n17 import config_check

logger = logging.getLogger(__name__)

# Keys that are kept for a checkpoint and change nothing here; see `GR00TN17Config`.
KEPT_ONLY = (
    "model_dtype",
    "use_flash_attention",
    "load_bf16",
    "shortest_image_edge",
    "crop_fraction",
    "image_crop_size",
    "image_target_size",
    "formalize_language",
    "apply_sincos_state_encoding",
    "use_percentiles",
    "use_mean_std",
    "use_relative_action",
)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Qwen3-VL decoder sizes (released: Qwen3-VL-2B). `num_hidden_layers` counts the layers of the source model."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Qwen3-VL vision tower sizes. `num_position_embeddings` is a square table, resampled to every patch grid."""

    hidden_size: int = 1024
    depth: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (5, 11, 17)
    rope_theta: float = 1e4


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Sizes behind `model_name`, which a checkpoint does not store, and the special token ids of its tokenizer."""

    text: TextConfig = TextConfig()
    vision: VisionConfig = VisionConfig()
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    pad_token_id: int = 151643


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """`diffusion_model_cfg` of the checkpoint."""

    num_layers: int = 32
    num_attention_heads: int = 32
    attention_head_dim: int = 48
    output_dim: int = 1024
    dropout: float = 0.2
    final_dropout: bool = True
    interleave_self_attention: bool = True
    norm_type: str = "ada_norm"
    positional_embeddings: str | None = None


@dataclass(frozen=True, kw_only=True)
class VLSelfAttentionConfig:
    """`vl_self_attention_cfg` of the checkpoint; zero layers leave the part out."""

    num_layers: int = 4
    num_attention_heads: int = 32
    attention_head_dim: int = 64
    dropout: float = 0.2
    final_dropout: bool = True
    positional_embeddings: str | None = None


@dataclass(frozen=True, kw_only=True)
class GR00TN17Config:
    """Every key of the released config.json plus `backbone`, the sizes its `model_name` stands for.

    Some keys do not shape the network and are only kept so that a checkpoint is written back complete:
    `model_dtype`, `load_bf16` and `use_flash_attention` (how upstream loads and runs it), and the keys of the image and
    state path (`shortest_image_edge` ... `use_mean_std`), over which processor_config.json decides.

    Raises ValueError listing every inconsistent field. Nested sections may be given as mappings of changes.
    """

    model_type: str = "Gr00tN1d7"
    model_dtype: str = "bfloat16"
    model_name: str = "nvidia/Cosmos-Reason2-2B"
    backbone_model_type: str = "qwen"
    select_layer: int = 16
    reproject_vision: bool = False
    use_flash_attention: bool = True
    load_bf16: bool = True

    tune_llm: bool = False
    tune_visual: bool = False
    tune_top_llm_layers: int = 0
    tune_projector: bool = True
    tune_diffusion_model: bool = True
    tune_vlln: bool = True

    backbone_embedding_dim: int = 2048
    input_embedding_dim: int = 1536
    hidden_size: int = 1024
    max_state_dim: int = 132
    max_action_dim: int = 132
    action_horizon: int = 40
    state_history_length: int = 1
    max_num_embodiments: int = 32
    max_seq_len: int = 1024
    add_pos_embed: bool = True
    use_vlln: bool = True
    use_alternate_vl_dit: bool = True
    attend_text_every_n_blocks: int = 2
    diffusion_model_cfg: DiTConfig = DiTConfig()
    vl_self_attention_cfg: VLSelfAttentionConfig = VLSelfAttentionConfig()

    num_inference_timesteps: int = 4
    noise_beta_alpha: float = 1.5
    noise_beta_beta: float = 1.0
    noise_s: float = 0.999
    num_timestep_buckets: int = 1000
    state_dropout_prob: float = 0.2
    strict_action_padding_mask: bool = False

    shortest_image_edge: int | None = 256
    crop_fraction: float | None = 0.95
    image_crop_size: tuple[int, int] | None = (230, 230)
    image_target_size: tuple[int, int] | None = (256, 256)
    formalize_language: bool = True
    apply_sincos_state_encoding: bool = False
    use_percentiles: bool = True
    use_mean_std: bool = False
    use_relative_action: bool = False

    backbone: BackboneConfig = BackboneConfig()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a checkpoint's config.json that nothing here reads; written back by `to_dict`."""

    def __post_init__(self) -> None:
        for key, kind in _SECTIONS.items():
            # Recipes give nested sections as mappings of what differs from the released values.
            object.__setattr__(self, key, _merge(kind(), getattr(self, key), key))
        problems = config_check.problems(self)
        if problems:
            raise ValueError("GR00TN17Config is inconsistent:\n  " + "\n  ".join(problems))

    @classmethod
    def tiny(cls, **overrides: Any) -> Self:
        """A model of under one million parameters that trains on a CPU; nested sections take mappings of changes.

        Sizes: a 64-wide copy of every part, 2 text layers, 2 vision blocks, 4 DiT blocks, no dropout, all trainable.
        """
        text = TextConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=1e4,
            mrope_section=(4, 2, 2),
            max_position_embeddings=1024,
        )
        vision = VisionConfig(
            hidden_size=64,
            depth=2,
            num_heads=4,
            intermediate_size=256,
            num_position_embeddings=144,
            deepstack_visual_indexes=(0,),
        )
        values: dict[str, Any] = {
            "model_name": "tiny",
            "model_dtype": "float32",
            "load_bf16": False,
            "use_flash_attention": False,
            "select_layer": 2,
            "tune_llm": True,
            "tune_visual": True,
            "backbone_embedding_dim": 64,
            "input_embedding_dim": 64,
            "hidden_size": 64,
            "max_state_dim": 32,
            "max_action_dim": 32,
            "action_horizon": 16,
            "max_num_embodiments": 4,
            "max_seq_len": 64,
            "diffusion_model_cfg": DiTConfig(
                num_layers=4, num_attention_heads=4, attention_head_dim=16, output_dim=64, dropout=0.0
            ),
            "vl_self_attention_cfg": VLSelfAttentionConfig(
                num_layers=1, num_attention_heads=4, attention_head_dim=16, dropout=0.0
            ),
            "state_dropout_prob": 0.0,
            "shortest_image_edge": None,
            "crop_fraction": None,
            "backbone": BackboneConfig(
                text=text,
                vision=vision,
                pad_token_id=0,
                im_start_token_id=1,
                im_end_token_id=2,
                vision_start_token_id=3,
                vision_end_token_id=4,
                image_token_id=5,
                video_token_id=6,
            ),
        }
        for key, value in overrides.items():
            values[key] = _merge(values[key], value, key) if key in values else value
        return cls(**values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a checkpoint's config.json: unknown keys go to `extra`, missing ones take released values, both logged.

        Raises ValueError when `model_name` is none whose sizes are known and there is no `backbone` section.
        """
        values = dict(values)
        extra = dict(values.pop("extra", {}))
        if "backbone" not in values and "Cosmos-Reason2-2B" not in str(values.get("model_name", cls.model_name)):
            raise ValueError(
                f"model_name={values['model_name']!r}: sizes are only known for nvidia/Cosmos-Reason2-2B; "
                "add a `backbone` section with the text and vision sizes of this model"
            )
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        unknown = {key: values.pop(key) for key in list(values) if key not in known}
        missing = sorted(known - set(values) - {"backbone"})
        if unknown:
            logger.info("config keys not read by this implementation, kept as they are: %s", ", ".join(sorted(unknown)))
        if missing:
            defaults = {f.name: f.default for f in dataclasses.fields(cls)}
            logger.info(
                "config keys absent, released values taken: %s", ", ".join(f"{k}={defaults[k]}" for k in missing)
            )
        sections: dict[str, Any] = {}
        for key, kind in _SECTIONS.items():
            if key in values:
                section = values.pop(key)
                sections[key] = section if isinstance(section, kind) else _read_section(kind, section or {}, key, extra)
        for key in ("image_crop_size", "image_target_size"):
            if isinstance(values.get(key), list):
                values[key] = tuple(values[key])
        return cls(**values, **sections, extra={**extra, **unknown})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in the layout of config.json, keys of `extra` in their place; inverse of `from_dict`."""
        values = dataclasses.asdict(self)
        extra = values.pop("extra")
        for name, value in extra.items():
            target, _, key = name.rpartition(".")
            section = values
            for part in target.split(".") if target else ():
                section = section[part]
            section[key] = value
        return json.loads(json.dumps(values))


_SECTIONS: dict[str, type] = {
    "diffusion_model_cfg": DiTConfig,
    "vl_self_attention_cfg": VLSelfAttentionConfig,
    "backbone": BackboneConfig,
}


def _merge(current: Any, change: Any, key: str) -> Any:
    """A nested section updated by a mapping of changes; anything else is replaced."""
    if not dataclasses.is_dataclass(current) or not isinstance(change, Mapping):
        return tuple(change) if isinstance(current, tuple) else change
    fields = [f.name for f in dataclasses.fields(current)]
    for name in change:
        if name not in fields:
            raise ValueError(f"{key}.{name} is no setting; allowed: {', '.join(fields)}")
    changes = {name: _merge(getattr(current, name), value, f"{key}.{name}") for name, value in change.items()}
    return dataclasses.replace(current, **changes)


def _read_section(kind: type, values: Mapping[str, Any], path: str, extra: dict[str, Any]) -> Any:
    """One nested section; its unknown keys are collected in `extra` under their dotted name."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            extra[f"{path}.{key}"] = value
            logger.info("config key %s.%s=%r is not read by this implementation, kept as it is", path, key, value)
        elif dataclasses.is_dataclass(fields[key].default):
            arguments[key] = _read_section(type(fields[key].default), value, f"{path}.{key}", extra)
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    missing = [name for name in fields if name not in values]
    if missing:
        logger.info("config keys absent in %s, released values taken: %s", path, ", ".join(missing))
    return kind(**arguments)
