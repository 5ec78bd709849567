"""One number for many tensors: equal digests mean equal weights, name for name and bit for bit."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


def weights_digest(parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over (name, dtype, shape, bytes) of the tensors in the order of their names.

    Pass the trained ones, e.g. `{n: p for n, p in network.named_parameters() if p.requires_grad}`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(dict(parameters).items()):
        value = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}\0{str(value.dtype).removeprefix('torch.')}\0{list(value.shape)}\0".encode())
        for chunk in _bytes(value):
            digest.update(chunk)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1).view(torch.uint8)
    for part in flat.split(1 << 28):
        yield memoryview(part.numpy())
