"""What a recipe may say: one frozen dataclass per section, values only, no torch.

Every key of a recipe file is a field here, with its default and its meaning. `recipes.parse` turns the merged YAML
into these classes and reports what does not fit; `recipes.check` looks at what only makes sense together.
"""

from dataclasses import dataclass, field
from typing import Literal

from recipes.schema_data import DataConfig
from recipes.schema_model import ModelConfig


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
class ValidationConfig:
    """What is measured during training on the episodes that `data.validation` keeps out."""

    every_n_steps: int = 500
    batches: int = 8
    """Batches of the loss, over all ranks together those of `data.batch_size`; the same samples every time."""
    open_loop_episodes: int = 0
    """Held-out episodes on which predicted actions are compared with the recorded ones; 0 measures the loss alone."""
    open_loop_stride: int | None = None
    """Steps between two predictions in such an episode; null means the chunk, `data.horizon`."""


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
    validation: ValidationConfig | None = None
