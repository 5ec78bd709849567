"""How the S3 store finds its endpoint and credentials, and that it can read every key a listing may give."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import knonik.stores.s3
from knonik.stores.base import StoreError, open_store
from knonik.stores.s3 import S3Store
from knonik.stores.s3_answers import answered
from knonik.stores.s3_answers import seconds as seconds_of
from knonik.stores.transport import Fault, FaultKind

NewBucket = Callable[..., tuple[str, Any]]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def endpoint(bucket: str) -> tuple[str, bool]:
    link = knonik.stores.s3._connect(bucket, 10.0, None)
    config = link.store.config
    link.client.close()
    assert config["endpoint_url_s3"] == config["endpoint"]  # or the environment would decide for obstore
    return config["endpoint"], str(config["virtual_hosted_style_request"]).lower() == "true"


@pytest.mark.usefixtures("no_network")
def test_endpoint_and_addressing_are_those_of_boto3(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert endpoint("robots") == ("https://robots.s3.eu-west-1.amazonaws.com", True)
    assert endpoint("ro.bots") == ("https://s3.eu-west-1.amazonaws.com", False)  # no certificate covers such a name
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert endpoint("robots") == ("http://127.0.0.1:9000", False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://objects.example")
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = path\n")
    assert endpoint("robots") == ("https://objects.example", False)
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    assert endpoint("robots") == ("https://robots.objects.example", True)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_PROFILE", "nobody"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000"),
        ("AWS_CA_BUNDLE", "/no/such/bundle.pem"),
        ("AWS_DEFAULT_REGION", "no region"),
    ],
)
def test_what_makes_no_session_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    store = open_store("s3://robots/set")
    with pytest.raises(StoreError, match=r"no session for bucket robots: .*AWS_PROFILE"):
        store.read("meta/info.json")
    store.close()


@pytest.mark.usefixtures("no_network")
def test_a_name_that_no_bucket_can_have_is_told() -> None:
    store = open_store("s3://Bad_Name!/set")
    with pytest.raises(StoreError, match=r"no session for bucket Bad_Name!: .*Invalid bucket name"):
        store.read("meta/info.json")
    store.close()


@pytest.fixture
def odd(new_bucket: NewBucket) -> Iterator[tuple[S3Store, dict[str, bytes]]]:
    names = [
        "a b",
        "a+b",
        "a=b",
        "a&b",
        "a%20b",
        "a~b",
        "a*b",
        "a[b]",
        "é/ü",
        "a:b",
        "a'b",
        "a@b,c;d!(e)$",
        "a#b",
        "a?b",
    ]
    files = {name: name.encode() for name in names}
    bucket, _ = new_bucket({f"pre fix/{name}": body for name, body in files.items()})
    store = S3Store(bucket, "pre fix")
    yield store, files
    store.close()


def test_keys_with_unusual_characters(odd: tuple[S3Store, dict[str, bytes]]) -> None:
    store, files = odd
    assert store.list("") == sorted(files)
    for key, body in files.items():
        assert store.read(key) == body, key
        assert store.read_range(key, 1, 1) == body[1:2], key
        assert store.exists(key)
        assert store.size(key) == len(body)


def test_a_large_folder_is_listed_in_pages(new_bucket: NewBucket) -> None:
    bucket, _ = new_bucket({f"set/{i:03d}": bytes(i % 3) for i in range(25)})
    store = open_store(f"s3://{bucket}/set")
    ask = store._ask  # type: ignore[attr-defined]
    pages = []

    def small_pages(operation: str, what: str, **arguments: Any) -> Any:
        pages.append(ask(operation, what, **arguments, MaxKeys=10))
        return pages[-1]

    store._ask = small_pages  # type: ignore[attr-defined]
    assert store.sizes("") == {f"{i:03d}": i % 3 for i in range(25)}
    assert len(pages) == 3
    assert store.read("000") == b""  # an empty object has no byte range
    store.close()


def test_credentials_that_renew_are_asked_for_again_in_time() -> None:
    from botocore.credentials import Credentials, RefreshableCredentials

    fixed = knonik.stores.s3._Credentials(Credentials("key", "secret", "token"))()
    assert (fixed["access_key_id"], fixed["token"], fixed["expires_at"]) == ("key", "token", None)
    now = datetime.now(UTC)
    for minutes in (30, 600):
        metadata = {
            "access_key": "k",
            "secret_key": "s",
            "token": "t",
            "expiry_time": (now + timedelta(minutes=minutes)).isoformat(),
        }
        renewing = RefreshableCredentials.create_from_metadata(metadata, lambda m=metadata: m, "test")
        given = knonik.stores.s3._Credentials(renewing)()
        assert now < given["expires_at"] <= now + timedelta(minutes=min(minutes, 11))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-3", 0.0), (None, None), ("soon", None), ("Thu, 01 Jan 2026 00:00:00 GMT", 0.0)],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert seconds_of(header) == seconds


@pytest.mark.usefixtures("no_network")
def test_another_region_is_asked_for_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store = S3Store("robots", "set")
    regions: list[str | None] = []
    connect = knonik.stores.s3._connect

    def counted(bucket: str, stall_s: float, region: str | None) -> Any:
        regions.append(region)
        return connect(bucket, stall_s, region)

    monkeypatch.setattr(knonik.stores.s3, "_connect", counted)
    monkeypatch.setattr(knonik.stores.s3, "_region_of", lambda link: "ap-south-1")

    def get(self: Any, name: str, start: int, stop: int | None, version: str | None) -> Any:
        if self.region != "ap-south-1":
            raise RuntimeError("Received redirect without LOCATION, this normally indicates ... region")
        raise Fault(FaultKind.REFUSED, self.store.config["region"])

    monkeypatch.setattr(knonik.stores.s3._Link, "get", get)
    with pytest.raises(StoreError, match="ap-south-1"):
        store.read_range("a", 0, 1)
    assert regions == [None, "ap-south-1"]
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", FaultKind.THROTTLED),
        (503, "", FaultKind.THROTTLED),
        (429, "", FaultKind.THROTTLED),
        (400, "RequestTimeout", FaultKind.TRANSIENT),
        (500, "InternalError", FaultKind.TRANSIENT),
        (502, "", FaultKind.TRANSIENT),
        (400, "ExpiredToken", FaultKind.RENEWED),
        (403, "ExpiredToken", FaultKind.RENEWED),
        (301, "", FaultKind.RENEWED),
        (400, "AuthorizationHeaderMalformed", FaultKind.RENEWED),
        (412, "", FaultKind.CHANGED),
        (404, "", FaultKind.ABSENT),
        (404, "NoSuchKey", FaultKind.ABSENT),
        (404, "NoSuchBucket", FaultKind.REFUSED),
        (403, "AccessDenied", FaultKind.REFUSED),
        (416, "InvalidRange", FaultKind.REFUSED),
        (400, "", FaultKind.REFUSED),
    ],
)
def test_what_answers_mean(status: int, code: str, kind: FaultKind) -> None:
    fault = answered(status, code, "why", bucket="robots", signed=True, retry_after=None)
    assert fault.kind is kind
    assert str(status) in str(fault)
    assert "why" in str(fault)
