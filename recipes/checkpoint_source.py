"""Where a checkpoint comes from: a folder or file of this machine, a hub id, or a prefix on S3, as a local path."""

import json
import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from knonik.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".json")
_DISTRIBUTED = (".distcp", ".metadata")  # what torch.distributed.checkpoint and NVIDIA's framework write
_PIECE_BYTES = 16 << 20
_CONNECTIONS = 8
_RECORD_FILE = ".fetched.json"


def local_checkpoint(source: str, cache_dir: str | None = None) -> Path:
    """The file or folder of a checkpoint on this machine, fetched first where it lies elsewhere.

    From S3 only safetensors and JSON files are taken. Each appears under its name when it is whole, and what broke off
    is continued; a file that changed there is fetched anew. Processes of one machine wait for the one that fetches.

    Args:
        source: folder or safetensors file, s3://bucket/prefix, or hub id OWNER/NAME, for one of several checkpoints in
            it OWNER/NAME/FOLDER.
        cache_dir: the data layer's cache folder, as `data.cache.dir`; checkpoints go to `checkpoints/` in it.

    Raises:
        FileNotFoundError: nothing there, or it could not be fetched.
    """
    if source.startswith("s3://"):
        return _from_s3(source.rstrip("/"), cache_dir)
    if Path(source).exists():
        return Path(source)
    if not is_hub_id(source):
        raise FileNotFoundError(f"{source}: no such file or folder, and not the form OWNER/NAME of a hub id")
    return _from_hub(source)


def is_hub_id(source: str) -> bool:
    """Whether a source that does not exist here can be meant as OWNER/NAME or OWNER/NAME/FOLDER on the hub."""
    return not source.startswith((".", "/", "~")) and "://" not in source and source.count("/") in (1, 2)


def is_remote(source: str) -> bool:
    """Whether weights are named by an s3:// address or by what can be a hub id."""
    return source.startswith("s3://") or (not Path(source).exists() and is_hub_id(source))


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download

    owner, name, *folder = source.split("/")
    inside = f"{folder[0]}/" if folder else ""
    try:
        root = snapshot_download(f"{owner}/{name}", allow_patterns=[f"{inside}*{suffix}" for suffix in _SUFFIXES])
    except Exception as error:
        raise FileNotFoundError(
            f"checkpoint {source!r}: no such file or folder, and as a hub id it could not be fetched ({error}). "
            "Offline, name a folder that holds the checkpoint's files"
        ) from error
    return Path(root, *folder)


def _from_s3(uri: str, cache_dir: str | None) -> Path:
    from knonik.cache import cache_root, one_builder
    from knonik.stores.base import StoreError, checked_key, open_store

    folder = cache_root(cache_dir) / "checkpoints" / sha256(uri.encode()).hexdigest()[:16]
    store = open_store(uri)
    try:
        with one_builder(folder, "fetch"):
            listed = store.objects("")
            if any(key.endswith(_DISTRIBUTED) for key in listed) and not any(
                key.endswith(".safetensors") for key in listed
            ):
                raise FileNotFoundError(
                    f"checkpoint {uri} is a distributed one (.metadata, *.distcp), which is not read from S3: copy its "
                    "folder to this machine and name that"
                )
            found = {checked_key(key): info for key, info in listed.items() if key.endswith(_SUFFIXES)}
            if not found:
                raise FileNotFoundError(f"checkpoint {uri}: no safetensors or JSON files there")
            _fetch(store, found, folder, uri)
    except StoreError as error:
        raise FileNotFoundError(f"checkpoint {uri} could not be fetched: {error}") from error
    finally:
        store.close()
    return folder


def _fetch(store: "Store", objects: "dict[str, ObjectInfo]", folder: Path, uri: str) -> None:
    """Bring the folder to the state of the listing."""
    record = folder / _RECORD_FILE
    have: dict[str, list[str | int]] = json.loads(record.read_text())["files"] if record.is_file() else {}
    for stale in have.keys() - objects.keys():
        (folder / stale).unlink(missing_ok=True)
    wanted = {key: [info.version, info.size] for key, info in objects.items()}
    missing = [key for key in objects if have.get(key) != wanted[key] or not _has_size(folder / key, objects[key].size)]
    if missing:
        total = sum(objects[key].size for key in missing)
        logger.info("fetching %d files, %.2f GB, of %s to %s", len(missing), total / 1e9, uri, folder)
    done = {key: version for key, version in wanted.items() if key not in missing}
    for key in missing:
        _fetch_file(store, key, objects[key], folder / key)
        done[key] = wanted[key]
        _write(record, {"uri": uri, "files": done})


def _fetch_file(store: "Store", key: str, info: "ObjectInfo", target: Path) -> None:
    """One object in pieces, several at a time, into a file beside its name; continued where it stopped before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # the version is part of the name: what came of another state of the object is never continued
    part = target.with_name(f".{target.name}.{sha256(info.version.encode()).hexdigest()[:12]}.part")
    for other in target.parent.glob(f".{target.name}.*.part"):
        if other != part:
            other.unlink()

    def piece(start: int) -> bytes:
        return store.read_range(key, start, min(_PIECE_BYTES, info.size - start), version=info.version)

    with part.open("ab") as file, ThreadPoolExecutor(_CONNECTIONS) as pool:
        # written in order, so the length of the file says how far it is
        starts = iter(range(file.tell(), info.size, _PIECE_BYTES))
        coming = deque(pool.submit(piece, start) for start in islice(starts, _CONNECTIONS))
        while coming:
            file.write(coming.popleft().result())
            coming.extend(pool.submit(piece, start) for start in islice(starts, 1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _write(file: Path, values: dict[str, object]) -> None:
    from knonik.cache import replacing

    with replacing(file) as temporary:
        temporary.write_text(json.dumps(values))
