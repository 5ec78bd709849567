"""The store of frozen features: bounded, shared, and nothing wrong in it after a process was killed."""

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.gr00t_n17.feature_store import FeatureCache, Stored

MB = 1_000_000


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def matrix(number: int, rows: int = 7, width: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that follow from the key alone."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows + number % 5, width, generator=generator).to(dtype)


def put(cache: FeatureCache, numbers: range, **options: int) -> None:
    cache.put([(key(n), Stored(values=matrix(n, **options), mark=n % 2 == 1)) for n in numbers])


def check(cache: FeatureCache, number: int, **options: int) -> bool:
    """Whether the entry is there; what is there is right."""
    (found,) = cache.get([key(number)])
    if found is not None:
        assert torch.equal(found.values, matrix(number, **options))
        assert found.mark == (number % 2 == 1)
    return found is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_bit_for_bit_and_outlive_the_process(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = FeatureCache(tmp_path, MB, "weights 1")
    cache.put([(key(n), Stored(values=matrix(n, dtype=dtype), mark=False)) for n in range(20)])
    cache.close()
    again = FeatureCache(tmp_path, MB, "weights 1")
    assert len(again) == 20
    for n, stored in enumerate(again.get([key(n) for n in range(20)])):
        assert stored is not None
        assert stored.values.dtype == dtype
        assert torch.equal(stored.values, matrix(n, dtype=dtype))
    assert again.get([key(99)]) == [None]
    assert (again.hits, again.misses) == (20, 1)


def test_other_keys_see_nothing(tmp_path: Path) -> None:
    put(FeatureCache(tmp_path, MB, "weights 1"), range(3))
    assert not check(FeatureCache(tmp_path, MB, "weights 2"), 0)


def test_the_folder_stays_within_its_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = 20_000
    cache = FeatureCache(tmp_path, limit, "a")
    for n in range(100):
        put(cache, range(n, n + 1))
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert limit * 0.9 < used <= limit
    assert cache.full
    assert "model.feature_cache" in caplog.text
    kept = sum(check(cache, n) for n in range(100))
    assert kept == len(cache) < 100
    put(FeatureCache(tmp_path, limit, "a"), range(100, 110))  # another process finds it full
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= limit


def test_a_cache_that_is_not_in_use_makes_room(tmp_path: Path) -> None:
    limit = 20_000
    old, used = FeatureCache(tmp_path, limit, "old"), FeatureCache(tmp_path, limit, "used")
    put(old, range(20))
    put(used, range(5))
    new = FeatureCache(tmp_path, limit, "new")
    put(new, range(30))
    assert new.full  # both others are open
    old.close()
    new = FeatureCache(tmp_path, limit, "new")
    put(new, range(24))
    assert not new.full
    assert all(check(new, n) for n in range(24))
    assert all(check(used, n) for n in range(5))
    assert len(FeatureCache(tmp_path, limit, "old")) == 0


def test_processes_share_what_they_keep(tmp_path: Path) -> None:
    first, second = FeatureCache(tmp_path, MB, "a"), FeatureCache(tmp_path, MB, "a")
    put(first, range(5))
    assert all(check(second, n) for n in range(5))
    put(second, range(10))  # five of them are there already
    assert all(check(first, n) for n in range(10))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.index")) == 10 * 52
    with ThreadPoolExecutor(2) as pool:  # locks of two openings exclude each other as those of two processes do
        for cache, first_number in ((first, 100), (second, 110)):
            pool.submit(_put_one_by_one, cache, range(first_number, first_number + 20))
    assert all(check(FeatureCache(tmp_path, MB, "a"), n) for n in range(100, 130))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.index")) == 40 * 52


def _put_one_by_one(cache: FeatureCache, numbers: range) -> None:
    for n in numbers:
        put(cache, range(n, n + 1))


def test_a_killed_process_leaves_no_wrong_value(tmp_path: Path) -> None:
    """Killed in the middle of its writing, twice over."""
    script = textwrap.dedent(
        """
        import sys, itertools, pathlib
        sys.path[:0] = sys.argv[2:]
        from test_feature_store import FeatureCache, put
        cache = FeatureCache(pathlib.Path(sys.argv[1]), 10**9, "a")
        for n in itertools.count(len(cache)):
            put(cache, range(n, n + 1), rows=300, width=256)
            print(n, flush=True)
        """
    )
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", script, str(tmp_path), str(here), str(here.parents[2])]
    confirmed = 0
    for wanted in (4, 23):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _, line in zip(range(wanted), process.stdout, strict=False):
                confirmed = int(line)
            os.kill(process.pid, signal.SIGKILL)
        cache = FeatureCache(tmp_path, 10**9, "a")
        assert len(cache) > confirmed
        assert sum(check(cache, n, rows=300, width=256) for n in range(len(cache) + 50)) == len(cache)
        cache.close()


@pytest.mark.parametrize("damage", ["value", "record", "short value", "short record"])
def test_what_a_power_cut_leaves_is_computed_again(tmp_path: Path, damage: str) -> None:
    cache = FeatureCache(tmp_path, MB, "a")
    put(cache, range(4))
    cache.close()
    (data,), (index,) = tmp_path.rglob("*.data"), tmp_path.rglob("*.index")
    path = data if "value" in damage else index
    content = bytearray(path.read_bytes())
    if "short" in damage:
        del content[-3:]
    else:
        content[-20] ^= 1
    path.write_bytes(content)
    again = FeatureCache(tmp_path, MB, "a")
    assert [check(again, n) for n in range(4)] == [True, True, True, False]
    put(again, range(4))
    assert all(check(again, n) for n in range(4))


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.feature_cache"):
        FeatureCache(tmp_path, 0, "a")
