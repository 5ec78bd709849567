"""Reads the headers of video objects: those that are asked for at once, the rest behind, and each one only once.

Several processes may do this on the same folder. The one that holds the lock works through all objects and writes down
what it has as it goes; the others take that over, and read on their own only what they need before it is there.
"""

import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from knonik.cache import replacing
from knonik.columns.arrays import data_version, load_columns
from knonik.index.cache import index_path, latest_path, one_reader, read_index
from knonik.index.file import PackedTable, StoredIndex, encode_index, pack_table, unpack_table
from knonik.index.gop import ObjectIndex
from knonik.index.rows import CameraRows
from knonik.metadata.lerobot import Metadata
from knonik.mp4.packets import HeaderReader, PacketTable
from knonik.stores.base import Store, StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

_CONNECTIONS = 32  # headers are small, so latency counts and not bandwidth
_STEP = 128  # objects between two looks at whether to stop or to write down
_FIRST_SAVE = 256  # objects read before the first part is written down, then each time their number has grown by half
_POLL_S = 0.25  # how often a process looks for what another one has written


class IndexBuilder:
    """Packet tables and rows of a dataset's video objects, made when needed; safe to use from many threads.

    Args:
        folder: where the index is kept and where the column cache of the dataset is.
        match: `time` or `index`, see `knonik.index.stock`.

    Attributes:
        rows: by camera, filled for the objects that are done.
        failures: objects whose content is no readable video, or that are not there, not to be read, or no longer the
            ones that were listed, with the error.
    """

    def __init__(self, store: Store, metadata: Metadata, folder: Path, match: str) -> None:
        self._store, self._metadata, self._folder, self._match = store, metadata, folder, match
        episodes = metadata.episodes
        self.rows = {
            name: CameraRows(camera, episodes) for name, camera in episodes.cameras.items() if camera.kind != "image"
        }
        # Cameras that show an object, by its number among the camera's keys: nearly always one.
        self._users: dict[str, list[tuple[str, int]]] = {}
        for name, rows in self.rows.items():
            for number, key in enumerate(rows.camera.keys):
                self._users.setdefault(key, []).append((name, number))
        self._data = data_version(metadata.episodes)
        self._queue = iter(self._users)  # what the background has still to look at
        self._headers = HeaderReader(store)
        self._packed: dict[str, PackedTable] = {}
        self._done: set[str] = set()
        self.failures: dict[str, Exception] = {}
        self._lock = threading.Lock()
        self._pending: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._timestamps: Any = None
        self._columns_lock = threading.Lock()
        self._saved = 0
        self._looked = 0  # state of the file in which other processes may have written something
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def keys(self) -> list[str]:
        """All video objects."""
        return list(self._users)

    @property
    def num_missing(self) -> int:
        """Objects not read yet."""
        return len(self._users) - len(self._done)

    @property
    def complete(self) -> bool:
        """Whether every object was read, with success or with an entry in `failures`."""
        return len(self._done) == len(self._users)

    @property
    def needs_timestamps(self) -> bool:
        """Whether objects are missing and the column their rows are matched by was not read yet."""
        return self._match == "time" and self._timestamps is None and not self.complete

    def is_video(self, key: str) -> bool:
        """Whether the key names a video object of the dataset."""
        return key in self._users

    def version(self, key: str) -> str:
        """Version of an object as the dataset's listing gives it."""
        info = self._metadata.objects.get(key)
        return info.version if info is not None else ""

    def table(self, key: str) -> PacketTable:
        """Packet table of an object, read now if it was not yet.

        Raises:
            KeyError: no video object of the dataset.
            Mp4Error and other ValueErrors: the object is damaged.
            StoreError: it cannot be read; StoreUnavailable: nothing can at present.
        """
        if key not in self._users:
            raise KeyError(f"{key} is no video object of this dataset")
        self.need([key])
        if key in self.failures:
            # A copy: raised again and again, one exception would collect the frames of all who met it.
            raise copy.copy(self.failures[key])
        return unpack_table(self._packed[key])

    def need(self, keys: Iterable[str]) -> None:
        """Have these objects read when it returns, concurrently. Damaged ones are noted in `failures`.

        Raises:
            StoreUnavailable: the store does not answer at present; asking again tries again.
        """
        wanted = [key for key in dict.fromkeys(keys) if key not in self._done]
        waits = [future for key in wanted if (future := self._start(key)) is not None]
        for future in waits:
            future.result()

    def wait(self) -> None:
        """Have all objects read when it returns, by this or by another process.

        Raises:
            StoreUnavailable: the store does not answer at present.
        """
        if self._thread is not None:
            self._thread.join()  # it ends without success when an object cannot be read: then read here
        step = 4 * _CONNECTIONS
        keys = [key for key in self._users if key not in self._done]
        for begin in range(0, len(keys), step):
            self.need(keys[begin : begin + step])
        if keys:
            self._conclude()

    def start(self) -> None:
        """Read all objects in a background thread, unless everything is there."""
        if not self.complete and self._thread is None:
            # The thread holds the builder weakly between its steps: a forgotten dataset is collected and stops it.
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._stop), name="knonik-index", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the threads; what was read is kept in the folder."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._release(cancel=True)
        if len(self._packed) > self._saved:
            self.save()

    def has_far_rows(self, key: str) -> bool:
        """Whether some row shown by an object that was read breaks the stock tolerance."""
        return any(number in self.rows[name].far_objects for name, number in self._users.get(key, ()))

    def adopt(self, stored: StoredIndex, *, without: Collection[str] = (), other_place: bool = False) -> list[str]:
        """Take over what an index of this dataset, or of an earlier state of it, knows and this one does not.

        Args:
            without: objects to leave alone.
            other_place: it describes a copy of the dataset elsewhere, whose versions say nothing about these objects.

        Returns:
            Objects that have changed since it was made, which are read again.
        """
        same = stored.fingerprint == self._metadata.fingerprint
        objects = self._metadata.objects
        usable, changed = set(), []
        for key in (stored.tables.keys() & self._users.keys()).difference(without):
            here, there = self.version(key), stored.versions.get(key, "")
            if (same and (other_place or not here or not there)) or (here and here == there):
                usable.add(key)
            elif key in objects:
                changed.append(key)
        with self._lock:
            fresh = usable - self._done
            self._packed |= {key: stored.tables[key] for key in fresh}
            # Row k has frame k whatever its timestamp; else a data file of the same size may hold other ones.
            rows_hold = self._match == "index" or other_place or stored.data == self._data
            if same and stored.match == self._match and rows_hold:
                known = {}
                for name, rows in self.rows.items():
                    if name in stored.rows:
                        rows.adopt(stored.rows[name], np.array([key in fresh for key in rows.camera.keys], np.bool_))
                    known[name] = rows.known_objects().tolist()
                self._done |= {key for key in fresh if all(known[name][number] for name, number in self._users[key])}
        return sorted(changed)

    def stored(self) -> StoredIndex:
        """A copy of what is known, without the damaged objects."""
        with self._lock:
            tables = {key: self._packed[key] for key in self._users if key in self._done and key in self._packed}
            without: dict[str, set[int]] = {name: set() for name in self.rows}
            for key in self.failures:
                for name, number in self._users[key]:
                    without[name].add(number)
            return StoredIndex(
                fingerprint=self._metadata.fingerprint,
                uri=self._store.uri,
                match=self._match,
                data=self._data,
                tables=tables,
                versions={key: self.version(key) for key in tables},
                rows={name: rows.stored(without[name]) for name, rows in self.rows.items()},
            )

    def save(self) -> None:
        """Write what is known to the folder, together with what other processes have written there since."""
        path = index_path(self._folder, self._store.uri, self._match)
        if (other := read_index(path)) is not None and other.fingerprint == self._metadata.fingerprint:
            self.adopt(other)
        stored = self.stored()
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(encode_index(stored))
            with replacing(latest_path(self._folder, self._store.uri)) as temporary:
                temporary.write_text(self._metadata.fingerprint)
        except OSError as error:
            logger.warning("the video index cannot be kept in %s (%s); the next run reads it again", path, error)
        self._saved = len(stored.tables)

    def step(self) -> bool:
        """Read the next few objects and write down the whole now and then; False when nothing is left."""
        keys = list(islice((key for key in self._queue if key not in self._done), _STEP))
        under_way: deque[Future[None]] = deque()
        for key in keys:
            if (future := self._start(key)) is not None:
                under_way.append(future)
            # Half of the connections: objects that somebody waits for always find a free one.
            if len(under_way) >= _CONNECTIONS // 2:
                under_way.popleft().result()
        for future in under_way:
            future.result()
        if keys and not self.complete and len(self._packed) >= max(_FIRST_SAVE, self._saved * 3 // 2):
            self.save()
        if self.complete:
            self._conclude()
        return bool(keys) and not self.complete

    def _conclude(self) -> None:
        self.save()
        damaged = f", {len(self.failures)} of them cannot be read" if self.failures else ""
        logger.info("video index built: %d objects%s", len(self._users), damaged)
        self._release()

    def _release(self, *, cancel: bool = False) -> None:
        """End the reading threads; they come back when there is something to read again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=cancel)

    def look(self) -> None:
        """Take over what another process has written down."""
        path = index_path(self._folder, self._store.uri, self._match)
        try:
            state = path.stat().st_mtime_ns
        except OSError:
            return
        if state != self._looked and (other := read_index(path)) is not None:
            self._looked = state
            self.adopt(other)

    def turn(self) -> AbstractContextManager[bool]:
        """Whether this process is the one that reads all objects."""
        return one_reader(self._folder)

    def _start(self, key: str) -> Future[None] | None:
        with self._lock:
            if key in self._done:
                return None
            if key not in self._pending:
                if self._pool is None:
                    if self._stop.is_set():
                        raise StoreUnavailable(f"{key} of {self._store.uri} was asked for after the dataset was closed")
                    self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="knonik-index")
                self._pending[key] = self._pool.submit(self._read, key)
            return self._pending[key]

    def _read(self, key: str) -> None:
        try:
            packed = self._packed.get(key)
            failure: Exception | None = None
            times = np.zeros(0)
            try:
                table = unpack_table(packed) if packed is not None else self._read_table(key)
                times = ObjectIndex(key, table).frame_times_s
                if not len(times):
                    raise ValueError(f"{key}: holds no video frame")
                packed = packed or pack_table(table)
            except StoreUnavailable:
                raise
            except (ValueError, StoreError) as error:  # of this object alone: it must not hit the others
                failure = error
                logger.warning("video object cannot be used: %s", error)
            # Before the lock is taken: the first reading of the column takes a while.
            timestamps = self._read_timestamps() if failure is None and self._match == "time" else None
            with self._lock:
                for name, number in self._users[key]:
                    if failure is None:
                        self.rows[name].add(number, times, timestamps)
                    else:
                        self.rows[name].add_unreadable(number)
                if failure is not None:
                    self.failures[key] = failure.with_traceback(None)
                elif packed is not None:
                    self._packed[key] = packed
                self._done.add(key)
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def _read_table(self, key: str) -> PacketTable:
        name, number = self._users[key][0]
        members = self.rows[name].members(number)
        info = self._metadata.objects.get(key)
        return self._headers.read(
            key,
            size=info.size if info is not None else None,
            version=info.version or None if info is not None else None,
            frames=int(self._metadata.episodes.length[members].sum()),
            joined=len(members) > 1,
        )

    def _read_timestamps(self) -> Any:
        with self._columns_lock:
            if self._timestamps is None:
                # Rows of a damaged data file have no timestamp, so no frame: an error for who asks for one of them.
                nobody = np.zeros(0, np.int64)
                columns = load_columns(self._store, self._metadata.episodes, ["timestamp"], self._folder, nobody)
                self._timestamps = columns["timestamp"][:, 0]
            return self._timestamps


def _work(builder: "weakref.ref[IndexBuilder]", stop: threading.Event) -> None:
    """Read all objects, or wait for the process that does, until done or told to stop."""
    try:
        more = True
        while more and not stop.is_set():
            own = builder()
            if own is None:
                return
            with own.turn() as turn:
                own.look()
                more = not own.complete
                while turn and more and not stop.is_set():
                    more = own.step()
            del own
            if more:
                stop.wait(_POLL_S)
    except RuntimeError:
        pass  # the interpreter ends: no thread can be started any more
    except (OSError, ValueError) as error:
        if not stop.is_set():
            logger.warning("the video index is not complete (%s); objects are read when they are needed", error)
