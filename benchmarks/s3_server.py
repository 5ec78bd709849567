"""A loopback S3 server for speed claims: a folder as a bucket, with chosen latency and link rate.

    python benchmarks/s3_server.py FOLDER --latency-ms 30 --gbit 1 --port 0

prints its port and serves `FOLDER/key` as `/bucket/key` (any bucket name) until it is stopped: GET with ranges and
If-Match, HEAD, and LIST v2. Signatures are not looked at. Every answer starts after the latency; all bodies share one
link. `/-/stats` gives the counts of requests and body bytes as JSON. One thread: it leaves the rest to the reader.
"""

import argparse
import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_CHUNK = 64 << 10  # turns on the shared link; a small frame group is one of them
_PAGE = 1000  # keys in one LIST answer, as on S3


class Link:
    """One line that all bodies pass, chunk after chunk."""

    def __init__(self, gbit: float | None) -> None:
        self._bytes_per_s = gbit * 125e6 if gbit else None
        self._free = 0.0

    def turn(self, size: int, now: float) -> float:
        """When the last of `size` bytes is through."""
        if self._bytes_per_s is None:
            return now
        self._free = max(now, self._free) + size / self._bytes_per_s
        return self._free


class Bucket:
    """The folder: names, sizes and ETags, and open descriptors of what is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._open: dict[str, tuple[int, int, str, str]] = {}
        self._listed: dict[str, list[str]] = {}
        self.counts = {"gets": 0, "get_bytes": 0, "heads": 0, "lists": 0, "errors": 0, "connections": 0}

    def find(self, key: str) -> tuple[int, int, str, str] | None:
        """(descriptor, size, ETag, Last-Modified) of an object; a file that changed is opened anew."""
        path = self.folder / key
        try:
            status = path.stat()
        except OSError:
            return None
        tag = _tag(status)
        known = self._open.get(key)
        if known is not None and known[2] == tag:
            return known
        if known is not None:
            os.close(known[0])
        if not path.is_file() or self.folder not in path.resolve().parents:
            return None
        if len(self._open) > 500:
            os.close(self._open.pop(next(iter(self._open)))[0])
        made = (os.open(path, os.O_RDONLY), status.st_size, tag, formatdate(status.st_mtime, usegmt=True))
        self._open[key] = made
        return made

    def page(self, query: dict[str, list[str]]) -> bytes:
        """One LIST v2 answer."""
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        limit = min(_PAGE, int(query.get("max-keys", [str(_PAGE)])[0]))
        encode = quote if query.get("encoding-type") == ["url"] else str
        if not after or prefix not in self._listed:  # pages after the first go on in the listing that was begun
            self._listed[prefix] = sorted(self._walk(prefix))
        keys = self._listed[prefix]
        keys = keys[bisect_right(keys, after) :]
        parts = [
            "<?xml version='1.0'?><ListBucketResult><IsTruncated>",
            str(len(keys) > limit).lower(),
            "</IsTruncated>",
        ]
        if query.get("encoding-type") == ["url"]:
            parts.append("<EncodingType>url</EncodingType>")
        for key in keys[:limit]:
            status = (self.folder / key).stat()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            parts += [
                f"<Contents><Key>{escape(encode(key))}</Key><Size>{status.st_size}</Size>",
                f"<ETag>{escape(_tag(status))}</ETag><LastModified>{changed}</LastModified></Contents>",
            ]
        if len(keys) > limit:
            parts.append(f"<NextContinuationToken>{escape(keys[limit - 1])}</NextContinuationToken>")
        return "".join([*parts, f"<KeyCount>{len(keys[:limit])}</KeyCount></ListBucketResult>"]).encode()

    def _walk(self, prefix: str) -> Iterator[str]:
        top = self.folder / prefix.rpartition("/")[0]
        for folder, _, names in os.walk(top, followlinks=True):
            for name in names:
                key = (Path(folder) / name).relative_to(self.folder).as_posix()
                if key.startswith(prefix):
                    yield key


def _tag(status: os.stat_result) -> str:
    return f'"{hashlib.md5(f"{status.st_mtime_ns}-{status.st_size}".encode()).hexdigest()}"'


class Connection(asyncio.Protocol):
    """One client connection; requests are answered one after the other."""

    def __init__(self, bucket: Bucket, link: Link, latency_s: float) -> None:
        self._bucket, self._link, self._latency_s = bucket, link, latency_s
        self._loop = asyncio.get_running_loop()
        self._input = b""
        self._busy = False
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._bucket.counts["connections"] += 1

    def connection_lost(self, error: Exception | None) -> None:
        self._can_write.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._input += data
        self._next()

    def _next(self) -> None:
        head, end, rest = self._input.partition(b"\r\n\r\n")
        if self._busy or not end:
            return
        self._input, self._busy = rest, True
        if b" /-/stats" in head[:20]:
            self._answer("200 OK", json.dumps(self._bucket.counts).encode())
        else:
            self._loop.call_later(self._latency_s, self._serve, head.decode("latin-1"))

    def _serve(self, head: str) -> None:
        method, target = head.split(" ", 2)[:2]
        parts = urlsplit(target)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        counts = self._bucket.counts
        if not key and method == "HEAD":
            self._answer("200 OK", b"")
            return
        if not key:
            counts["lists"] += 1
            self._answer("200 OK", self._bucket.page(parse_qs(parts.query, keep_blank_values=True)))
            return
        found = self._bucket.find(key)
        if method not in ("GET", "HEAD") or found is None:
            status, code = (
                ("404 Not Found", "NoSuchKey") if found is None else ("405 Method Not Allowed", "MethodNotAllowed")
            )
            self._refuse(status, code, method)
            return
        descriptor, size, tag, changed = found
        wanted = re.search(r"(?im)^if-match: *(\S+)", head)
        if wanted and tag not in wanted[1] and wanted[1] != "*":
            self._refuse("412 Precondition Failed", "PreconditionFailed", method)
            return
        begin, end, partial = 0, size, ""
        if asked := re.search(r"(?im)^range: *bytes=(\d*)-(\d*)", head):
            begin = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
            end = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
            if begin >= end:
                self._refuse("416 Range Not Satisfiable", "InvalidRange", method)
                return
            partial = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        answer = (
            f"HTTP/1.1 {'206 Partial Content' if partial else '200 OK'}\r\nETag: {tag}\r\nLast-Modified: {changed}\r\n"
            f"Accept-Ranges: bytes\r\n{partial}Content-Length: {end - begin}\r\n\r\n"
        ).encode()
        if method == "HEAD":
            counts["heads"] += 1
            self._done(answer)
            return
        counts["gets"] += 1
        counts["get_bytes"] += end - begin
        if end - begin <= _CHUNK:
            body = answer + os.pread(descriptor, end - begin, begin)
            at = self._link.turn(end - begin, self._loop.time())
            if at <= self._loop.time():
                self._done(body)
            else:
                self._loop.call_at(at, self._done, body)
        else:
            self._task = self._loop.create_task(self._stream(os.dup(descriptor), begin, end, answer))

    async def _stream(self, descriptor: int, begin: int, end: int, head: bytes) -> None:
        try:
            for start in range(begin, end, _CHUNK):
                size = min(_CHUNK, end - start)
                late = self._link.turn(size, self._loop.time()) - self._loop.time()
                if late > 0:
                    await asyncio.sleep(late)
                await self._can_write.wait()
                if self._transport.is_closing():
                    return
                self._transport.write(head + os.pread(descriptor, size, start))
                head = b""
        finally:
            os.close(descriptor)
        self._done(b"")

    def _refuse(self, status: str, code: str, method: str) -> None:
        self._bucket.counts["errors"] += 1
        body = f"<Error><Code>{code}</Code><Message>{status}</Message></Error>".encode()
        self._answer(status, b"" if method == "HEAD" else body)

    def _answer(self, status: str, body: bytes) -> None:
        self._done(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _done(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            self._busy = False
            self._next()


async def serve(folder: Path, latency_s: float, gbit: float | None, port: int) -> None:
    """Serve until cancelled; prints the port first."""
    bucket, link = Bucket(folder), Link(gbit)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(bucket, link, latency_s), "127.0.0.1", port, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@contextmanager
def started(folder: Path, *, latency_ms: float = 30.0, gbit: float | None = 1.0) -> Iterator[str]:
    """The server as a process of its own; gives the endpoint address for AWS_ENDPOINT_URL."""
    command = [sys.executable, __file__, str(folder), "--latency-ms", str(latency_ms), "--gbit", str(gbit or 0)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def stats(endpoint: str) -> dict[str, int]:
    """Counts since the server's start: gets, get_bytes, heads, lists, errors, connections."""
    with urllib.request.urlopen(f"{endpoint}/-/stats") as answer:
        counts: dict[str, int] = json.load(answer)
        return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=30.0, help="before the first byte of every answer")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of the shared link, 0 = unlimited")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(options.folder, options.latency_ms / 1e3, options.gbit or None, options.port))


if __name__ == "__main__":
    main()
