"""Keys of the `data` section: which datasets, what of them, in which order, and what is kept."""

from dataclasses import dataclass, field
from typing import Any, Literal

from recipes.schema_model import ModalityConfig


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What the data layer may keep in memory and on local disk. Sizes are bytes or text such as 4GB or 512MiB."""

    dir: str | None = None
    """Folder of indexes, mapped columns and the caches; null means $KNONIK_CACHE, else the user's cache folder."""
    ram: int | str = "1GiB"
    """Compressed packets in memory, per rank, of a dataset that is not on this machine."""
    disk: int | str | None = None
    """Compressed packets on local disk, shared by the ranks of a machine and by later runs, of a dataset that is not on
    this machine. null takes what the dataset needs, at most half of the free space; 0 keeps none."""
    decoded: int | str = 0
    """Decoded frames on local disk, after the model's first resize, from which later epochs are served: for datasets
    that fit. 0 keeps none."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """A dataset made on the spot, when `data.uri` does not exist yet."""

    world: Literal["tabletop"]
    layouts: int = 600
    """Layouts of the blocks; each is demonstrated once for every block."""
    codec: Literal["h264", "av1"] = "h264"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One dataset of `data.mixture`; the keys mean what they mean in `data` and `model`, for this dataset alone."""

    uri: str
    weight: float | None = None
    """Share of the samples relative to the other parts; null in all parts takes as many as they have."""
    embodiment: str | None = None
    """null means `model.embodiment`."""
    embodiment_id: int | None = None
    cameras: dict[str, str] | None = None
    """{name shared by all parts: the dataset's own camera}; null takes all under their own names."""
    state: tuple[str, ...] = ("observation.state",)
    action: tuple[str, ...] = ("action",)
    horizon: int | None = None
    """null means `data.horizon`; a shorter chunk is masked beyond its end."""
    episodes: tuple[int, ...] | None = None
    ranges: str | None = None
    modality: str | dict[str, Any] | None = None
    """As `data.modality`."""
    groups: ModalityConfig | None = None
    """As `model.modality`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset and how samples are cut from it."""

    uri: str | None = None
    """LeRobot dataset: a folder, file:// or s3://bucket/prefix. Give this or `mixture`."""
    mixture: tuple[PartConfig, ...] | None = None
    """Several datasets read as one, in exact shares."""
    fps: float | None = None
    """Of a mixture: action steps are 1 / fps seconds in all parts; null counts each dataset's own rows."""
    missing_cameras: Literal["error", "black"] = "error"
    """Of a mixture: a part without one of the cameras is refused, or gives black pictures."""
    modality: str | dict[str, Any] | None = None
    """JSON file or mapping in place of the dataset's meta/modality.json: names for parts of its vectors and cameras."""
    batch_size: int | None = None
    """Samples per rank. Give this or `global_batch_size`. With `pack_tokens`: the most that a pack may hold."""
    global_batch_size: int | None = None
    """Samples of a micro-batch over all ranks, divisible by their number. A step takes
    `trainer.accumulate_grad_batches` of them."""
    pack_tokens: int | None = None
    """Token budget of a micro-batch, for a model that packs samples of different lengths: a pack takes the next samples
    of the order as long as they fit. null takes `batch_size` samples, however long."""
    cameras: tuple[str, ...] | None = None
    """Video features the policy sees, in this order; null means all of the dataset."""
    state: tuple[str, ...] = ("observation.state",)
    action: tuple[str, ...] = ("action",)
    horizon: int = 16
    """Action steps of one chunk, starting at the observation."""
    edge: Literal["repeat", "inside"] = "inside"
    """At the episode's end: repeat the last step (LeRobot), or no anchor whose chunk would leave it (GR00T)."""
    episodes: tuple[int, ...] | None = None
    """Episode ids to use; null means all."""
    ranges: str | None = None
    """JSON file {"episode id": [[start, stop], ...]} of the frames that may be anchors; null means all."""
    validation: float = 0.0
    """Share of the episodes kept out of training, drawn by their ids alone: a growing dataset keeps its split."""
    validation_episodes: tuple[int, ...] | None = None
    """Episode ids kept out of training, instead of a share."""
    match: Literal["time", "index"] = "time"
    """Frame of a row: the nearest to its timestamp, as the stock loader does it, or row k has frame k."""
    transport: Literal["rgb24", "yuv420p"] = "rgb24"
    """How frames travel to the device: as RGB, or as colour planes of half the size that give the same RGB there."""
    order: Literal["exact", "blocks"] = "exact"
    """Every epoch a permutation of all samples; or of groups of pictures, each decoded once, for videos with few key
    frames, where samples mix over `block_window`."""
    block_window: int | None = None
    """Samples over which `order: blocks` spreads those of a group; null means 1024."""
    startup: Literal["columns", "rows"] = "columns"
    """`columns` reads the columns that are used into shared mappings. `rows` reads all of them as Python objects before
    it, and keeps them, as stock loaders do: to measure what that costs, for a dataset on this machine."""
    on_bad_sample: Literal["raise", "skip"] = "raise"
    """A sample that cannot be read stops the run, or is replaced by its neighbour (left out of a pack), counted and
    listed."""
    max_bad_share: float | None = None
    """Share of an epoch that `on_bad_sample: skip` may replace before the run stops; null means 0.01."""
    decode_threads: int | None = None
    """Decoder threads per rank; null means the rank's share of the cores, less one."""
    ring_batches: int | None = None
    """Decoded batches kept ready, at most; null means what 256 MB hold, 3 to 16."""
    ring_bytes: int | str | None = None
    """Bound of the pictures of all of them, such as 16GB; at least two batches must fit. null means half of the
    machine's memory, shared by its ranks."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    generate: GenerateConfig | None = None
