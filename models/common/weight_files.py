"""Which safetensors files a checkpoint folder consists of, and its JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEM, DIFFUSERS_STEM = "model", "diffusion_pytorch_model"
"""How the files are called in repositories of Transformers and of Diffusers."""
INDEX_FILE, SINGLE_FILE = f"{STEM}.safetensors.index.json", f"{STEM}.safetensors"


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file whose top is an object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {type(values).__name__}, it must be an object")
    return values


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a file or folder, in the order they are read.

    In a folder they are those of its index, or the one file `model.safetensors` or Diffusers' name for it.

    Raises:
        FileNotFoundError: none there, one that the index names is absent, a file of another kind, or only pickled
            files, which are not read.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise FileNotFoundError(
                f"{path} is no safetensors file; give one that ends in .safetensors, or a folder that holds some"
            )
        return [path]
    for stem in (STEM, DIFFUSERS_STEM):
        if (index := path / f"{stem}.safetensors.index.json").is_file():
            return _indexed(index)
        if (single := path / f"{stem}.safetensors").is_file():
            return [single]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickled:
        raise FileNotFoundError(
            f"{path} has no safetensors files, only {', '.join(pickled)}: pickled files may run code when they are "
            "opened and are not read; convert them to safetensors where you trust them"
        )
    raise FileNotFoundError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ValueError(f"{index}: key weight_map is {weight_map!r}, it must be an object")
    if strange := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise ValueError(f"{index}: weight_map names files by text, not by {strange[0]!r}")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names files outside its folder: {outside}")
    folder = index.parent
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names files that are not there: {absent}")
    return [folder / name for name in names]
