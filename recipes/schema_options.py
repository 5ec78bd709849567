"""Keys of the training options: the same step computed faster, in less memory or on more devices.

`compile` and `checkpointing` are the models' own values; their fields stand in `models/common/block_options.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How torchrun's ranks share the work: `replicate` groups of `shard` ranks, each group holding the model once.

    shard 1 is plain data parallelism (DDP), replicate 1 shards over all ranks (FSDP2), both above 1 is HSDP.
    """

    replicate: int | None = None
    """Copies of what is trained; null means as many as the ranks allow."""
    shard: int | None = None
    """Ranks over which a copy is sharded; null means 1, or what `replicate` leaves."""
    bucket_mb: float | None = None
    """MiB of gradients that DDP exchanges at a time, while the backward goes on; null means PyTorch's 25."""

    def sizes(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard), whose product is the number of ranks.

        Raises:
            ValueError: they do not multiply to it.
        """
        replicate, shard = self.replicate, self.shard
        if shard is None:
            shard = 1 if replicate is None else max(1, world_size // max(1, replicate))
        if replicate is None:
            replicate = max(1, world_size // max(1, shard))
        if min(replicate, shard) < 1 or replicate * shard != world_size:
            raise ValueError(f"{replicate} x {shard} (replicate x shard) are not the {world_size} ranks of this run")
        return replicate, shard

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that both sizes, as far as they are given, allow."""
        return max(1, self.replicate or 1) * max(1, self.shard or 1)

    def shards(self, world_size: int) -> int:
        """Ranks that hold one copy of what is trained; as given where the ranks do not fit."""
        try:
            return self.sizes(world_size)[1]
        except ValueError:
            return self.shard or 1
