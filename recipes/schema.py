"""What a recipe may say: one frozen dataclass per section, values only, no torch.

Every key of a recipe file is a field here, with its default and its meaning. `recipes.parse` turns the merged YAML
into these classes and reports what does not fit; `recipes.check` looks at what only makes sense together.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and what must have run before it."""

    name: str
    dir: str
    """Run folder. Starting again with the same folder continues the run."""
    stage: Literal["policy", "grounding"] = "policy"
    """`policy` trains on a dataset. `grounding` is the quickstart's stand-in for a pre-trained backbone."""
    first: str | None = None
    """Recipe of a stage that must be complete before this one; its backbone initialises the model."""
    torch_threads: int | None = None
    """Threads PyTorch uses inside one operation on the CPU; null leaves PyTorch's own choice."""


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
class DataConfig:
    """The dataset and how samples are cut from it."""

    uri: str
    """LeRobot dataset: a folder, file:// or s3://bucket/prefix."""
    batch_size: int | None = None
    """Samples per rank. Give this or `global_batch_size`."""
    global_batch_size: int | None = None
    """Samples of a micro-batch over all ranks, divisible by their number. A step takes
    `trainer.accumulate_grad_batches` of them."""
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
    match: Literal["time", "index"] = "time"
    """Frame of a row: the nearest to its timestamp, as the stock loader does it, or row k has frame k."""
    transport: Literal["rgb24", "yuv420p"] = "rgb24"
    """How frames travel to the device: as RGB, or as colour planes of half the size that give the same RGB there."""
    order: Literal["exact", "blocks"] = "exact"
    """Every epoch a permutation of all samples; or of groups of pictures, each decoded once, for videos with few key
    frames, where samples mix over `block_window`."""
    block_window: int | None = None
    """Samples over which `order: blocks` spreads those of a group; null means 1024."""
    on_bad_sample: Literal["raise", "skip"] = "raise"
    """A sample that cannot be read stops the run, or is replaced by its neighbour, counted and listed."""
    max_bad_share: float | None = None
    """Share of an epoch that `on_bad_sample: skip` may replace before the run stops; null means 0.01."""
    decode_threads: int | None = None
    """Decoder threads per rank; null means the rank's share of the cores, less one."""
    ring_batches: int | None = None
    """Decoded batches kept ready, at most; null means what 256 MB hold, 3 to 16."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    generate: GenerateConfig | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: which architecture, which sizes, which weights it starts from."""

    name: Literal["gr00t_n17"] = "gr00t_n17"
    size: Literal["released", "tiny"] = "released"
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config class that differ from `size`."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's processor config that differ from its defaults."""
    weights: str | None = None
    """Checkpoint to start from: hub id, folder or safetensors file; null trains from random weights."""
    backbone_weights: str | None = None
    """Safetensors file for the backbone alone."""
    embodiment_id: int = 10
    """Slot of the per-embodiment layers; 10 is the released checkpoint's `new_embodiment`."""
    flow_draws: int = 1
    """Independent (noise, time) draws per sample; they share one pass through the backbone."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, in two groups: with and without weight decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up from zero, then half a cosine to zero at `trainer.max_steps`."""

    warmup_ratio: float = 0.05
    warmup_steps: int | None = None
    """Overrides `warmup_ratio` when given."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Arguments of Lightning's Trainer, under Lightning's names."""

    max_steps: int
    max_time: str | None = None
    accelerator: str = "auto"
    num_nodes: int = 1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    log_every_n_steps: int = 10
    deterministic: bool = False
    detect_anomaly: bool = False
    profiler: Literal["simple", "advanced"] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole training state, for resuming."""

    every_n_steps: int = 1000
    keep: int = 2
    """Newest checkpoints kept; -1 keeps all."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Where a Weights & Biases run goes; WANDB_* variables keep working and win."""

    project: str = "robot-recipes"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """How a run is measured."""

    peak_tflops: float | None = None
    """Dense peak of one device at the run's precision, when the built-in table does not know it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Closed-loop evaluation in a simulated world, before and after training."""

    world: Literal["tabletop"]
    layouts: int = 120
    """Held-out layouts."""
    execute_steps: int = 2
    """Steps of a predicted chunk that are executed before the policy looks again."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, completely described."""

    run: RunConfig
    data: DataConfig
    trainer: TrainerConfig
    seed: int = 0
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    logger: Literal["csv", "wandb"] = "csv"
    """CSV files are always written; `wandb` adds a Weights & Biases run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    evaluation: EvaluationConfig | None = None
