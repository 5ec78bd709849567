"""How many batches are made ahead, and whether the memory for them is there: asked before anything is started."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_RING_BYTES = 256 << 20  # pictures of a default ring: some tenths of a second of decoding, against uneven machines
_RING_BATCHES = (3, 16)
LEAST_BATCHES = 2  # one is ready while the next is made; with fewer every step would wait for a whole batch


def ring_size(
    batch_size: int,
    sample_bytes: int,
    *,
    ring_batches: int | None = None,
    ring_bytes: int | None = None,
    local_ranks: int = 1,
) -> int:
    """Batches being made or ready at any time.

    Args:
        batch_size: samples of a batch, or the most that a pack may hold.
        sample_bytes: pictures of one sample.
        ring_batches: as many, and no choice of ours; None = what 256 MB hold, at least 3 and at most 16.
        ring_bytes: pictures all of them may take; None = half of the machine's memory, shared by `local_ranks`.

    Raises:
        ValueError: not even two batches of the size fit, or not as many as asked for; says how many samples do.
    """
    if ring_bytes is not None and ring_bytes < 1:
        raise ValueError(f"ring_bytes={ring_bytes} is not allowed; give 1 or more")
    limit, room = _limit(ring_bytes, local_ranks)
    batch_bytes = max(1, batch_size * sample_bytes)
    fitting = limit // batch_bytes
    wanted = ring_batches or min(max(_RING_BYTES // batch_bytes, _RING_BATCHES[0]), _RING_BATCHES[1])
    least = ring_batches or LEAST_BATCHES
    if fitting < least:
        samples = limit // max(1, sample_bytes)
        raise ValueError(
            f"batch_size={batch_size} outruns the prefetch: {least} batches made ahead are {least * batch_size} "
            f"samples of {sample_bytes} bytes ({least * batch_bytes / 1e9:.2f} GB), {room} holds {samples} samples. "
            f"Give a batch_size of at most {samples // least} and accumulate gradients, a larger ring_bytes, or "
            "smaller pictures (transport=yuv420p halves them)"
        )
    return int(min(wanted, fitting))


def _limit(ring_bytes: int | None, local_ranks: int) -> tuple[int, str]:
    """Bytes the ring may take, and where the number comes from."""
    if ring_bytes is not None:
        return ring_bytes, f"ring_bytes={ring_bytes}"
    share = _machine_bytes() // 2 // max(1, local_ranks)
    whose = "" if local_ranks == 1 else f" for each of its {local_ranks} ranks"
    return share, f"half of this machine's memory{whose}, {share} bytes,"


def _machine_bytes() -> int:
    """Memory of this machine, or of the container that it is a part of."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # systems that do not tell
        machine = 1 << 62
    return min([machine, *_container_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _container_limits(own: Path, groups: Path) -> Iterator[int]:
    """Bytes that the control groups of this process allow it, its own and those around it; of either version."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # no Linux
        return
    for _, kinds, path in lines:
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        inside = root / path.lstrip("/")
        # From inside a container its own group often is the root of all that can be seen.
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):  # not there, or "max"
                    yield int((folder / name).read_text())
