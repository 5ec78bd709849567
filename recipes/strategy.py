"""How a recipe's ranks train together: one process, DDP, or a mesh with sharded weights."""

from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy, Strategy

from recipes.ranks import world_size
from recipes.schema import Recipe

# Lightning's name of each precision. A frozen tower is on every rank whole, and flow variables stay float32: a policy
# that only gathers in bfloat16 would leave the one in float32 and the other to be cast. So `fsdp-bf16` computes as
# bf16-mixed does; its weights arrive in bfloat16, where autocast has nothing left to round.
PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "fsdp-bf16": "bf16-mixed"}


def build_strategy(recipe: Recipe, ranks: int | None = None) -> Strategy | Literal["auto"]:
    """The strategy for a run's ranks; Lightning's own choice for a single one.

    Args:
        recipe: with `parallel`.
        ranks: of the run, torchrun's where absent.

    Raises:
        ValueError: `parallel` does not make that many ranks.
    """
    ranks = world_size() if ranks is None else ranks
    replicate, shard = recipe.parallel.sizes(ranks)
    if shard > 1:
        from models.common.mesh import MeshStrategy, bf16_policy

        return MeshStrategy(replicate, shard, bf16_policy() if recipe.precision == "fsdp-bf16" else None)
    if ranks == 1:
        return "auto"
    # Gradients are views into the buckets they are reduced in: no second copy of them, 6.5 GB at released size. The
    # same parameters take part in every step, which a static graph makes use of; PyTorch has none that skips the
    # reduction of the first micro-batch.
    static = recipe.trainer.accumulate_grad_batches == 1
    return DDPStrategy(gradient_as_bucket_view=True, static_graph=static, bucket_cap_mb=recipe.parallel.bucket_mb)
