"""Weights by name out of safetensors files, one tensor at a time, onto the device and dtype they shall have."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.common.placing import copy, fitting_report, place
from models.common.stored import StoredTensors
from models.gr00t_n17.slots import is_slot_tensor

logger = logging.getLogger(__name__)

HEAD_SUFFIX, EMBEDDING_SUFFIX = "lm_head.weight", "language_model.embed_tokens.weight"


def load_weights(
    network: nn.Module,
    source: str | Path,
    prefix: str = "",
    *,
    device: torch.device | str | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Copy the weights of `source` into `network`.

    All names and shapes are compared first, from the headers of the files. Then each tensor goes from the mapped file
    to its place, so that beyond the network itself no more than one tensor is held in memory. A network whose `slots`
    names rows of the per-embodiment tensors gets these rows alone.

    Args:
        network: on a device, or on meta: parameters are then made on `device` as their values arrive.
        source: a safetensors file, or a folder with model.safetensors or model.safetensors.index.json.
        prefix: only names that begin with it are read and required, e.g. "backbone.".
        device: where the parameters shall be; None leaves them where they are, those on meta go to the CPU.
        dtypes: by parameter name; None, or a name that is not in it, keeps the parameter's own dtype.

    Raises:
        ValueError: one error that lists every missing, unexpected and misshapen name; the network is then unchanged.
        FileNotFoundError: nothing to read at `source`.
    """
    targets = {name: t for name, t in network.state_dict(keep_vars=True).items() if name.startswith(prefix)}
    if not targets:
        raise ValueError(f"prefix={prefix!r} fits no name of the network; names begin with {_heads(network)}")
    with StoredTensors(source) as stored:
        # in the order of the files: each is mapped once
        wanted = [name for name in stored if name.startswith(prefix) and not name.endswith(HEAD_SUFFIX)]
        slots = {name: s for name in targets if (s := _slots(network, name)) is not None}
        _compare(stored, wanted, targets, slots, source=source, prefix=prefix)
        with torch.no_grad():
            for name in wanted:
                fill = _filler(stored, name, slots.get(name))
                place(network, name, targets[name], fill, device=device, dtype=(dtypes or {}).get(name))
        _note_untied_head(stored, prefix)
    logger.info("loaded %d tensors from %d file(s) of %s", len(wanted), len(stored.files), source)


def _slots(network: nn.Module, name: str) -> Sequence[int] | None:
    """The rows of a per-embodiment tensor that the network holds; None for all of them and for other tensors."""
    slots: Sequence[int] | None = getattr(network, "slots", None)
    return slots if slots is not None and is_slot_tensor(name) else None


def _compare(
    stored: StoredTensors,
    wanted: Sequence[str],
    targets: Mapping[str, Tensor],
    slots: Mapping[str, Sequence[int]],
    *,
    source: str | Path,
    prefix: str,
) -> None:
    unexpected, misshapen = [], []
    for name in wanted:
        if name not in targets:
            unexpected.append(name)
            continue
        shape, expected = stored[name].shape, tuple(targets[name].shape)
        if name in slots and shape[:1] > (max(slots[name]),):
            expected = (shape[0], *expected[1:])
        if shape != expected:
            misshapen.append(f"{name}: stored {shape}, network {tuple(targets[name].shape)}")
        elif name not in stored.dtypes:
            misshapen.append(f"{name}: stored as {stored[name].dtype}, which is no floating type")
    problems = fitting_report("missing", sorted(set(targets) - set(wanted)))
    problems += fitting_report("unexpected", sorted(unexpected)) + fitting_report("misshapen", misshapen)
    if problems:
        raise ValueError(
            f"weights of {source} do not fit the network (prefix {prefix!r}); sizes and names come from the model's "
            "config, which must be the checkpoint's own config.json\n" + "\n".join(problems)
        )


def _filler(stored: StoredTensors, name: str, slots: Sequence[int] | None) -> Callable[[Tensor], None]:
    """Writes a stored tensor, or its rows of these slots, into a parameter."""

    def fill(value: Tensor) -> None:
        if slots is None:
            copy(value, stored.tensor(name))
            return
        for row, slot in enumerate(slots):
            copy(value[row : row + 1], stored.rows(name, slot, slot + 1))

    return fill


def _note_untied_head(stored: StoredTensors, prefix: str) -> None:
    """A stored LM head is the token embedding once more and is never run; tell where it is not."""
    head = next((name for name in stored if name.startswith(prefix) and name.endswith(HEAD_SUFFIX)), None)
    embedding = next((name for name in stored if name.endswith(EMBEDDING_SUFFIX)), None)
    if head is None or embedding is None:
        return
    rows = stored[embedding].shape[0]
    tied = stored[head].shape == stored[embedding].shape and all(
        torch.equal(stored.rows(head, row, row + 8192), stored.rows(embedding, row, row + 8192))
        for row in range(0, rows, 8192)
    )
    if not tied:
        logger.warning("%s differs from the token embedding; it is not loaded, as nothing here runs an LM head", head)


def save_weights(network: nn.Module, path: str | Path, prefix: str = "") -> None:
    """Write the network's tensors whose names begin with `prefix` to one safetensors file, atomically."""
    path = Path(path)
    tensors = {
        name: tensor.detach().to("cpu").contiguous()
        for name, tensor in network.state_dict().items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise ValueError(f"prefix={prefix!r} fits no name of the network; names begin with {_heads(network)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A sibling folder: the rename stays inside one file system, so readers see the old file or the whole new one.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        save_file(_unshared(tensors), str(temporary), metadata={"format": "pt"})
        temporary.replace(path)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory (tied weights) are copied: the format stores each name on its own."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return out


def _heads(network: nn.Module) -> list[str]:
    return sorted({name.split(".")[0] + "." for name in network.state_dict()})
