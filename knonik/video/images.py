"""Pictures stored as PNG or JPEG bytes in the Parquet files of a dataset. With `peek.py` the only user of Pillow.

A row group is the least that can be read of a Parquet column, and holds far more than the picture asked for. So the
image bytes of every row group that had to be fetched are put, uncompressed and addressable, into one local file; each
is fetched once, by whichever process needs it first, in this run and in later ones.
"""

import hashlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from knonik.cache import one_builder, replacing
from knonik.stores.base import ObjectInfo, Store, StoreError

logger = logging.getLogger(__name__)

_LOCKS = 16  # packing goes on side by side for this many row groups
_WORD = 8  # bytes of an offset in a packed file


class ImageError(RuntimeError):
    """Image bytes that are absent or no RGB picture; names the object, the row and the cause."""


def decode_image(body: bytes) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] from the bytes of a PNG or JPEG file, turned upright as its EXIF orientation says.

    Raises:
        ImageError: not an image, or not an RGB one.
    """
    try:
        with Image.open(io.BytesIO(body)) as image:
            image.load()
            upright = ImageOps.exif_transpose(image) if ExifTags.Base.Orientation in image.getexif() else image
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"{len(body)} bytes are no image Pillow can read: {error}") from error
    if upright.mode != "RGB":
        raise ImageError(f"the image has mode {upright.mode}; only RGB is read, convert the column")
    return np.asarray(upright)


class ImageFiles:
    """Encoded images of one column by (data object, row inside it); safe to use from many threads and processes.

    Args:
        store: where the data objects are.
        column: the image feature, `struct<bytes, path>` or binary.
        folder: packed files go there; they grow up to the size of the images that are used.
        objects: size and version of each data object; a changed object is read anew, and noticed while it is read.
    """

    def __init__(self, store: Store, column: str, folder: Path, objects: Mapping[str, ObjectInfo]) -> None:
        self._store, self._column, self._folder, self._objects = store, column, folder, objects
        self._starts: dict[str, NDArray[np.int64]] = {}

    def read(self, key: str, row: int) -> bytes:
        """Encoded bytes of the image in row `row` of object `key`.

        Raises:
            IndexError: the object has fewer rows.
            ImageError: the row has no image bytes.
            StoreError: the object cannot be read.
        """
        starts = self._row_starts(key)
        if not 0 <= row < starts[-1]:
            raise IndexError(f"{key}: row {row} was asked for, the file has {starts[-1]}")
        group = int(np.searchsorted(starts, row, side="right")) - 1
        path = self._path(key, f"{group}.images")
        try:
            body = _read_packed(path, row - int(starts[group]))
        except FileNotFoundError:
            self._pack(key, group, path)
            body = _read_packed(path, row - int(starts[group]))
        if not body:
            raise ImageError(f"{key}: column {self._column} has no image bytes in row {row}")
        return body

    def _row_starts(self, key: str) -> NDArray[np.int64]:
        """[row groups + 1] first row of each row group, and the number of rows."""
        found = self._starts.get(key)
        if found is None:
            path = self._path(key, "rows.npy")
            if not path.exists():
                with self._open(key) as file:
                    metadata = pq.ParquetFile(file).metadata
                    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                with replacing(path) as temporary, temporary.open("wb") as target:
                    np.save(target, np.cumsum([0, *rows], dtype=np.int64), allow_pickle=False)
            found = self._starts[key] = np.load(path, allow_pickle=False)
        return found

    def _pack(self, key: str, group: int, path: Path) -> None:
        lock = int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % _LOCKS
        with one_builder(path.parent, f"images-{lock}"):
            if path.exists():  # somebody else was faster
                return
            with self._open(key) as file:
                table = pq.ParquetFile(file).read_row_group(group, columns=[self._column])
            column = table.column(self._column).combine_chunks()
            if pa.types.is_struct(column.type):
                column = column.field("bytes")
            bodies = [value.as_buffer() if value.is_valid else b"" for value in column.cast(pa.large_binary())]
            begin = _WORD * (len(bodies) + 1)
            offsets = begin + np.cumsum([0, *map(len, bodies)], dtype=np.int64)
            with replacing(path) as temporary, temporary.open("wb") as target:
                target.write(offsets.tobytes())
                target.writelines(bodies)
            logger.debug("packed %d images of row group %d of %s, %d bytes", len(bodies), group, key, offsets[-1])

    @contextmanager
    def _open(self, key: str) -> Iterator[io.BufferedReader]:
        try:
            with self._store.open(key, self._objects.get(key)) as file:
                yield file
        except StoreError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot read column {self._column} of {key} in {self._store.uri}: {error}") from error

    def _path(self, key: str, name: str) -> Path:
        info = self._objects.get(key)
        identity = f"{key}\n{self._column}\n{info.version if info else ''}"
        return self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}-{name}"


def _read_packed(path: Path, place: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begin, end = np.frombuffer(os.pread(descriptor, 2 * _WORD, place * _WORD), np.int64).tolist()
        return os.pread(descriptor, end - begin, begin)
    finally:
        os.close(descriptor)
