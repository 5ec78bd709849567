"""A prefix in an S3 bucket: boto3 finds and refreshes credentials and lists, obstore moves the bytes.

A signed GET of 20 KB costs 0.3 ms of CPU through obstore, 0.6 with all the care taken here, and 3 to 4 ms through boto3
(`benchmarks/s3_get.py`, 2 busy cores). Neither library may retry on its own: what is tried again, when and how often is
decided in `knonik.stores.transport` alone.
"""

import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from knonik.stores.base import (
    Counters,
    ObjectInfo,
    ObjectMissing,
    Store,
    StoreError,
    StoreUnavailable,
    check_range,
    checked_key,
)
from knonik.stores.s3_answers import OtherRegion, answered, broken, in_text
from knonik.stores.transport import Body, Fault, FaultKind, Policy, Transport

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
# botocore renews what it holds at least 10 minutes before it expires; obstore asks again 5 minutes before this is over.
_CREDENTIAL_LIFE = timedelta(minutes=10)
_CHUNK_BYTES = 64 << 10  # of a body that breaks off at most this much is read twice


class S3Store(Store):
    """`s3://bucket/prefix` on AWS or any S3-compatible endpoint.

    Profiles, SSO, assumed roles, instance roles and the endpoint come from where boto3 finds them (AWS_PROFILE,
    AWS_ENDPOINT_URL, AWS_REGION, the files in ~/.aws); without any credentials requests are sent unsigned, as public
    buckets want them. Not to be used across a fork: open the store in the process that reads.

    Args:
        policy: retries, hedges and request rate; the default suits S3.
    """

    is_local = False

    def __init__(self, bucket: str, prefix: str, *, policy: Policy | None = None) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._counters = Counters()
        self._policy = policy or Policy()
        self._transport = Transport(self._policy, self._counters)
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._closed = False

    def read(self, key: str) -> bytes:
        return self._read(key, 0, None, None, f"{key} in {self.uri}")

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        return self._read_range(key, offset, length, version, None)

    def read_until(
        self, stop: threading.Event, key: str, offset: int, length: int, *, version: str | None = None
    ) -> bytes:
        return self._read_range(key, offset, length, version, stop)

    def _read_range(
        self, key: str, offset: int, length: int, version: str | None, stop: threading.Event | None
    ) -> bytes:
        check_range(key, offset, length)
        if length == 0:
            return b""  # a Range header cannot express an empty range
        where = f"{key} bytes {offset}-{offset + length - 1} in {self.uri}"
        return self._read(key, offset, length, version, where, stop)

    def _read(
        self,
        key: str,
        offset: int,
        length: int | None,
        version: str | None,
        where: str,
        until: threading.Event | None = None,
    ) -> bytes:
        name = self._name(key)

        def get(start: int, stop: int | None, tag: str | None, careful: bool) -> Body:
            with self._linked() as link:
                return link.get_slowly(name, start, stop, tag) if careful else link.get(name, start, stop, tag)

        return self._transport.read(get, offset, length, version, where, until)

    def objects(self, prefix: str) -> dict[str, ObjectInfo]:
        folder = "/".join(part for part in (self.prefix, prefix.strip("/")) if part)
        start = f"{folder}/" if folder else ""
        root = len(self.prefix) + 1 if self.prefix else 0
        found: dict[str, ObjectInfo] = {}
        token: str | None = None
        while True:
            page = self._ask(
                "list_objects_v2",
                f"cannot list {start or '/'} of bucket {self.bucket}",
                Prefix=start,
                **({"ContinuationToken": token} if token else {}),
            )
            for entry in page.get("Contents", ()):
                found[entry["Key"][root:]] = ObjectInfo(size=int(entry["Size"]), version=str(entry["ETag"]))
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return dict(sorted((key, info) for key, info in found.items() if not key.endswith("/")))

    def size(self, key: str) -> int:
        return int(self._ask("head_object", f"no object {key} in {self.uri}", Key=self._name(key))["ContentLength"])

    def exists(self, key: str) -> bool:
        name = self._name(key)
        try:
            self._ask("head_object", f"cannot look up {key} in {self.uri}", Key=name)
        except ObjectMissing:  # only "not found" is an answer; a refused request must not pass for an absent object
            return False
        return True

    def write(self, key: str, body: bytes) -> None:
        self._ask("put_object", f"cannot write {key} in {self.uri}", Key=self._name(key), Body=body)

    def local_path(self, key: str) -> Path | None:
        return None

    def gauges(self) -> dict[str, float]:
        return self._counters.values()

    def close(self) -> None:
        with self._lock:
            link, self._link, self._closed = self._link, None, True
        self._transport.close()
        if link is not None:
            link.client.close()

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}" if self.prefix else checked_key(key)

    def _ask(self, operation: str, what: str, **arguments: Any) -> dict[str, Any]:
        """One small request through boto3, under the same policy as the reads."""

        def call() -> dict[str, Any]:
            with self._linked() as link:
                answer: dict[str, Any] = getattr(link.client, operation)(Bucket=self.bucket, **arguments)
                return answer

        return self._transport.call(call, what)

    @contextmanager
    def _linked(self) -> Iterator["_Link"]:
        """The connection of now; foreign errors leave as `Fault`, and what a new session can cure has been renewed."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self.uri} is closed")
            if self._link is None:
                self._link = _connect(self.bucket, self._policy.stall_s, None)
            link = self._link
        try:
            yield link
        except (StoreError, Fault):
            raise
        except Exception as error:
            fault = _fault(error, link)
            if fault.kind is FaultKind.RENEWED:
                self._renew(link, fault)
            # Not chained: the libraries' own texts may quote the access key and the signed request.
            raise fault from None

    def _renew(self, old: "_Link", fault: Fault) -> None:
        region = _region_of(old) if isinstance(fault, OtherRegion) else old.region
        with self._lock:
            if self._link is old and not self._closed:  # the first of the callers that failed does it for all
                logger.info("%s: %s; going on with a new session", self.uri, fault)
                self._link = _connect(self.bucket, self._policy.stall_s, region)


@dataclass(frozen=True, kw_only=True)
class _Link:
    """One session: a boto3 client and an obstore store that sign with the same credentials."""

    bucket: str
    region: str
    client: Any
    store: Any
    anonymous: bool

    def get(self, name: str, start: int, stop: int | None, version: str | None) -> Body:
        """A GET whose bytes come through obstore."""
        import obstore

        options: Any = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        if version is not None:
            options["if_match"] = version
        result = obstore.get(self.store, name, options=options)
        first, last = result.range
        _check_end(last, stop)
        # A short answer is mostly one buffer; a long one is taken in parts, of which the read ones survive a break.
        parts = result.stream(min_chunk_size=_CHUNK_BYTES)
        tag = result.meta["e_tag"] if version is None else version  # all of meta is converted to get at it
        return Body(length=last - first, version=tag, chunks=self._chunks(parts))

    def get_slowly(self, name: str, start: int, stop: int | None, version: str | None) -> Body:
        """The same through boto3, which shows the Retry-After of a refusal; obstore's errors do not carry headers."""
        options = {} if version is None else {"IfMatch": version}
        if start or stop is not None:
            options["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        answer = self.client.get_object(Bucket=self.bucket, Key=name, **options)
        if options.get("Range") and "ContentRange" not in answer:
            raise Fault(FaultKind.REFUSED, "the server ignored the Range header and sent the whole object")
        if "Range" in options:
            _check_end(int(answer["ContentRange"].partition("/")[0].rpartition("-")[2]) + 1, stop)
        parts = answer["Body"].iter_chunks(_CHUNK_BYTES)
        return Body(length=int(answer["ContentLength"]), version=answer.get("ETag"), chunks=self._chunks(parts))

    def _chunks(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except Exception as error:
            raise _fault(error, self) from None


def _check_end(last: int, stop: int | None) -> None:
    if stop is not None and last < stop:
        raise Fault(FaultKind.REFUSED, f"short read: the object ends at byte {last}")


def _connect(bucket: str, stall_s: float, region: str | None) -> _Link:
    """A session with the credentials that are to be found now.

    Raises:
        StoreUnavailable: what the environment says of it makes no session.
    """
    from botocore.exceptions import BotoCoreError
    from obstore.exceptions import BaseError

    try:
        return _session(bucket, stall_s, region)
    except (BotoCoreError, BaseError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise StoreUnavailable(
            f"no session for bucket {bucket}: {text}. AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL (such as "
            "http://host:9000), AWS_CA_BUNDLE and the files in ~/.aws decide how it is made"
        ) from None


def _session(bucket: str, stall_s: float, region: str | None) -> _Link:
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from obstore.store import S3Store as Bytes

    session = boto3.session.Session()
    credentials = session.get_credentials()
    options = {"retries": {"total_max_attempts": 1}, "connect_timeout": _CONNECT_S, "read_timeout": stall_s}
    if credentials is None:
        options["signature_version"] = UNSIGNED
        logger.info("no credentials found for bucket %s; its objects are asked for unsigned", bucket)
    region = region or session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    client = session.client("s3", region_name=region, config=Config(max_pool_connections=64, **options))
    # Endpoint and addressing style have many sources; the address that boto3 would use has seen all of them.
    address = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"}))
    virtual = address.path == "/k"
    # ... but for one thing: it still uses AWS's old global name in addresses, which redirects to the regional one.
    regional = urlsplit(client.meta.endpoint_url).netloc
    host = re.sub(r"(^|\.)s3\.amazonaws\.com$", rf"\g<1>{regional}", address.netloc)
    transfer: Any = {
        "allow_http": address.scheme == "http",
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=stall_s),
        "timeout": timedelta(days=1),  # a long body is no fault while bytes arrive
        "pool_max_idle_per_host": "128",
    }
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        transfer["root_certificate"] = Path(bundle).read_bytes()
    endpoint = f"{address.scheme}://{host}" + ("" if virtual else address.path[: -len(f"/{bucket}/k")])
    store = Bytes(
        bucket,
        endpoint=endpoint,
        aws_endpoint_url_s3=endpoint,  # the variable of this name would win over `endpoint`
        region=region,
        virtual_hosted_style_request=virtual,
        skip_signature=credentials is None,
        client_options=transfer,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        credential_provider=None if credentials is None else _Credentials(credentials),
    )
    return _Link(bucket=bucket, region=region, client=client, store=store, anonymous=credentials is None)


class _Credentials:
    """Gives obstore what boto3 found, and again before it expires."""

    def __init__(self, found: Any) -> None:
        from botocore.credentials import RefreshableCredentials

        self._found = found
        self._life = _CREDENTIAL_LIFE if isinstance(found, RefreshableCredentials) else None

    def __call__(self) -> Any:
        frozen = self._found.get_frozen_credentials()
        expires_at = datetime.now(UTC) + self._life if self._life else None
        end = getattr(self._found, "_expiry_time", None)  # not public: without it the bound above has to do
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": min(expires_at, end) if expires_at and isinstance(end, datetime) else expires_at,
        }


def _region_of(link: _Link) -> str | None:
    """The region of the bucket, from a header that is there even where the look-up is refused."""
    try:
        answer = link.client.head_bucket(Bucket=link.bucket)
    except Exception as error:
        answer = getattr(error, "response", None) or {}
    region = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return None if region is None else str(region)


def _fault(error: Exception, link: _Link) -> Fault:
    """What an error of either library means."""
    answer: dict[str, Any] = getattr(error, "response", None) or {}
    if answer:  # boto3: an answer of the server
        meta, about = answer.get("ResponseMetadata", {}), answer.get("Error", {})
        return answered(
            int(meta.get("HTTPStatusCode", 0)),
            about.get("Code", ""),
            about.get("Message", ""),
            bucket=link.bucket,
            signed=not link.anonymous,
            retry_after=meta.get("HTTPHeaders", {}).get("retry-after"),
        )
    text = str(error)
    return in_text(text, bucket=link.bucket, signed=not link.anonymous) or _unanswered(error, text)


def _unanswered(error: Exception, text: str) -> Fault:
    """No answer, half of one, or nothing that was sent at all."""
    from botocore import exceptions as boto
    from obstore.exceptions import GenericError, UnauthenticatedError
    from urllib3.exceptions import HTTPError

    first = text.partition("\n")[0]
    if isinstance(error, UnauthenticatedError | boto.CredentialRetrievalError):
        # The source of the credentials failed; a new session asks it again, and reads its files again.
        return Fault(FaultKind.RENEWED, f"no usable credentials: {first}")
    lost = (
        *(boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ResponseStreamingError),
        *(HTTPError, ConnectionError),
    )
    if isinstance(error, lost):
        return Fault(FaultKind.TRANSIENT, f"{type(error).__name__}: {first}")
    if isinstance(error, GenericError) and "HttpError" in text:
        return Fault(FaultKind.TRANSIENT, broken(text))
    return Fault(FaultKind.REFUSED, f"{type(error).__name__}: {first}")
