"""Configuration of the Cosmos-3 policy by the keys of Diffusers' transformer/config.json; defaults are Nano's shape."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

logger = logging.getLogger(__name__)

LATENT_STRIDE = 4
"""Frames of video behind one latent frame of the Wan 2.2 VAE, after the first one."""
_RELEASED_SECTION = (24, 20, 20)


@dataclass(frozen=True, kw_only=True)
class Cosmos3PolicyConfig:
    """Every key of the released transformer/config.json that shapes the network.

    Keys of parts that a policy does not run (sound) are kept and written back, and the parts are not built.

    Raises:
        ValueError: listing every inconsistent field.
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    vocab_size: int = 151936

    rope_theta: float = 5e6
    rope_axes_dim: tuple[int, int, int] = _RELEASED_SECTION
    """Frequency slots of time, row and column; together head_dim / 2."""
    base_fps: int = 24
    """Positions in time count frames at this rate, divided by the latent stride."""
    enable_fps_modulation: bool = True
    unified_3d_mrope_reset_spatial_ids: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15000
    """Positions between the last text token and the first latent frame."""

    latent_channel: int = 48
    latent_patch_size: int = 2
    patch_latent_dim: int = 192
    timestep_scale: float = 1e-3
    """A time of 1000 sigma times this is what the network embeds."""

    action_gen: bool = True
    action_dim: int = 64
    """Width to which raw actions are padded with zeros."""
    num_embodiment_domains: int = 32

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a checkpoint's config.json that nothing here reads; written back by `to_dict`."""

    def __post_init__(self) -> None:
        if isinstance(self.rope_axes_dim, list):
            object.__setattr__(self, "rope_axes_dim", tuple(self.rope_axes_dim))
        found = self._problems()
        if found:
            raise ValueError("Cosmos3PolicyConfig is inconsistent:\n  " + "\n  ".join(found))

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A model of 208,176 parameters that trains on a CPU: 64 wide, 2 layers, 4 latent channels, actions of 8."""
        values: dict[str, Any] = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "vocab_size": 256,
            "rope_theta": 1e4,
            "rope_axes_dim": (4, 2, 2),
            "latent_channel": 4,
            "patch_latent_dim": 16,
            "action_dim": 8,
            "num_embodiment_domains": 4,
        }
        return cls(**{**values, **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read transformer/config.json: unknown keys go to `extra`, absent ones take released values, with a log line.

        The slots of the rotary axes may stand under `rope_scaling.mrope_section` alone, and `action_dim` may be null
        where there are no action heads.

        Raises:
            ValueError: listing every inconsistent field, and every key that asks for another network than this one.
        """
        values = dict(values)
        extra = dict(values.pop("extra", {}))
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        arguments = {key: value for key, value in values.items() if key in known}
        extra.update({key: value for key, value in values.items() if key not in known})
        if others := [
            f"{key} = {extra[key]!r}: only {only!r} is built"
            for key, only in _ONLY.items()
            if extra.get(key, only) != only
        ]:
            raise ValueError("\n  ".join(["this is another network than the Cosmos-3 policy:", *others]))
        for key in ("rope_axes_dim", "action_dim"):
            if arguments.get(key, 0) is None:
                del arguments[key]
        # The section counts where the key itself is not there, as in Diffusers.
        section = (values.get("rope_scaling") or {}).get("mrope_section")
        if section is not None:
            arguments.setdefault("rope_axes_dim", section)
        # Diffusers leaves the heads out unless they are asked for.
        arguments.setdefault("action_gen", False)
        unread = sorted(key for key in extra if not key.startswith("_") and key not in _KNOWN_UNREAD)
        if unread:
            logger.info("config keys not read by this implementation, kept as they are: %s", ", ".join(unread))
        missing = sorted(known - set(arguments))
        if missing:
            defaults = {f.name: f.default for f in dataclasses.fields(cls)}
            taken = ", ".join(f"{key}={defaults[key]}" for key in missing)
            logger.info("config keys absent, released values taken: %s", taken)
        return cls(**arguments, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The values of a transformer/config.json, JSON types only; Diffusers' class reads them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        scaling = dict(self.extra.get("rope_scaling") or {})
        # Releases of Diffusers before `rope_axes_dim` take the slots of the axes from this section.
        values["rope_scaling"] = {**scaling, "mrope_section": list(self.rope_axes_dim)}
        kept = {key: value for key, value in self.extra.items() if key != "rope_scaling"}
        return json.loads(json.dumps({"_class_name": "Cosmos3OmniTransformer", **kept, **values}))

    def _problems(self) -> list[str]:
        """Every inconsistency at once, each naming the keys to change."""
        found: list[str] = []

        def need(condition: bool, message: str) -> None:
            if not condition:
                found.append(message)

        counts = [f.name for f in dataclasses.fields(self) if type(f.default) is int]
        for name in counts:
            value, least = getattr(self, name), 0 if name == "unified_3d_mrope_temporal_modality_margin" else 1
            number = type(value) is int or (name == "base_fps" and type(value) is float)
            need(number and value >= least, f"{name} = {value!r} must be a whole number, at least {least}")
        for name in ("rope_theta", "rms_norm_eps", "timestep_scale"):
            value = getattr(self, name)
            need(type(value) in (int, float) and value > 0, f"{name} = {value!r} must be a number above 0")
        slots = self.rope_axes_dim
        need(
            type(slots) is tuple and all(type(n) is int and n >= 0 for n in slots),
            f"rope_axes_dim = {slots!r} must be a list of whole numbers",
        )
        if found:  # what follows computes with them
            return found
        half = self.head_dim // 2
        axes = self.rope_axes_dim
        need(self.head_dim % 2 == 0, f"head_dim = {self.head_dim} must be even")
        need(
            len(axes) == 3 and sum(axes) == half,
            f"rope_axes_dim = {list(axes)} must be three numbers that add up to head_dim / 2 = {half}",
        )
        need(
            all(3 * n <= half for n in axes[1:]),
            f"rope_axes_dim = {list(axes)}: rows and columns take every third slot, so 3 * {max(axes[1:], default=0)} "
            f"must be at most head_dim / 2 = {half}",
        )
        need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads = {self.num_attention_heads} must be a multiple of num_key_value_heads = "
            f"{self.num_key_value_heads}",
        )
        patch = self.latent_channel * self.latent_patch_size**2
        need(
            self.patch_latent_dim == patch,
            f"patch_latent_dim = {self.patch_latent_dim} must be latent_channel * latent_patch_size^2 = {patch}",
        )
        need(self.attention_dropout == 0, f"attention_dropout = {self.attention_dropout}: only 0 is built")
        need(not self.attention_bias, "attention_bias = true: only false is built")
        need(
            self.unified_3d_mrope_reset_spatial_ids,
            "unified_3d_mrope_reset_spatial_ids = false: only true is built, rows and columns count from 0",
        )
        return found


# Keys of parts that are not built, or that say how Diffusers loads the file; no word about them.
_KNOWN_UNREAD = frozenset(
    {"rope_scaling", "sound_dim", "sound_gen", "sound_latent_fps", "dtype", "use_und_k_norm_for_gen"}
)
# Keys of sibling networks (the small one's backbone), whose tensors may have the same names and shapes.
_ONLY = {"hidden_act": "silu", "qk_norm_for_text": True}
