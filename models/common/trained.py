"""What a training checkpoint keeps of a network: the trained tensors, and a digest of those it was trained beside.

Frozen tensors never change; the run finds them again where it found them first. The digest tells when that place now
holds something else.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from models.common.digest import weights_digest

DIGEST_KEY = "frozen_digest"


class FrozenWeights:
    """Keeps the frozen tensors of a network out of its checkpoints.

    Args:
        network: its `requires_grad` flags say what is trained, and do not change afterwards.
        prefix: of the network's names in the checkpoint's state dict.
    """

    def __init__(self, network: nn.Module, prefix: str = "network.") -> None:
        self._network, self._prefix = network, prefix
        self._digest: str | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the network's state dict that is not trained, by name."""
        trained = {name for name, parameter in self._network.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in self._network.state_dict().items() if name not in trained}

    @property
    def digest(self) -> str:
        """SHA-256 of the frozen tensors, made once: some seconds for a released backbone."""
        if self._digest is None:
            self._digest = weights_digest(self.tensors())
        return self._digest

    def leave_out(self, checkpoint: MutableMapping[str, Any], *, with_digest: bool = True) -> None:
        """Take the frozen tensors out of a checkpoint's `state_dict` and put their digest in.

        Args:
            with_digest: False on ranks that write no file.
        """
        frozen = {f"{self._prefix}{name}" for name in self.tensors()}
        if frozen:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if name not in frozen}
        if frozen and with_digest:
            checkpoint[DIGEST_KEY] = self.digest

    def put_back(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Complete a checkpoint's `state_dict` with the network's own frozen tensors.

        Raises:
            ValueError: they are not those the checkpoint was trained beside.
        """
        self.check(checkpoint)
        own = {f"{self._prefix}{name}": tensor for name, tensor in self.tensors().items()}
        checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise ValueError where a checkpoint was trained beside other frozen tensors than the network's."""
        stored = checkpoint.get(DIGEST_KEY)
        if stored is not None and stored != self.digest:
            raise ValueError(
                "the frozen weights are not those this checkpoint was trained with: model.weights or the first stage "
                f"now hold others (digest {self.digest[:12]}, the checkpoint says {stored[:12]}). Give the weights the "
                "run began with"
            )


@torch.no_grad()
def load_trained(network: nn.Module, checkpoint: Mapping[str, Any], prefix: str = "network.") -> None:
    """Put the weights of a training checkpoint into a network that holds its starting weights.

    Args:
        network: built and loaded as it was when the training began.
        checkpoint: with `state_dict`, and the digest of the frozen tensors where these are not in it.
        prefix: of the network's names in the state dict.

    Raises:
        ValueError: trained tensors are missing, of another shape or not known, or the frozen ones are others.
    """
    state = {name[len(prefix) :]: v for name, v in checkpoint["state_dict"].items() if name.startswith(prefix)}
    targets = network.state_dict()
    required = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    problems = [f"missing: {name}" for name in sorted(required - state.keys())]
    problems += [f"unexpected: {name}" for name in sorted(state.keys() - targets.keys())]
    problems += [
        f"misshapen: {name}: stored {tuple(value.shape)}, network {tuple(targets[name].shape)}"
        for name, value in sorted(state.items())
        if name in targets and value.shape != targets[name].shape
    ]
    if problems:
        more = [f"... and {len(problems) - 50} more"] if len(problems) > 50 else []
        raise ValueError("the checkpoint does not fit the network:\n  " + "\n  ".join([*problems[:50], *more]))
    FrozenWeights(network, prefix).check(checkpoint)
    for name, value in state.items():
        targets[name].copy_(value)
