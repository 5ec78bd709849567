"""Promises of fetching a checkpoint: files whole or absent, continued, refreshed when they change, nothing pickled."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes import checkpoint_source
from recipes.checkpoint_source import is_hub_id, local_checkpoint

FILES = {
    "gr00t/config.json": b'{"model_type": "Gr00tN1d7"}',
    "gr00t/model-00001-of-00001.safetensors": bytes(range(256)) * 40,
    "gr00t/experiment_cfg/conf.json": b"{}",
    "gr00t/optimizer.pt": b"pickled",
}


def content(folder: Path) -> dict[str, bytes]:
    """Every file of the folder that does not begin with a dot."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_a_checkpoint_on_s3_comes_whole_once_and_follows_changes(
    new_bucket: Callable[[dict[str, bytes]], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, client = new_bucket(FILES)
    expected = {key.removeprefix("gr00t/"): body for key, body in FILES.items() if not key.endswith(".pt")}
    with caplog.at_level("INFO"):
        folder = local_checkpoint(f"s3://{bucket}/gr00t", str(tmp_path))
    assert content(folder) == expected
    assert "fetching 3 files" in caplog.text
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    caplog.clear()
    with caplog.at_level("INFO"):
        assert local_checkpoint(f"s3://{bucket}/gr00t/", str(tmp_path)) == folder
    assert "fetching" not in caplog.text
    assert {file: file.stat().st_mtime_ns for file in before} == before

    client.put_object(Bucket=bucket, Key="gr00t/config.json", Body=b'{"model_type": "Gr00tN1d8"}')  # of equal size
    client.delete_object(Bucket=bucket, Key="gr00t/experiment_cfg/conf.json")
    local_checkpoint(f"s3://{bucket}/gr00t", str(tmp_path))
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "Gr00tN1d8"}
    assert not (folder / "experiment_cfg/conf.json").exists()
    with pytest.raises(FileNotFoundError, match="no safetensors or JSON files there"):
        local_checkpoint(f"s3://{bucket}/other", str(tmp_path))


def test_a_distributed_checkpoint_on_s3_is_refused_by_what_it_is(
    new_bucket: Callable[[dict[str, bytes]], Any], tmp_path: Path
) -> None:
    parts = {"run/config.json": b"{}", "run/model/.metadata": b"x", "run/model/__0_0.distcp": b"y"}
    bucket, _ = new_bucket(parts)
    with pytest.raises(FileNotFoundError, match=r"a distributed one .* is not read from S3: copy its folder"):
        local_checkpoint(f"s3://{bucket}/run", str(tmp_path))
    assert not list(tmp_path.rglob("config.json"))


def test_a_fetch_that_broke_off_is_continued(
    new_bucket: Callable[[dict[str, bytes]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knonik.stores.base import StoreUnavailable
    from knonik.stores.s3 import S3Store

    bucket, _ = new_bucket(FILES)
    monkeypatch.setattr(checkpoint_source, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint_source, "_CONNECTIONS", 2)
    read_range = S3Store.read_range
    asked: list[int] = []

    def failing(self: S3Store, key: str, offset: int, length: int, **options: Any) -> bytes:
        if key.endswith(".safetensors"):
            asked.append(offset)
            if offset >= 5000 and broken:
                raise StoreUnavailable("the line is cut")
        return read_range(self, key, offset, length, **options)

    monkeypatch.setattr(S3Store, "read_range", failing)
    broken = True
    with pytest.raises(FileNotFoundError, match=r"could not be fetched: the line is cut"):
        local_checkpoint(f"s3://{bucket}/gr00t", str(tmp_path))
    assert not list(tmp_path.rglob("*.safetensors")), "a file has its name only when it is whole"
    broken = False
    asked.clear()
    folder = local_checkpoint(f"s3://{bucket}/gr00t", str(tmp_path))
    assert min(asked) == 5000, "what had arrived is not read again"
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == FILES["gr00t/model-00001-of-00001.safetensors"]
    assert not list(folder.rglob(".*.part"))


def test_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_checkpoint(str(tmp_path)) == tmp_path
    assert is_hub_id("nvidia/GR00T-N1.7-3B")
    assert is_hub_id("nvidia/GR00T-N1.7-LIBERO/libero_10")
    assert not any(is_hub_id(text) for text in ("gr00t", "./a/b", "/a/b", "~/a", "s3://a/b", "a/b/c/d"))
    with pytest.raises(FileNotFoundError, match="OWNER/NAME"):
        local_checkpoint("./nowhere/at/all")

    asked: list[tuple[str, list[str]]] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert local_checkpoint("owner/name") == tmp_path
    assert local_checkpoint("owner/name/libero_10") == tmp_path / "libero_10"
    assert asked == [
        ("owner/name", ["*.safetensors", "*.json"]),
        ("owner/name", ["libero_10/*.safetensors", "libero_10/*.json"]),
    ]
