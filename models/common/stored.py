"""The tensors of safetensors files by name, mapped instead of read."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.common.weight_files import weight_files

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies; shape and dtype (in the words of safetensors, "BF16") are read from the file's header."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by name. Files are mapped, not read: a tensor's bytes come in when it is copied.

    Args:
        source: a safetensors file, or a folder with such files as `weight_files` finds them.

    Raises:
        FileNotFoundError: nothing to read at `source`.
        ValueError: a file is cut short or no safetensors file, or two files hold a tensor of the same name.
    """

    def __init__(self, source: str | Path) -> None:
        source = Path(source)
        if not source.exists():
            raise FileNotFoundError(f"{source}: no such checkpoint file or folder")
        self.files = weight_files(source)
        self._stack = ExitStack()
        self._open: tuple[Path, Any] | None = None
        self._entries: dict[str, StoredTensor] = {}
        for file in self.files:
            with _opened(file) as stored:
                for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name in self._entries:
                        raise ValueError(f"{name} is stored twice, in {self._entries[name].file} and {file}")
                    part = stored.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                    self._entries[name] = StoredTensor(name=name, file=file, shape=shape, dtype=dtype)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file last read; tensors that were read keep their own hold on it."""
        self._stack.close()
        self._open = None

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """dtype of every floating tensor by name."""
        return {name: _DTYPES[entry.dtype] for name, entry in self._entries.items() if entry.dtype in _DTYPES}

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, mapped: its file's pages count to this process as long as it is held."""
        return self._file(name).get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first dimension."""
        return self._file(name).get_slice(name)[start:stop]

    def _file(self, name: str) -> Any:
        file = self._entries[name].file
        if self._open is None or self._open[0] != file:
            self.close()  # one mapping at a time: its pages count to this process while it lasts
            self._open = file, self._stack.enter_context(_opened(file))
        return self._open[1]


def word_of(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype; of one that is no floating type PyTorch's own word."""
    return next((word for word, value in _DTYPES.items() if value == dtype), str(dtype).removeprefix("torch."))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # the library's own type, for a cut or foreign file
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
