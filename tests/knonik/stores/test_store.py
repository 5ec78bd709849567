"""Local folders and S3 prefixes give the same bytes; short or escaping reads are refused."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from knonik.stores.base import GAUGES, LocalStore, ObjectChanged, ObjectMissing, Store, StoreError, open_store

BODY = bytes(range(256)) * 40
FILES = {"meta/info.json": b"{}", "data/chunk-000/a.bin": BODY, "data/chunk-001/ü b.bin": b"x", "database.txt": b"no"}


@pytest.fixture
def local(tmp_path: Path) -> Store:
    for key, body in FILES.items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(body)
        os.utime(tmp_path / key, ns=(1, 1))  # long ago: clocks of file systems are coarse, and a change is to be seen
    return open_store(tmp_path)


@pytest.fixture
def s3(new_bucket: Callable[..., tuple[str, Any]]) -> Iterator[Store]:
    inside = {f"sets/one/{key}": body for key, body in FILES.items()}
    bucket, _ = new_bucket({**inside, "sets/one-more/data/other.bin": b"other dataset"})
    store = open_store(f"s3://{bucket}/sets/one/")
    yield store
    store.close()


def _check_same(store: Store) -> None:
    assert store.list("") == sorted(FILES)
    assert store.sizes("data") == {key: len(FILES[key]) for key in sorted(FILES) if key.startswith("data/")}
    assert store.list("nothing") == []
    assert store.read("data/chunk-001/ü b.bin") == b"x"
    assert store.read_range("data/chunk-000/a.bin", 250, 20) == BODY[250:270]
    assert store.read_range("data/chunk-000/a.bin", 5, 0) == b""
    assert store.size("data/chunk-000/a.bin") == len(BODY)
    assert store.exists("meta/info.json")
    assert not store.exists("meta/tasks.jsonl")
    with store.open("data/chunk-000/a.bin") as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == BODY[-10:]
        file.seek(3)
        assert file.read(7) == BODY[3:10]
    for call in (store.read, store.size, lambda key: store.read_range(key, 0, 5)):
        with pytest.raises(ObjectMissing, match=r"nothing\.bin"):
            call("nothing.bin")
    with pytest.raises(StoreError, match=rf"a\.bin bytes {len(BODY) - 5}-{len(BODY) + 4}"):
        store.read_range("data/chunk-000/a.bin", len(BODY) - 5, 10)
    for key in ("../secret", "data/../../secret", "/etc/passwd", ""):
        with pytest.raises(ValueError, match="leaves the store"):
            store.read(key)
        with pytest.raises(ValueError, match="leaves the store"):
            store.read_range(key, 0, 1)
    with pytest.raises(ValueError, match="negative"):
        store.read_range("meta/info.json", -1, 1)


def _check_versions(store: Store) -> None:
    objects = store.objects("")
    assert {key: info.size for key, info in objects.items()} == store.sizes("")
    key = "data/chunk-000/a.bin"
    info = objects[key]
    assert store.read_range(key, 10, 5, version=info.version) == BODY[10:15]
    with store.open(key, info) as file:
        file.seek(9)
        assert file.read(9) == BODY[9:18]
    with store.open(key, info) as file:
        store.write(key, BODY[::-1])
        assert store.read(key) == BODY[::-1]
        with pytest.raises(ObjectChanged, match=r"a\.bin"):
            store.read_range(key, 10, 5, version=info.version)
        with pytest.raises(ObjectChanged, match=r"a\.bin"):
            file.read()
    changed = store.objects("data")[key]
    assert changed.size == info.size
    assert changed.version != info.version
    store.write(".knonik/new/index.npz", b"published")
    assert store.read(".knonik/new/index.npz") == b"published"
    assert set(store.objects("")) == {*objects, ".knonik/new/index.npz"}
    with pytest.raises(ValueError, match="leaves the store"):
        store.write("../outside", b"")


def _check_gauges(store: Store) -> None:
    assert set(store.gauges()) == set(GAUGES)
    before = store.gauges()
    store.read("data/chunk-000/a.bin")
    store.read_range("data/chunk-000/a.bin", 5, 100)
    with pytest.raises(StoreError):
        store.read("nothing.bin")
    growth = {name: value - before[name] for name, value in store.gauges().items() if value != before[name]}
    assert growth == {"gets": 2, "get_bytes": len(BODY) + 100, "failed": 1}


def test_local_folder(local: Store) -> None:
    _check_same(local)
    path = local.local_path("meta/info.json")
    assert path is not None
    assert path.read_bytes() == b"{}"
    assert local.is_local
    _check_gauges(local)
    _check_versions(local)


def test_s3_gives_the_same_answers(s3: Store) -> None:
    _check_same(s3)
    assert s3.uri.endswith("/sets/one")
    assert not s3.is_local
    _check_gauges(s3)
    _check_versions(s3)
    assert s3.local_path("meta/info.json") is None
    s3.close()
    with pytest.raises(StoreError, match="closed"):
        s3.read("meta/info.json")


def test_reading_leaves_no_descriptor(local: Store, since) -> None:
    watch = since()
    for _ in range(50):
        local.read_range("data/chunk-000/a.bin", 0, 100)
    with pytest.raises(StoreError):
        local.read_range("data/chunk-000/a.bin", 0, len(BODY) + 1)
    assert watch.files() == []


def test_addresses(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "x").write_bytes(b"1")
    store = open_store(folder.as_uri())
    assert isinstance(store, LocalStore)
    assert store.read("x") == b"1"
    with pytest.raises(ValueError, match=r"allowed are /path, file:///path and s3://"):
        open_store("gs://bucket/x")
    with pytest.raises(ValueError, match="names no bucket"):
        open_store("s3:///x")
    with pytest.raises(ValueError, match="names a host"):
        open_store("file://host/x")


def test_a_folder_that_may_not_be_read_is_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    assert store.sizes("nowhere") == {}

    def refuse(path: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match=f"cannot list {tmp_path}.*: Permission denied"):
        store.sizes("")
