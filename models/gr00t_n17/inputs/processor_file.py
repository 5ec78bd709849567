"""processor_config.json, statistics.json and embodiment_id.json in the layout of a released checkpoint."""

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.inputs.embodiments import merge
from models.gr00t_n17.inputs.image_settings import image_options

if TYPE_CHECKING:
    from models.gr00t_n17.inputs.mixed import MixedProcessor
    from models.gr00t_n17.inputs.processor import Processor

logger = logging.getLogger(__name__)

OURS = "training"
"""Key beside processor_kwargs for what the released layout has no place for; other readers leave it alone."""

# Settings under the names of processor_kwargs, and what stands for an absent key.
_SAME = {
    "use_percentiles": False,
    "clip_outliers": True,
    "use_relative_action": False,
    "apply_sincos_state_encoding": False,
    "exclude_state": False,
    "state_dropout_prob": 0.0,
    "formalize_language": True,
}
_IMAGES = (
    "shortest_image_edge",
    "crop_fraction",
    "image_target_size",
    "image_crop_size",
    "letter_box_transform",
    "random_rotation_angle",
)
_JITTER = ("brightness", "contrast", "saturation", "hue")


def settings_of(kwargs: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that a checkpoint's processor_kwargs stand for.

    Args:
        ours: settings of the training run that wrote the file, for what processor_kwargs cannot say.

    Raises:
        ValueError: the file asks for a step that is not here; names its key.
    """
    settings = {name: kwargs.get(name, absent) for name, absent in _SAME.items()}
    if ours and all(kwargs.get(name) == ours.get(name) for name in _IMAGES):
        settings["color_jitter"] = image_options({"color_jitter_params": kwargs.get("color_jitter_params")})[
            "color_jitter"
        ]
    else:
        settings |= image_options(kwargs)
    if not ours:
        settings["tokenizer"] = kwargs.get("model_name") or "nvidia/Cosmos-Reason2-2B"
    return settings


def to_file(processor: "Processor | MixedProcessor", base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Content of processor_config.json.

    Args:
        base: that of the checkpoint the training started from: its keys that nothing here decides and its other
            embodiments stay.
    """
    settings, config = processor.processor_config, processor.config
    base = dict(base or {})
    kwargs = {
        "use_albumentations": True,
        "model_type": "qwen",
        "use_mean_std": False,
        **base.get("processor_kwargs", {}),
    }
    kwargs |= {name: getattr(settings, name) for name in (*_SAME, *_IMAGES)}
    jitter, configs = settings.color_jitter, kwargs.get("modality_configs", {})
    kwargs |= {
        "modality_configs": {
            **configs,
            **{part.embodiment: _config(part, configs.get(part.embodiment, {})) for part in processor.parts},
        },
        "color_jitter_params": dict(zip(_JITTER, jitter, strict=True)) if jitter else None,
        "model_name": config.model_name,
        "max_state_dim": config.max_state_dim,
        "max_action_dim": config.max_action_dim,
        "max_action_horizon": config.action_horizon,
    }
    described = processor.parts[0].to_dict()
    ours = {"processor": described["processor"], "tokenizer": described["tokenizer"]}
    file = {**base, "processor_class": "Gr00tN1d7Processor", "processor_kwargs": kwargs, OURS: ours}
    return dict(json.loads(json.dumps(file)))


def statistics_file(processor: "Processor | MixedProcessor", base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Content of statistics.json: the processor's embodiments replace those of their names in `base`."""
    out = dict(base or {})
    for part in processor.parts:
        empty: dict[str, Any] = {
            section: {} for section in out.get(part.embodiment, {})
        }  # sections stay, if with nothing in them
        out[part.embodiment] = {**empty, **part.statistics.to_dict()}
    return out


def embodiment_file(processor: "Processor | MixedProcessor", base: Mapping[str, int] | None = None) -> dict[str, int]:
    """Content of embodiment_id.json: `base`, the released tags it does not name, and the processor's own."""
    return {**merge(base or {}), **{part.embodiment: part.embodiment_id for part in processor.parts}}


def _config(part: "Processor", base: Mapping[str, Any]) -> dict[str, Any]:
    """A part's modality config over the checkpoint's: sections not read here stay, and further names of the text."""
    config = part.modalities.to_config()
    names = base.get("language", {}).get("modality_keys") or [None]
    same = {"language": base["language"]} if names[0] == part.modalities.language else {}
    return {**base, **config, **same}
