"""Starting weights: a released network or one the framework trained, its action heads fresh unless they shall stay."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from models.common.dcp_tensors import DcpTensors
from models.common.placing import copy, fitting_report, place
from models.common.stored import StoredTensors
from models.cosmos3_policy.checkpoint import names
from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.layers.heads import DomainLinear
from models.cosmos3_policy.network import Cosmos3Policy

logger = logging.getLogger(__name__)


def load_weights(
    network: Cosmos3Policy,
    source: str | Path,
    *,
    keep_action_heads: bool = False,
    averaged: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Copy the weights of `source` into `network`; for a new training, never to continue one.

    All names and shapes are compared first, from the headers of the files. Then each tensor goes from its file to its
    place, so that beyond the network itself no more than one tensor is held in memory (of the framework's folders, that
    tensor and its part from one file). Parts the policy has not, sound and the encoder of images, are left out.

    Args:
        network: on a device, sharded or not, or on meta: parameters are then made on `device` as their values arrive.
        source: what `CheckpointFolder` takes, in Diffusers' names or the framework's.
        keep_action_heads: take the action heads and the action embedding of `source` too, to go on with the same robot
            or a similar one. Otherwise they are fresh, a function of `seed`, whether `source` has some or not.
        averaged: take the framework's averages (`net_ema.`) instead of its weights.
        seed: of fresh heads.
        device: where the parameters shall be; None leaves them where they are, those on meta go to the CPU.
        frozen_dtype: of the frozen parameters; None keeps the network's. bfloat16 is exact where the run computes in
            it: frozen weights are then rounded to it before every use.

    Raises:
        ValueError: one error that lists every missing, unexpected and misshapen name; the network is then unchanged.
        FileNotFoundError: nothing to read at `source`.
    """
    targets = network.state_dict(keep_vars=True)
    heads = [name for name in targets if names.is_action_head(name)]
    fresh = [] if keep_action_heads else heads
    if stuck := [name for name in fresh if not targets[name].requires_grad]:
        raise ValueError(f"fresh action heads that are not trained would stay random: {', '.join(stuck)}")
    with open_weights(source) as stored:
        found, unknown = by_name(stored, averaged=averaged)
        if not keep_action_heads:
            found = {name: theirs for name, theirs in found.items() if not names.is_action_head(name)}
        _compare(source, stored, found, unknown, targets, fresh)
        with torch.no_grad():
            for name, theirs in found.items():
                target = targets[name]
                dtype = None if target.requires_grad else frozen_dtype
                place(network, name, target, _filler(stored, theirs), device=device, dtype=dtype)
            for name, value in (fresh_action_heads(network.config, seed) if fresh else {}).items():
                place(network, name, targets[name], lambda target, value=value: copy(target, value), device=device)
    logger.info(
        "loaded %d tensors of %s; action heads %s", len(found), source, "fresh" if fresh else "as they are stored"
    )


def open_weights(source: str | Path) -> StoredTensors | DcpTensors:
    """The stored tensors of a checkpoint under the names they have there; a context manager."""
    folder = CheckpointFolder(source)
    folder.check_index()
    return DcpTensors(folder.weights) if folder.is_distributed else StoredTensors(folder.weights)


def by_name(stored: Mapping[str, object], *, averaged: bool = False) -> tuple[dict[str, str], list[str]]:
    """(stored name by the network's name, in stored order; stored names that nothing here knows).

    Names of parts the policy has not are in neither.

    Raises:
        ValueError: two stored tensors mean the same, or averages are asked for and there are none.
    """
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in stored:
        theirs = names.is_framework(name)
        if theirs and name.startswith(names.AVERAGE) != averaged:
            continue
        bare = names.strip(name) if theirs else name
        if bare.startswith(names.ABSENT):
            continue
        try:
            ours = names.from_framework(name) if theirs else name
        except ValueError:
            unknown.append(name)
            continue
        if ours.startswith(names.ABSENT):
            continue
        if ours in found:
            raise ValueError(f"{found[ours]} and {name} are the same tensor, {ours}: which of them to take is unclear")
        found[ours] = name
    if averaged and not any(name.startswith(names.AVERAGE) for name in stored):
        raise ValueError("averaged weights are asked for and the checkpoint holds none; only the framework's does")
    return found, unknown


def fresh_action_heads(config: Cosmos3PolicyConfig, seed: int) -> dict[str, Tensor]:
    """Action heads of a warm start on the CPU by name: those of `Cosmos3Policy.reset_action_heads` with this seed."""
    generator = torch.Generator().manual_seed(seed)
    domains, wide, narrow = config.num_embodiment_domains, config.hidden_size, config.action_dim
    values: dict[str, Tensor] = {}
    for name, into, out in (("action_proj_in", narrow, wide), ("action_proj_out", wide, narrow)):
        with torch.device("meta"):  # their own initialisation would move the global generator
            head = DomainLinear(domains, into, out)
        head.to_empty(device="cpu").reset(generator)
        values |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    embed, std = torch.empty(wide), wide**-0.5
    nn.init.trunc_normal_(embed, std=std, a=-3 * std, b=3 * std, generator=generator)
    return {**values, "action_modality_embed": embed}


@torch.no_grad()
def cast_frozen(network: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen parameters in another dtype, in place; see `load_weights`' `frozen_dtype`."""
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _filler(stored: StoredTensors | DcpTensors, name: str) -> Callable[[Tensor], None]:
    return lambda target: copy(target, stored.tensor(name))


def _compare(
    source: str | Path,
    stored: StoredTensors | DcpTensors,
    found: Mapping[str, str],
    unknown: Sequence[str],
    targets: Mapping[str, Tensor],
    fresh: Sequence[str],
) -> None:
    dtypes = stored.dtypes
    misshapen = [
        f"{name}: stored {stored[theirs].shape}, network {tuple(targets[name].shape)}"
        for name, theirs in found.items()
        if name in targets and stored[theirs].shape != tuple(targets[name].shape)
    ]
    misshapen += [
        f"{name}: stored as {stored[theirs].dtype}, which is no floating type"
        for name, theirs in found.items()
        if theirs not in dtypes
    ]
    missing = sorted(targets.keys() - found.keys() - set(fresh))
    problems = fitting_report("missing", missing)
    problems += fitting_report("unexpected", sorted([*unknown, *(found.keys() - targets.keys())]))
    problems += fitting_report("misshapen", misshapen)
    if problems:
        hint = ""
        if any(names.is_action_head(name) for name in missing):
            hint = "\nit has no action heads to keep: set model.keep_action_heads to false for fresh ones"
        raise ValueError(
            f"weights of {source} do not fit the network; sizes come from the model's config, which must be the "
            "checkpoint's own transformer/config.json\n" + "\n".join(problems) + hint
        )
