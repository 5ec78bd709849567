"""What a tensor is called by Diffusers, which is its name here, and by the framework NVIDIA trains with.

Both layouts hold the same tensors in the same shapes, so a name is all that changes. The framework's checkpoints put
`net.` before a name, `net_ema.` before that of an average, and `model.net.` in exported safetensors.
"""

import re

from models.cosmos3_policy.parallelize import ACTION_HEADS

NET, AVERAGE, EXPORTED = "net.", "net_ema.", "model.net."
ABSENT = ("audio_proj_in.", "audio_proj_out.", "audio_modality_embed", "model.visual.", "language_model.visual.")
"""Beginnings of names, in either layout, of what a released network may have and the policy has not: sound, and the
encoder of images, which never enter its caption tower."""

# (framework, Diffusers): what a name begins with
_HEADS = (
    ("language_model.model.", ""),  # embed_tokens, layers, norm, norm_moe_gen
    ("language_model.lm_head.", "lm_head."),
    ("vae2llm.", "proj_in."),
    ("llm2vae.", "proj_out."),
    ("time_embedder.mlp.0.", "time_embedder.linear_1."),
    ("time_embedder.mlp.2.", "time_embedder.linear_2."),
    ("action2llm.", "action_proj_in."),
    ("llm2action.", "action_proj_out."),
    ("action_modality_embed", "action_modality_embed"),
    ("sound2llm.", "audio_proj_in."),
    ("llm2sound.", "audio_proj_out."),
    ("sound_modality_embed", "audio_modality_embed"),
)
_TOWER = re.compile(r"(embed_tokens|layers|norm|norm_moe_gen)\.")
# (framework, Diffusers): a part of the attention of a layer
_ATTENTION = {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "o_proj": "to_out",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
    "q_proj_moe_gen": "add_q_proj",
    "k_proj_moe_gen": "add_k_proj",
    "v_proj_moe_gen": "add_v_proj",
    "o_proj_moe_gen": "to_add_out",
    "q_norm_moe_gen": "norm_added_q",
    "k_norm_moe_gen": "norm_added_k",
}
_FROM_DIFFUSERS = {ours: theirs for theirs, ours in _ATTENTION.items()}
_PART = re.compile(r"(?<=\.self_attn\.)[^.]+")
# What torch.compile and activation checkpointing put into the names of a module they wrap.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def to_framework(name: str) -> str:
    """The framework's name of a tensor, without prefix, by its Diffusers name.

    Raises:
        ValueError: the network has no such tensor.
    """
    if _TOWER.match(name):
        return "language_model.model." + _renamed(name, _FROM_DIFFUSERS)
    for theirs, ours in _HEADS:
        if ours and name.startswith(ours):
            return theirs + name[len(ours) :]
    raise ValueError(f"{name}: no tensor of a Cosmos-3 transformer in Diffusers' layout")


def from_framework(name: str) -> str:
    """The Diffusers name of a tensor by the framework's, with or without prefix and wrappers.

    Raises:
        ValueError: the policy has no such tensor.
    """
    bare = strip(name)
    for theirs, ours in _HEADS:
        if bare.startswith(theirs):
            rest = bare[len(theirs) :]
            if ours == "" and not _TOWER.match(rest):
                break
            return ours + (_renamed(rest, _ATTENTION) if ours == "" else rest)
    raise ValueError(f"{name}: no tensor of the policy in the framework's layout")


def strip(name: str) -> str:
    """A framework name without what stands before it and without wrappers in it."""
    for prefix in (EXPORTED, AVERAGE, NET):
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return _WRAPPERS.sub("", name)


def is_framework(name: str) -> bool:
    """Whether a name is of the framework's layout: both have the bare `action_modality_embed`."""
    return name.startswith((NET, AVERAGE, EXPORTED)) or strip(name).startswith(
        tuple(theirs for theirs, ours in _HEADS if theirs != ours)
    )


def is_action_head(name: str) -> bool:
    """Whether a Diffusers name is that of an action head or of the embedding of action tokens."""
    return name.startswith(ACTION_HEADS)


def _renamed(name: str, parts: dict[str, str]) -> str:
    match = _PART.search(name)
    if match is None:
        return name
    if match[0] not in parts:
        raise ValueError(f"{name}: attention has no part {match[0]}")
    return name[: match.start()] + parts[match[0]] + name[match.end() :]
