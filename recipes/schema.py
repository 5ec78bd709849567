"""What a recipe may say: one frozen dataclass per section, values only, no torch.

Every key of a recipe file is a field here, with its default and its meaning. `recipes.parse` turns the merged YAML
into these classes and reports what does not fit; `recipes.check` looks at what only makes sense together.
"""

from dataclasses import dataclass, field
from typing import Literal

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.step_options import EmaConfig, Graphs, Lookahead
from recipes.schema_data import DataConfig
from recipes.schema_model import Cosmos3PolicyModelConfig, GR00TN17ModelConfig
from recipes.schema_options import ParallelConfig


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
    """AdamW, in groups of parameters with the same learning rate and weight decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """`matrices` spares biases and norms."""
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Learning rate of a named part of the model, as a multiple of `lr`: of cosmos3_policy, `action_heads`."""
    fused: bool = True
    """One kernel for the whole update; false is upstream's loop over tensors, which rounds differently."""
    fold_clip: bool = False
    """The fused update clips the gradients as it reads them, instead of a pass over them before it."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the steps.

    `cosine`: linear warm-up from zero, then half a cosine to zero at `trainer.max_steps`. `linear`: from the first step
    on a straight line that would reach zero at `cycle_steps`.
    """

    kind: Literal["cosine", "linear"] = "cosine"
    warmup_ratio: float = 0.05
    warmup_steps: int | None = None
    """Overrides `warmup_ratio` when given."""
    cycle_steps: int | None = None
    """Of `linear`; null means `trainer.max_steps`."""


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
    """The last step is always measured."""
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
    precision: Literal["fp32", "bf16-mixed", "fsdp-bf16", "32-true"] = "fp32"
    """`bf16-mixed` is bfloat16 autocast. `fsdp-bf16` gathers sharded weights in bfloat16 and sums gradients in float32;
    it needs `parallel.shard` above 1. `32-true` is another name of fp32."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    lookahead: Lookahead = "none"
    """`stream`: the frozen part of the next micro-batch runs beside the trained part of this one."""
    graphs: Graphs = "none"
    """`head`: one CUDA graph of the trained head for each shape."""
    ema: EmaConfig | None = None
    """Average of the trained weights over the steps, which validation and `export --ema` take."""
    logger: Literal["csv", "wandb"] = "csv"
    """CSV files are always written; `wandb` adds a Weights & Biases run."""
    model: GR00TN17ModelConfig | Cosmos3PolicyModelConfig = field(default_factory=GR00TN17ModelConfig)
    """Its `name` says which model, and with it which keys the section has."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    evaluation: EvaluationConfig | None = None
    validation: ValidationConfig | None = None

    def __post_init__(self) -> None:
        if self.precision == "32-true":
            object.__setattr__(self, "precision", "fp32")
