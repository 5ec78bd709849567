"""Where the parts of a Cosmos-3 checkpoint lie: a Diffusers repository, its transformer alone, the framework's own."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from models.common.weight_files import read_object
from models.cosmos3_policy.config import Cosmos3PolicyConfig

CONFIG_FILE, LATEST_FILE = "config.json", "latest_checkpoint.txt"
TRANSFORMER, VAE, TOKENIZERS = "transformer", "vae", ("text_tokenizer", "tokenizer")
PROCESSOR_FILE = "processor.json"
_DISTRIBUTED = ".metadata"


class CheckpointFolder:
    """A checkpoint on this machine; every file is read when it is asked for.

    Args:
        path: a repository in Diffusers' layout (`transformer/`, `vae/`, ...), its transformer folder, a safetensors
            file, or what the framework writes: a run's folder, one of its iterations, or the `model` folder in that.

    Raises:
        FileNotFoundError: nothing there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path}: no such checkpoint file or folder")

    @cached_property
    def weights(self) -> Path:
        """The file or folder that holds the transformer's tensors."""
        for folder in (self.path, self.path / "checkpoints"):
            if (latest := folder / LATEST_FILE).is_file():
                name = latest.read_text(encoding="utf-8").strip()
                if Path(name).name != name or not (folder / name).is_dir():
                    raise FileNotFoundError(f"{latest} names {name!r}, and there is no such folder beside it")
                return folder / name / "model"
        for folder in (self.path / TRANSFORMER, self.path / "model"):
            if folder.is_dir():
                return folder
        return self.path

    @property
    def is_distributed(self) -> bool:
        """Whether the weights are a torch.distributed.checkpoint folder, which the framework writes; whole or not."""
        weights = self.weights
        return (weights / _DISTRIBUTED).is_file() or (weights.is_dir() and any(weights.glob("*.distcp")))

    def check_index(self) -> None:
        """Ask whether a distributed checkpoint has its index, which is written last.

        Raises:
            FileNotFoundError: it has none.
        """
        if self.is_distributed and not (self.weights / _DISTRIBUTED).is_file():
            raise FileNotFoundError(
                f"{self.weights} holds parts of a distributed checkpoint (*.distcp) and no {_DISTRIBUTED}, their "
                "index, which is written last: it was cut short, or copied without files whose name begins with a dot"
            )

    @cached_property
    def config_values(self) -> dict[str, Any] | None:
        """The transformer's config.json as it stands; None where there is none, as in the framework's folders."""
        folder = self.weights.parent if self.weights.is_file() else self.weights
        file = folder / CONFIG_FILE
        values = read_object(file) if file.is_file() else None
        # The framework puts a description of its whole model under the same name.
        return None if values is None or "num_hidden_layers" not in values else values

    @cached_property
    def config(self) -> Cosmos3PolicyConfig | None:
        """The architecture: what config.json says, never a default where it says something."""
        if self.config_values is None:
            return None
        try:
            return Cosmos3PolicyConfig.from_dict(self.config_values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.weights / CONFIG_FILE}: {error}") from error

    @property
    def vae(self) -> Path | None:
        """Folder of the video encoder."""
        return self._part(VAE)

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer; of an older repository the repository itself."""
        found = next((folder for name in TOKENIZERS if (folder := self._part(name)) is not None), None)
        return self.path if found is None and (self.path / "tokenizer.json").is_file() else found

    @cached_property
    def processor(self) -> Mapping[str, Any] | None:
        """Settings of the processor that an exported policy was trained with; None in released repositories."""
        file = self.path / PROCESSOR_FILE
        return read_object(file) if file.is_file() else None

    def _part(self, name: str) -> Path | None:
        folder = self.path / name
        return folder if folder.is_dir() else None
