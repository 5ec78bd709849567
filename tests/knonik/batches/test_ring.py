"""What is made ahead: the default, its bound, and batches that outrun it, told with the numbers before the start."""

from pathlib import Path

import pytest

from knonik.batches import ring
from knonik.batches.ring import ring_size


def test_small_batches_get_many_and_large_ones_three() -> None:
    assert ring_size(1, 1000) == 16
    assert ring_size(64, 1 << 20, ring_bytes=1 << 30) == 4
    assert ring_size(64, 8 << 20, ring_bytes=2 << 30) == 3
    assert ring_size(64, 8 << 20, ring_bytes=1100 << 20) == 2  # the bound leaves no room for a third
    assert ring_size(64, 8 << 20, ring_batches=1, ring_bytes=600 << 20) == 1  # as asked for


def test_a_pack_that_outruns_the_prefetch_is_refused_with_the_numbers() -> None:
    # 33 frames of three 640x360 cameras, 128 of them as in the published configuration.
    sample = 3 * 33 * 360 * 640 * 3
    with pytest.raises(ValueError, match="outruns") as error:
        ring_size(128, sample, ring_bytes=8_000_000_000)
    said = str(error.value)
    assert "batch_size=128 outruns the prefetch: 2 batches made ahead are 256 samples of 68428800 bytes" in said
    assert "(17.52 GB), ring_bytes=8000000000 holds 116 samples" in said
    assert "batch_size of at most 58" in said
    assert ring_size(58, sample, ring_bytes=8_000_000_000) == 2


def test_the_machines_memory_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knonik.batches.ring._machine_bytes", lambda: 64_000)
    assert ring_size(8, 1000) == 4
    assert ring_size(8, 1000, local_ranks=2) == 2
    with pytest.raises(ValueError, match=r"half of this machine's memory for each of its 4 ranks, 8000 bytes,"):
        ring_size(8, 1000, local_ranks=4)
    with pytest.raises(ValueError, match=r"5 batches made ahead are 40 samples"):
        ring_size(8, 1000, ring_batches=5)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "5000\n"}, [5000]),  # version 2, inside a container
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "7000\n"}, [7000]),
        ("4:memory:/docker/x\n1:cpu:/\n0::/\n", {"memory/memory.limit_in_bytes": "6000\n"}, [6000]),  # version 1
        ("1:cpu:/\n", {"memory.max": "1\n"}, []),
        (None, {"memory.max": "1\n"}, []),
    ],
)
def test_a_container_counts_with_what_it_may_use(
    own: str | None, files: dict[str, str], expected: list[int], tmp_path: Path
) -> None:
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    assert list(ring._container_limits(tmp_path / "own", tmp_path / "groups")) == expected


def test_the_smaller_of_machine_and_container_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knonik.batches.ring._container_limits", lambda own, groups: iter([9000, 8000]))
    assert ring._machine_bytes() == 8000
    monkeypatch.setattr("knonik.batches.ring._container_limits", lambda own, groups: iter([1 << 63]))
    assert 0 < ring._machine_bytes() < 1 << 62


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_bound_below_one_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="ring_bytes"):
        ring_size(1, 1, ring_bytes=wrong)
