"""The JSON side of a released checkpoint folder: architecture, processor settings, statistics and embodiment slots."""

from functools import cached_property
from pathlib import Path
from typing import Any

from models.common.weight_files import read_object, weight_files
from models.gr00t_n17.config import GR00TN17Config

CONFIG_FILE = "config.json"
PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
EMBODIMENTS_FILE = "embodiment_id.json"


class CheckpointFolder:
    """A checkpoint on this machine; every file is read when it is asked for.

    Args:
        path: the folder with config.json. Released folders that hold several checkpoints in sub folders are refused
            with the names of these: the caller says which one.

    Raises:
        FileNotFoundError: no such folder, or one without config.json.
        ValueError: from the properties, for a file that is no JSON object or a key that does not fit.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: no such checkpoint folder")
        if not (self.path / CONFIG_FILE).is_file():
            nested = sorted(file.parent.name for file in self.path.glob(f"*/{CONFIG_FILE}"))
            hint = f"; it holds several checkpoints, name one of its folders: {', '.join(nested)}" if nested else ""
            raise FileNotFoundError(f"{self.path} has no {CONFIG_FILE}{hint}")

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """config.json as it stands."""
        return self._read(CONFIG_FILE)

    @cached_property
    def config(self) -> GR00TN17Config:
        """The architecture: what config.json says, never a default where it says something."""
        try:
            return GR00TN17Config.from_dict(self.config_values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from error

    @cached_property
    def processor_file(self) -> dict[str, Any] | None:
        """processor_config.json as it stands; None where there is none."""
        return self._read(PROCESSOR_FILE) if (self.path / PROCESSOR_FILE).is_file() else None

    @cached_property
    def processor(self) -> dict[str, Any] | None:
        """`processor_kwargs` of processor_config.json; None where there is no such file."""
        values = self.processor_file
        if values is None:
            return None
        kwargs = values.get("processor_kwargs")
        if not isinstance(kwargs, dict):
            raise ValueError(f"{self.path / PROCESSOR_FILE}: key processor_kwargs is {kwargs!r}, it must be an object")
        return kwargs

    @cached_property
    def statistics(self) -> dict[str, Any] | None:
        """statistics.json, tag -> modality -> group -> {min, max, mean, std, q01, q99}; None where there is none."""
        return self._read(STATISTICS_FILE) if (self.path / STATISTICS_FILE).is_file() else None

    @cached_property
    def embodiment_ids(self) -> dict[str, int]:
        """Tag -> slot of the per-embodiment layers: embodiment_id.json over the built-in table."""
        from models.gr00t_n17.inputs.embodiments import merge

        return merge(self.stored_embodiment_ids)

    @cached_property
    def stored_embodiment_ids(self) -> dict[str, int]:
        """embodiment_id.json alone; empty where there is none."""
        file = self.path / EMBODIMENTS_FILE
        values = self._read(EMBODIMENTS_FILE) if file.is_file() else {}
        wrong = {tag: slot for tag, slot in values.items() if isinstance(slot, bool) or not isinstance(slot, int)}
        if wrong:
            raise ValueError(f"{file}: slots must be integers, these are not: {wrong}")
        return values

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files, in the order of their names; see `weight_files`."""
        return weight_files(self.path)

    def _read(self, name: str) -> dict[str, Any]:
        return read_object(self.path / name)
