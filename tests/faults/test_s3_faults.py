"""A store behind a server that misbehaves: right bytes or a telling error, and no more requests than needed."""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from knonik.stores.base import ObjectChanged, ObjectMissing, StoreError, StoreUnavailable
from knonik.stores.s3 import S3Store
from knonik.stores.transport import Policy

SMALL = bytes(i * 7 % 253 for i in range(60_000))
LARGE = bytes(range(256)) * 2000  # half a MB
# No second requests: how many there are would depend on the machine's load. A slow server is not a silent one either.
QUICK = Policy(backoff_s=0.001, backoff_cap_s=0.01, stall_s=30, hedge_share=0)
SILENCE_S = 4.0
Spoil = Callable[..., Any]  # the class of conftest.py, which only fixtures can hand out
FILES = {"set/a.bin": SMALL, "set/big.bin": LARGE}


@pytest.fixture
def bucket(new_bucket: Callable[..., Any], proxy: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    made: tuple[str, Any] = new_bucket(FILES)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    return made


@pytest.fixture
def store(bucket: tuple[str, Any], proxy: Any) -> Iterator[S3Store]:
    made = S3Store(bucket[0], "set", policy=QUICK)
    yield made
    proxy.released.set()
    made.close()


def counts(store: S3Store) -> dict[str, float]:
    return {name: value for name, value in store.gauges().items() if value and name not in ("gets", "get_bytes")}


def test_one_in_twenty_throttled(store: S3Store, proxy: Any, spoil: Spoil) -> None:
    proxy.choose = lambda number, seen: spoil("refuse") if number % 20 == 7 else None

    def read(i: int) -> bool:
        return store.read_range("a.bin", i * 50, 10_000) == SMALL[i * 50 : i * 50 + 10_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))
    refused = [seen for seen in proxy.gets() if seen.spoiled]
    gauges = store.gauges()
    assert (gauges["gets"], gauges["get_bytes"], gauges["failed"], gauges["in_flight"]) == (60, 600_000, 0, 0)
    assert gauges["throttled"] == gauges["retries"] == len(refused) >= 3
    assert len(proxy.gets()) == 60 + len(refused)


def test_retry_after(store: S3Store, proxy: Any, spoil: Spoil) -> None:
    wait = spoil("refuse", status=429, code="TooManyRequests", headers=(("Retry-After", "1"),))
    proxy.spoil_first(wait, wait)
    assert store.read_range("a.bin", 5, 100) == SMALL[5:105]
    first, second, third = proxy.gets()
    assert third.came_s - second.came_s >= 0.99  # the first answer's header is not visible to the fast client
    assert first.range == second.range == third.range == "bytes=5-104"
    assert counts(store) == {"throttled": 2, "retries": 2}


def test_throttled_listing(store: S3Store, proxy: Any, spoil: Spoil) -> None:
    proxy.choose = lambda number, seen: spoil("refuse", headers=(("Retry-After", "0"),)) if number < 2 else None
    assert store.sizes("") == {"a.bin": len(SMALL), "big.bin": len(LARGE)}
    assert len(proxy.seen) == 3


def test_half_a_body_is_gone_on_with(bucket: tuple[str, Any], proxy: Any, spoil: Spoil) -> None:
    store = S3Store(bucket[0], "set", policy=replace(QUICK, stall_s=SILENCE_S))
    proxy.spoil_first(spoil("stall"), spoil("short"))
    assert store.read_range("big.bin", 1000, 500_000) == LARGE[1000:501_000]
    starts = [int(seen.range.partition("=")[2].partition("-")[0]) for seen in proxy.gets()]
    # At most one 64 KiB part of each half is asked for again.
    assert len(starts) == 3
    assert 251_000 - 65_536 <= starts[1] <= 251_000 < starts[2]
    assert proxy.body_bytes <= 500_000 + 2 * 65_536
    assert counts(store) == {"resumed": 2}
    proxy.spoil_first(spoil("short"))
    assert store.read("big.bin") == LARGE
    store.close()


def test_resets(store: S3Store, proxy: Any, spoil: Spoil) -> None:
    proxy.spoil_first(spoil("reset"), spoil("reset"))
    assert store.read_range("a.bin", 0, 60_000) == SMALL
    assert len(proxy.gets()) == 3
    assert counts(store) == {"retries": 2}


def test_no_answer(bucket: tuple[str, Any], proxy: Any, spoil: Spoil) -> None:
    store = S3Store(bucket[0], "set", policy=replace(QUICK, stall_s=SILENCE_S))
    proxy.spoil_first(spoil("mute"))
    assert store.read_range("a.bin", 0, 60_000) == SMALL
    assert len(proxy.gets()) == 2
    assert counts(store) == {"retries": 1}
    store.close()


def test_server_errors_and_giving_up(store: S3Store, proxy: Any, spoil: Spoil) -> None:
    error = spoil("refuse", status=500, code="InternalError")
    proxy.spoil_first(error, error)
    assert store.read_range("a.bin", 0, 10) == SMALL[:10]
    proxy.spoil_first(*[error] * 50)
    with pytest.raises(StoreError, match=r"a\.bin bytes 3-12 in s3://\S+/set \(10 requests\): 500 InternalError"):
        store.read_range("a.bin", 3, 10)
    assert len(proxy.gets()) == 10
    assert store.gauges()["failed"] == 1


def test_a_server_that_is_gone_is_asked_again(bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")  # nobody listens there
        store = S3Store(bucket[0], "set", policy=replace(QUICK, attempts=3))
        for ask in (lambda: store.sizes(""), lambda: store.read("a.bin"), lambda: store.exists("a.bin")):
            with pytest.raises(StoreUnavailable, match=r"\(3 requests\)"):
                ask()
        store.close()


def test_a_silent_request_is_sent_twice(bucket: tuple[str, Any], proxy: Any, spoil: Spoil) -> None:
    store = S3Store(bucket[0], "set", policy=Policy(stall_s=60))
    store.read("a.bin")
    for _ in range(32):
        store._transport._patience.record(1000, 0.001)
    proxy.spoil_first(spoil("mute"))
    assert store.read_range("a.bin", 77, 1000) == SMALL[77:1077]  # without a second request only after a minute
    assert [seen.range for seen in proxy.gets()] == ["bytes=77-1076"] * 2
    assert store.gauges()["hedges"] == 1
    proxy.released.set()
    store.close()


def test_expired_keys_are_read_again(
    bucket: tuple[str, Any], proxy: Any, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(name: str) -> None:
        text = f"[default]\naws_access_key_id={name}\naws_secret_access_key=s\naws_session_token=t\n"
        (tmp_path / "aws-credentials").write_text(text)

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    expired = spoil("refuse", status=400, code="ExpiredToken")
    proxy.choose = lambda number, seen: expired if seen.signature == "OLD" and number else None
    write("OLD")
    store = S3Store(bucket[0], "set", policy=QUICK)
    assert store.read_range("a.bin", 0, 10) == SMALL[:10]
    with pytest.raises(StoreError, match=r"bytes 0-9 .*ExpiredToken"):
        store.read_range("a.bin", 0, 10)
    assert [seen.signature for seen in proxy.seen] == ["OLD"] * 4  # a new session twice, then it is an error
    write("NEW")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: store.read_range("a.bin", i, 99) == SMALL[i : i + 99], range(16)))
    assert store.sizes("")["a.bin"] == len(SMALL)
    assert {seen.signature for seen in proxy.seen[-17:]} >= {"NEW"}
    assert proxy.seen[-1].signature == "NEW"
    store.close()


def test_credentials_of_a_process_are_asked_for_before_they_expire(
    bucket: tuple[str, Any], proxy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    source = (
        "import json, pathlib, datetime as d\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "end = d.datetime.now(d.UTC) + d.timedelta(minutes=1 if number == 1 else 60)\n"
        "print(json.dumps(dict(Version=1, AccessKeyId=f'KEY{number}', SecretAccessKey='s', SessionToken='t',"
        " Expiration=end.isoformat())))\n"
    )
    (tmp_path / "keys.py").write_text(source)
    (tmp_path / "aws-config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path / 'keys.py'}\n")
    store = S3Store(bucket[0], "set", policy=QUICK)
    for i in range(5):
        assert store.read_range("a.bin", i, 10) == SMALL[i : i + 10]
    # One minute is too little to begin with: the second set, good for an hour, is fetched at once and then kept.
    assert {seen.signature for seen in proxy.seen} <= {"KEY1", "KEY2"}
    assert proxy.seen[-1].signature == "KEY2"
    assert json.loads((tmp_path / "count").read_text()) == 2
    store.close()


def test_wrong_bucket_and_key(store: S3Store, bucket: tuple[str, Any], proxy: Any) -> None:
    with pytest.raises(ObjectMissing, match=rf"cannot read b\.bin bytes 0-9 in s3://{bucket[0]}/set"):
        store.read_range("b.bin", 0, 10)
    assert len(proxy.seen) == 1
    wrong = S3Store("no-such-bucket-here", "set", policy=QUICK)
    for ask in (lambda: wrong.read("a.bin"), lambda: wrong.sizes("")):
        proxy.seen.clear()
        with pytest.raises(StoreError, match=r"NoSuchBucket.*no bucket 'no-such-bucket-here'.*AWS_ENDPOINT_URL"):
            ask()
        assert len(proxy.seen) == 1
    wrong.close()


def test_refusals_are_final_and_tell_no_secrets(
    bucket: tuple[str, Any], proxy: Any, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDNOTTOBESEEN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETNOTTOBESEEN")
    quoted = "<AWSAccessKeyId>AKIDNOTTOBESEEN</AWSAccessKeyId><StringToSign>AKIDNOTTOBESEEN</StringToSign>"
    for code, requests in (("AccessDenied", 1), ("SignatureDoesNotMatch", 1), ("InvalidAccessKeyId", 3)):
        store = S3Store(bucket[0], "set", policy=QUICK)
        proxy.spoil_first(*[spoil("refuse", status=403, code=code, body=quoted)] * 9)
        with pytest.raises(StoreError, match=rf"a\.bin bytes 0-9 in .*403 {code}") as raised:
            store.read_range("a.bin", 0, 10)
        assert len(proxy.gets()) == requests
        assert "NOTTOBESEEN" not in "".join(traceback.format_exception(raised.value))  # logs show the chain as well
        store.close()


def test_without_credentials_requests_are_unsigned(
    bucket: tuple[str, Any], proxy: Any, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bucket[1].put_bucket_acl(Bucket=bucket[0], ACL="public-read")
    bucket[1].put_object_acl(Bucket=bucket[0], Key="set/a.bin", ACL="public-read")
    store = S3Store(bucket[0], "set", policy=QUICK)
    assert store.sizes("")["a.bin"] == len(SMALL)
    assert store.read("a.bin") == SMALL
    assert {seen.signature for seen in proxy.seen} == {""}
    proxy.choose = lambda number, seen: spoil("refuse", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match=r"sent unsigned, as no credentials were found: set AWS_PROFILE"):
        store.read("a.bin")
    store.close()


def test_a_changed_object_is_noticed(store: S3Store, bucket: tuple[str, Any], proxy: Any, spoil: Spoil) -> None:
    name, client = bucket
    info = store.objects("")["big.bin"]
    assert store.read_range("big.bin", 9, 90, version=info.version) == LARGE[9:99]
    client.put_object(Bucket=name, Key="set/big.bin", Body=LARGE[::-1])
    with pytest.raises(ObjectChanged, match=r"big\.bin bytes 9-98 in .*changed since it was listed"):
        store.read_range("big.bin", 9, 90, version=info.version)
    assert store.objects("")["big.bin"].version != info.version

    def change(number: int, seen: Any) -> Any:
        if number == len(proxy.gets()) and seen.range == "bytes=0-399999":
            return spoil("short")
        client.put_object(Bucket=name, Key="set/big.bin", Body=LARGE)
        return None

    proxy.seen.clear()
    proxy.choose = change
    with pytest.raises(ObjectChanged, match=r"big\.bin bytes 0-399999"):  # never two halves of two versions
        store.read_range("big.bin", 0, 400_000)


def test_a_listing_is_one_request_for_all_files(store: S3Store, proxy: Any) -> None:
    objects = store.objects("")
    for key, info in objects.items():
        with store.open(key, info) as file:
            file.seek(-10, os.SEEK_END)
            assert len(file.read()) == 10
    assert [seen.method for seen in proxy.seen if "list-type" in seen.path] == ["GET"]
    assert {seen.method for seen in proxy.seen} == {"GET"}  # no HEAD: size and version came with the listing
