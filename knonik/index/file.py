"""The stored form of a video index: a few bytes a frame, in the cache folder or published beside the dataset.

Each object's packet table is compressed on its own, so opening an index costs its file size and an object is unpacked
when it is first used. The file is a plain .npz archive: its checksums find damage, and it holds no pickled objects.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.mp4.packets import CodecRecord, PacketTable

FORMAT = 2  # raise it when the meaning of the stored arrays changes
DAMAGE = (OSError, ValueError, KeyError, IndexError, EOFError, TypeError, zipfile.BadZipFile, zlib.error, struct.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable:
    """Packet table of one object, compressed; `unpack_table` gives it back."""

    codec: CodecRecord
    body: bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Where the rows of one camera are, as far as known.

    first: [E] first frame of each episode inside its object, -1 where the object was not read yet. moved: int32 [rows]
    distance of a row's frame from first + row, None where it is 0 everywhere. far_rows: rising numbers of the rows
    whose frame is more than the stock tolerance away, far_s: by how many seconds.
    """

    first: NDArray[np.int64]
    moved: NDArray[np.int32] | None
    far_rows: NDArray[np.int64]
    far_s: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StoredIndex:
    """An index or a part of one.

    fingerprint, uri: dataset and where it lay. match: rule by which rows found their frames. data: version of the data
    files whose timestamps did that. tables, versions: by object key. rows: by camera.
    """

    fingerprint: str
    uri: str
    match: str
    data: str
    tables: Mapping[str, PackedTable]
    versions: Mapping[str, str]
    rows: Mapping[str, StoredRows]


def pack_table(table: PacketTable) -> PackedTable:
    """Compress a packet table: about 2 bytes a packet for constant frame rates."""
    ends = table.offset + table.size
    parts = [struct.pack("<q", len(table))]
    # Packets usually follow each other without a gap: then nothing but the sizes is left to store.
    gaps = table.offset - np.append(0, ends)[: len(table)]
    for values in (gaps, table.size, np.diff(table.pts, prepend=0), np.diff(table.dts, prepend=0)):
        narrow = values.astype(_narrow(values))
        parts += [narrow.dtype.str[1:].encode(), narrow.astype(narrow.dtype.newbyteorder("<")).tobytes()]
    parts += [np.packbits(table.sync).tobytes(), np.packbits(table.shown).tobytes()]
    return PackedTable(codec=table.codec, body=zlib.compress(b"".join(parts), 6))


def unpack_table(packed: PackedTable) -> PacketTable:
    """The packet table again.

    Raises:
        ValueError, struct.error, zlib.error: the bytes are not what `pack_table` made.
    """
    data = zlib.decompress(packed.body)
    (count,) = struct.unpack_from("<q", data)
    position = 8
    fields: list[NDArray[np.int64]] = []
    for _ in range(4):
        kind = np.dtype("<" + data[position : position + 2].decode("latin-1"))
        position += 2
        fields.append(np.frombuffer(data, kind, count, position).astype(np.int64))
        position += count * kind.itemsize
    gaps, size, pts, dts = fields
    bits = np.frombuffer(data, np.uint8, -1, position).reshape(2, -1)
    sync, shown = (np.unpackbits(row, count=count).astype(np.bool_) for row in bits)
    return PacketTable(
        codec=packed.codec,
        offset=np.cumsum(gaps + np.append(0, size)[:count]),
        size=size,
        pts=np.cumsum(pts),
        dts=np.cumsum(dts),
        sync=sync,
        shown=shown,
    )


def _narrow(values: NDArray[np.int64]) -> type[np.signedinteger[Any]]:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return kind
    return np.int64


def encode_index(index: StoredIndex) -> bytes:
    """The index as the bytes of a file."""
    codecs = list(dict.fromkeys(table.codec for table in index.tables.values()))
    number = {codec: i for i, codec in enumerate(codecs)}
    header = {
        "format": FORMAT,
        "fingerprint": index.fingerprint,
        "uri": index.uri,
        "match": index.match,
        "data": index.data,
        "codecs": [{**asdict(codec), "extradata": codec.extradata.hex()} for codec in codecs],
        "objects": [
            [key, index.versions.get(key, ""), number[table.codec], len(table.body)]
            for key, table in index.tables.items()
        ],
        "cameras": list(index.rows),
    }
    arrays: dict[str, NDArray[Any]] = {
        "header": _bytes(zlib.compress(json.dumps(header).encode())),
        "packets": _bytes(b"".join(table.body for table in index.tables.values())),
    }
    for i, rows in enumerate(index.rows.values()):
        arrays |= {f"first{i}": rows.first, f"far_rows{i}": rows.far_rows, f"far_s{i}": rows.far_s}
        if rows.moved is not None:
            arrays[f"moved{i}"] = _bytes(zlib.compress(rows.moved.astype("<i4").tobytes(), 1))
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def decode_index(body: bytes) -> StoredIndex:
    """Read what `encode_index` wrote.

    Raises:
        One of DAMAGE: the bytes are no index, damaged, or of another version of this library.
    """
    with np.load(io.BytesIO(body), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(zlib.decompress(arrays["header"].tobytes()))
    if header["format"] != FORMAT:
        raise ValueError(f"it has format {header['format']}, this version reads {FORMAT}")
    codecs = [CodecRecord(**{**codec, "extradata": bytes.fromhex(codec["extradata"])}) for codec in header["codecs"]]
    packets = memoryview(arrays["packets"]).cast("B")
    tables, versions, begin = {}, {}, 0
    for key, version, codec, length in header["objects"]:
        tables[key] = PackedTable(codec=codecs[codec], body=packets[begin : begin + length])
        versions[key] = version
        begin += length
    if begin != len(packets):
        raise ValueError(f"its objects take {begin} bytes, it holds {len(packets)}")
    rows = {}
    for i, name in enumerate(header["cameras"]):
        moved = arrays.get(f"moved{i}")
        rows[name] = StoredRows(
            first=arrays[f"first{i}"],
            moved=None if moved is None else np.frombuffer(zlib.decompress(moved.tobytes()), "<i4").astype(np.int32),
            far_rows=arrays[f"far_rows{i}"],
            far_s=arrays[f"far_s{i}"],
        )
    return StoredIndex(
        fingerprint=header["fingerprint"],
        uri=header["uri"],
        match=header["match"],
        data=header.get("data", ""),
        tables=tables,
        versions=versions,
        rows=rows,
    )


def _bytes(body: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(body, np.uint8)
