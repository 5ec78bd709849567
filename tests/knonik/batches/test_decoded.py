"""Decoded pictures kept on disk: bounded, shared, and only trusted when they are whole."""

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from knonik.batches import decoded
from knonik.batches.decoded import DecodedFrames, open_decoded

SIZE = 12
CAMERAS = {"cam": ("rgb", SIZE)}


def opened(folder: Path, settings: str = "rgb", limit: int = 10 * SIZE, needed: int = 10 * SIZE) -> DecodedFrames:
    kept = open_decoded(folder, {"cam": (settings, SIZE)}, rows=10, limit_bytes=limit, needed_bytes=needed)
    return kept["cam"]


def picture(value: int) -> np.ndarray:
    return np.full((2, 2, 3), value, np.uint8)


def read(kept: DecodedFrames, row: int) -> np.ndarray | None:
    out = picture(255)
    return out if kept.read(row, out) else None


def test_pictures_come_back_and_are_shared(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert read(one, 3) is None
    one.write(3, picture(7))
    np.testing.assert_array_equal(read(other, 3), picture(7))
    assert other.has([3])
    assert not other.has([3, 4])
    assert one.gauges() == {"decoded_bytes": SIZE, "decoded_hits": 0, "decoded_written": 1}
    one.close()
    one.close()
    other.close()
    later = opened(tmp_path)
    np.testing.assert_array_equal(read(later, 3), picture(7))
    assert later.gauges() == {"decoded_bytes": SIZE, "decoded_hits": 1, "decoded_written": 0}


def test_after_a_boot_only_what_was_forced_out_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path)
    first.write(1, picture(1))
    first.close()
    second = opened(tmp_path)
    second.write(2, picture(2))  # never closed: the machine stops here
    monkeypatch.setattr(decoded, "_boot_id", lambda: "another")
    third = opened(tmp_path)
    np.testing.assert_array_equal(read(third, 1), picture(1))
    assert read(third, 2) is None


def test_settings_are_apart_and_make_room(tmp_path: Path) -> None:
    old = opened(tmp_path, "rgb")
    for row in range(10):
        old.write(row, picture(row))
    new = opened(tmp_path, "resized", limit=11 * SIZE)
    assert read(new, 0) is None
    assert old.has(range(10))  # in use, so left alone
    new.write(0, picture(0))
    old.close()
    new.close()
    opened(tmp_path, "third", limit=10 * SIZE).close()
    assert len(list(tmp_path.glob("*.frames"))) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_disk_that_is_full_or_fails_ends_the_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    kept = opened(tmp_path)
    kept.write(0, picture(5))

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(decoded.os, "pwrite", full)
        kept.write(1, picture(6))
        kept.write(2, picture(6))
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    assert (read(kept, 1), read(kept, 2)) == (None, None)
    with monkeypatch.context() as patch:
        patch.setattr(decoded.os, "preadv", full)
        assert read(kept, 0) is None  # to be decoded once more
    np.testing.assert_array_equal(read(kept, 0), picture(5))


def test_a_cut_file_is_no_picture(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.write(0, picture(5))
    (frames,) = tmp_path.glob("*.frames")
    os.truncate(frames, SIZE - 1)
    assert read(kept, 0) is None
