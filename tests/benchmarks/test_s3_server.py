"""The server of the benchmarks answers as S3 does, and counts what the store says it did."""

import importlib.util
import os
from pathlib import Path

import pytest

from knonik.stores.base import LocalStore, ObjectChanged, ObjectMissing, StoreError
from knonik.stores.s3 import S3Store
from knonik.stores.transport import Policy

SERVER = Path(__file__).resolve().parents[2] / "benchmarks" / "s3_server.py"
LARGE = bytes(range(256)) * 2000


def test_same_answers_as_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("s3_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    s3_server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(s3_server)
    inside = tmp_path / "bucket" / "set"
    (inside / "data").mkdir(parents=True)
    for i in range(1005):
        (inside / "data" / f"é {i:04d}").write_bytes(bytes(i % 5))
    (inside / "large.bin").write_bytes(LARGE)
    (tmp_path / "secret").write_bytes(b"outside")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with s3_server.started(tmp_path / "bucket", latency_ms=1, gbit=1) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store, folder = S3Store("any", "set", policy=Policy(hedge_share=0)), LocalStore(inside)
        assert store.sizes("") == folder.sizes("")
        assert store.sizes("data") == folder.sizes("data")
        info = store.objects("")["large.bin"]
        for offset, length in ((0, 10), (77, 300_000), (len(LARGE) - 5, 5)):
            assert (
                store.read_range("large.bin", offset, length, version=info.version) == LARGE[offset : offset + length]
            )
        assert store.read("large.bin") == LARGE
        assert store.read("data/é 0005") == b""
        assert store.size("large.bin") == len(LARGE)
        for key in ("nothing", "%2e%2e/%2e%2e/secret"):
            with pytest.raises(ObjectMissing):
                store.read(key)
        with pytest.raises(StoreError, match="the object ends"):
            store.read_range("large.bin", len(LARGE) - 5, 6)
        counted = s3_server.stats(endpoint)
        gauges = store.gauges()
        assert (counted["gets"], counted["get_bytes"]) == (gauges["gets"] + 1, gauges["get_bytes"] + 5)
        assert (counted["lists"], counted["heads"]) == (2 + 2 + 2, 1)
        os.utime(inside / "large.bin", ns=(1, 1))
        with pytest.raises(ObjectChanged):
            store.read_range("large.bin", 0, 10, version=info.version)
        store.close()
