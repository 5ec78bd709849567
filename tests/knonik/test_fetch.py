"""Packets come out as the index describes them, whichever way they were fetched."""

from collections.abc import Callable
from pathlib import Path

import knonik
from knonik.fetch import DirectSource, packet_source


def test_a_local_folder_is_read_when_asked(make_set: Callable[..., Path], tmp_path: Path) -> None:
    with knonik.open(make_set([7, 5]), cache_dir=tmp_path) as dataset:
        source = packet_source(dataset)
        assert isinstance(source, DirectSource)
        key, number = dataset.locate(1, dataset.cameras[0], 3)
        assert source.announce(0, [(key, dataset.index.object(key).gop_number(number))])
        packets, pts = source.packets(key, number)
        gop = dataset.index.gop(key, number).through(number)
        assert [bytes(packet) for packet in packets] == [bytes(packet) for packet in gop.read(dataset.store)]
        assert pts == gop.pts.tolist()
        source.done(0)
        assert source.gauges()["reads"] == 1
        assert source.gauges()["read_bytes"] == gop.sizes.sum()
        source.close()
