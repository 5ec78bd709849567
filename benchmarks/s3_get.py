"""CPU time and rate of one small range GET: this store, the bare client under it, and boto3, against a loopback server.

    python benchmarks/s3_get.py --latency-ms 30 --gbit 1

The server is a process of its own; the times are those of the client process, all threads together.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import s3_server

from knonik.stores.s3 import S3Store
from knonik.stores.transport import Policy

_OBJECT_BYTES = 32 << 20

Read = Callable[[int, int], bytes]


def cpu_s() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(read: Read, threads: int, reads: int, size: int) -> tuple[float, float]:
    """(CPU-ms a GET, GETs a second) of `reads` random ranges in each of `threads` threads."""

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(reads):
            assert len(read(draw.randrange(_OBJECT_BYTES - size), size)) == size

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    cpu, wall = cpu_s(), time.monotonic()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    total = threads * reads
    return 1e3 * (cpu_s() - cpu) / total, total / (time.monotonic() - wall)


def clients(endpoint: str) -> tuple[dict[str, Read], Callable[[], None]]:
    """Name -> a read of bytes (offset, length), and what closes them."""
    import boto3
    import obstore
    from botocore.config import Config

    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    store = S3Store("bucket", "")
    plain = S3Store("bucket", "", policy=Policy(hedge_share=0))
    version = store.objects("")["x"].version
    plain.read_range("x", 0, 10)
    assert plain._link is not None
    bare = plain._link.store
    boto = boto3.session.Session().client("s3", config=Config(max_pool_connections=64))

    def through_boto3(offset: int, length: int) -> bytes:
        answer = boto.get_object(Bucket="bucket", Key="x", Range=f"bytes={offset}-{offset + length - 1}")
        return bytes(answer["Body"].read())

    def close() -> None:
        store.close()
        plain.close()
        boto.close()

    reads: dict[str, Read] = {
        "obstore alone": lambda offset, length: bytes(obstore.get_range(bare, "x", start=offset, length=length)),
        "store, no hedges": lambda offset, length: plain.read_range("x", offset, length, version=version),
        "store": lambda offset, length: store.read_range("x", offset, length, version=version),
        "boto3": through_boto3,
    }
    return reads, close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--reads", type=int, default=60, help="in each thread")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x").write_bytes(os.urandom(_OBJECT_BYTES))
        with s3_server.started(Path(folder), latency_ms=options.latency_ms, gbit=options.gbit) as endpoint:
            reads, close = clients(endpoint)
            print(f"{'client':18s} {'bytes':>8s} {'threads':>8s} {'CPU-ms/GET':>11s} {'GET/s':>7s}")
            for size in (20_000, 100_000):
                for threads in (8, 32):
                    for name, read in reads.items():
                        measure(read, threads, 4, size)  # connections and what is learned from the first reads
                        cost, rate = measure(read, threads, options.reads, size)
                        print(f"{name:18s} {size:8d} {threads:8d} {cost:11.2f} {rate:7.0f}")
                        sys.stdout.flush()
            close()


if __name__ == "__main__":
    main()
