"""Fixtures shared by all tests: the real sample datasets, a line on whether they were used, an S3 server, leftovers."""

import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_report_header() -> str:
    if SHARED_DATA.is_dir():
        return f"real datasets: {SHARED_DATA}"
    return "real datasets: none beside the repository, tests on real data are skipped and generated sets are used"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real sample datasets; skips where it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no shared/data folder beside the repository")
    return SHARED_DATA


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is opened without a cache folder keeps nothing in the user's, and finds nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNONIK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


PACKAGES = {"knonik", "models", "recipes", "callbacks"}


def _loggers() -> dict[str, tuple[int, list[Any]]]:
    """Level and filters of every logger of this project."""
    known = logging.Logger.manager.loggerDict.items()
    made = {name: logger for name, logger in known if isinstance(logger, logging.Logger)}
    return {name: (each.level, each.filters[:]) for name, each in made.items() if name.partition(".")[0] in PACKAGES}


@pytest.fixture(autouse=True)
def _process_as_found() -> Iterator[None]:
    """A command sets what its process logs and how many threads PyTorch has; the tests after it are not to see that."""
    before, torch = _loggers(), sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    yield
    for name in _loggers():
        level, filters = before.get(name, (logging.NOTSET, []))
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).filters[:] = filters
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing that a test compiles is left to others, whose graphs it would share."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class MadeTime:
    """Stands for the module `time`: nothing takes time but to sleep, however busy the machine is."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def made_time(monkeypatch: pytest.MonkeyPatch) -> MadeTime:
    """What a run's clock and its listener take the time from in this test."""
    made = MadeTime()
    monkeypatch.setattr("callbacks.step_clock.time", made)
    monkeypatch.setattr("callbacks.listener.time", made)
    return made


class Since:
    """What this process has come to hold since this was made: threads and open files.

    Whatever earlier tests of the process left behind may still go at any moment, so nothing is compared with a count.
    """

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = Counter(_open_files())

    def threads(self, prefix: str = "") -> list[str]:
        """Names of the threads begun since and still alive."""
        begun = [thread for thread in threading.enumerate() if thread not in self._threads]
        return [thread.name for thread in begun if thread.name.startswith(prefix)]

    def files(self) -> list[str]:
        """What the descriptors opened since and still open point to."""
        return sorted((Counter(_open_files()) - self._files).elements())


def _open_files() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()))
        except OSError:  # the descriptor of this very listing
            continue
    return found


@pytest.fixture
def since() -> Callable[[], Since]:
    """Begin to watch what this process comes to hold; skips where the system does not show it."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc")
    return Since


_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Address of an S3 server for correctness, in a process of its own; it ends with its standard input."""
    pytest.importorskip("moto")
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate()


@pytest.fixture
def new_bucket(
    moto_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[dict[str, bytes]], Any]:
    """Make this test's bucket from {key: body}: gives (bucket name, boto3 client); the environment points to it."""
    import boto3

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def make(files: dict[str, bytes]) -> Any:
        client = boto3.session.Session().client("s3")
        request.addfinalizer(client.close)
        bucket = f"test-{abs(hash(request.node.nodeid)):x}"
        client.create_bucket(Bucket=bucket)
        for key, body in files.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)
        return bucket, client

    return make
