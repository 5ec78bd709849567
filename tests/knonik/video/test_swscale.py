"""Pictures that libswscale writes into a batch itself: the same bytes as PyAV's, and never a byte beside them."""

import _ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import read_packets
from knonik.stores.base import open_store
from knonik.video import decode, swscale
from knonik.video.decode import FrameTags, GopDecoder
from knonik.video.encode import encode_mp4

MATRICES = (1, 2, 4, 5, 6, 7, 9)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p"])
@pytest.mark.parametrize("size", [(2, 16), (48, 64), (224, 224), (480, 640)])
def test_the_bytes_are_those_of_pyav(pix_fmt: str, size: tuple[int, int]) -> None:
    """Every colour matrix that streams are tagged with, every range, on frames of noise."""
    for matrix in MATRICES:
        for range_ in (0, 1, 2):
            tags = FrameTags(pix_fmt=pix_fmt, matrix=matrix, range=range_)
            assert decode._writes_the_same(tags, *size), tags


@pytest.mark.parametrize("size", [(47, 64), (48, 66), (3, 16)])
def test_sizes_that_are_no_whole_vectors_go_the_other_way(size: tuple[int, int]) -> None:
    assert not decode._writes_the_same(FrameTags(pix_fmt="yuv420p", matrix=6, range=1), *size)


def test_other_results_or_none_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = FrameTags(pix_fmt="yuv420p", matrix=6, range=1)
    frame = decode._frame(np.full(48 * 64 * 3 // 2, 90, np.uint8), 48, 64, tags)
    expected = decode._rgb(frame)
    assert decode._converter(tags, 48, 64).agrees(frame, expected)
    expected[-1, -1, -1] ^= 1
    assert not decode._converter(tags, 48, 64).agrees(frame, expected)
    with pytest.raises(OSError, match="leads to no"):
        swscale._library(_ctypes.__file__)


def test_pictures_are_not_copied_out_of_frames_where_they_need_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of copies is nought for whole vectors; without the library the same bytes come by copies."""
    path = tmp_path / "clip.mp4"
    encode_mp4(path, np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3), np.uint8), fps=30, codec="h264", gop=3)
    store = open_store(tmp_path)
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(2)
    wanted = [gop.pts_of(number) for number in (0, 2, 0)]
    copies = []
    copy = decode._WRITERS["rgb24"]

    def counted(frame: Any, array: np.ndarray) -> None:
        copies.append(array)
        copy(frame, array)

    monkeypatch.setattr(decode, "_WRITERS", {"rgb24": counted})

    def pictures() -> np.ndarray:
        out = np.zeros((3, 48, 64, 3), np.uint8)
        GopDecoder().decode(gop.codec, gop.read(store), gop.pts.tolist(), wanted, list(out))
        return out

    direct = pictures()
    assert not copies
    monkeypatch.setattr(decode, "_writes_the_same", lambda *args: False)
    np.testing.assert_array_equal(pictures(), direct)
    assert len(copies) == 3


def test_memory_that_does_not_fit_is_left_alone() -> None:
    tags = FrameTags(pix_fmt="yuv420p", matrix=6, range=1)
    frame = decode._frame(np.full(48 * 64 * 3 // 2, 90, np.uint8), 48, 64, tags)
    converter = decode._converter(tags, 48, 64)
    flat = np.zeros(48 * 64 * 3 + 16, np.uint8)
    begin = -flat.ctypes.data % 16
    good = flat[begin : begin + 48 * 64 * 3].reshape(48, 64, 3)
    fixed = good.copy()
    fixed.flags.writeable = False
    unaligned = flat[begin + 1 :][: 48 * 64 * 3 - 192].reshape(47, 64, 3)
    for array in (good[:, ::-1], good[:47], unaligned, fixed, np.zeros((48, 64, 3), np.float32)):
        assert not converter.write(frame, array)
        assert not array.any()
    assert converter.write(frame, good)
    np.testing.assert_array_equal(good, decode._rgb(frame))


def test_frames_converted_after_others_were_decoded_are_the_same(tmp_path: Path) -> None:
    """All GOPs begun by one codec context and then ended, a frame each; nothing is written before the end."""
    path = tmp_path / "clip.mp4"
    encode_mp4(path, np.random.default_rng(0).integers(0, 256, (6, 48, 64, 3), np.uint8), fps=30, codec="h264", gop=2)
    store = open_store(tmp_path)
    index = ObjectIndex(path.name, read_packets(store, path.name))
    decoder, out = GopDecoder(), np.zeros((6, 48, 64, 3), np.uint8)
    rests, stock = [], np.zeros_like(out)
    for number in range(6):
        gop = index.gop(number)
        given = gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(number)]
        GopDecoder().decode(*given, [stock[number]])
        rests.append(decoder.start(*given, [out[number]]))
    assert not out.any()
    for rest in rests:
        rest()
    np.testing.assert_array_equal(out, stock)
