"""A proxy in front of the S3 server that spoils chosen requests, and remembers all of them."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from urllib.parse import urlsplit

import pytest


@dataclass(frozen=True)
class Spoil:
    """What happens to a request. kind: refuse (status, code, headers), short (half a body, then the end of the
    connection), stall (half a body, then silence), mute (no answer at all), reset (of the connection, before)."""

    kind: str
    status: int = 503
    code: str = "SlowDown"
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""


@dataclass
class Seen:
    """One request: method, path with query, Range, credential id, when (s) it came, and what was done to it."""

    method: str
    path: str
    range: str | None
    signature: str
    came_s: float
    spoiled: Spoil | None


@dataclass
class Proxy:
    """choose: (number of the request among those it was asked about, request) -> what to do to it, None = pass on."""

    address: str = ""
    choose: Callable[[int, Seen], Spoil | None] = lambda number, seen: None
    seen: list[Seen] = field(default_factory=list)
    body_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)  # ends all stalls

    def gets(self) -> list[Seen]:
        """Requests for object bytes."""
        return [seen for seen in self.seen if seen.method == "GET" and "list-type" not in seen.path]

    def spoil_first(self, *spoils: Spoil) -> None:
        """Spoil the first GETs of object bytes from now on."""
        left = list(spoils)

        def choose(number: int, seen: Seen) -> Spoil | None:
            return left.pop(0) if left and seen.method == "GET" and "list-type" not in seen.path else None

        self.seen.clear()
        self.choose = choose


def _handler(proxy: Proxy, origin: str) -> type[BaseHTTPRequestHandler]:
    host, port = urlsplit(origin).hostname or "", urlsplit(origin).port or 80

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.origin = HTTPConnection(host, port)

        def finish(self) -> None:
            self.origin.close()
            super().finish()

        def do_GET(self) -> None:
            seen = Seen(
                self.command,
                self.path,
                self.headers.get("Range"),
                self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0],
                monotonic(),
                None,
            )
            with proxy.lock:
                seen.spoiled = proxy.choose(len(proxy.seen), seen)
                proxy.seen.append(seen)
            self._answer(seen.spoiled)

        do_HEAD = do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _answer(self, spoil: Spoil | None) -> None:
            kind = spoil.kind if spoil else ""
            if kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            if kind == "mute":
                proxy.released.wait(60)
                self.close_connection = True
                return
            if spoil and kind == "refuse":
                body = f"<Error><Code>{spoil.code}</Code><Message>told to</Message>{spoil.body}</Error>".encode()
                self._send(spoil.status, [*spoil.headers, ("Content-Length", str(len(body)))], body)
                return
            length = int(self.headers.get("Content-Length") or 0)
            self.origin.request(self.command, self.path, self.rfile.read(length), dict(self.headers.items()))
            answer = self.origin.getresponse()
            body = answer.read()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() != "transfer-encoding"]
            if answer.getheader("Content-Length") is None:
                headers.append(("Content-Length", str(len(body))))
            self._send(answer.status, headers, body[: len(body) // 2] if kind else body)
            if kind == "stall":
                proxy.released.wait(60)
            self.close_connection = self.close_connection or bool(kind)

        def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")
            self.wfile.flush()
            with proxy.lock:
                proxy.body_bytes += len(body)

    return Handler


@pytest.fixture
def spoil() -> type[Spoil]:
    """Makes a `Spoil`."""
    return Spoil


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@pytest.fixture
def proxy(moto_server: str, monkeypatch: pytest.MonkeyPatch, new_bucket: object) -> Iterator[Proxy]:
    """The fault proxy; stores that are opened in this test go through it, `new_bucket` beside it."""
    made = Proxy()
    server = _Server(("127.0.0.1", 0), _handler(made, moto_server))
    made.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made
    finally:
        made.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
