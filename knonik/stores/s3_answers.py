"""What S3 means by an answer that is no success: throttled, expired, changed, absent, another region, or refused."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from knonik.stores.transport import Fault, FaultKind

_THROTTLED = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests"}
_THROTTLED |= {"RequestLimitExceeded", "ServiceUnavailable", "503", "429"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
_EXPIRED |= {"InvalidAccessKeyId"}  # keys in ~/.aws are rotated too
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_CHANGED = {"PreconditionFailed", "412"}
_ABSENT = {"NoSuchKey", "NotFound", "404"}
# What obstore's errors say of a connection, from the more to the less telling.
_BROKEN = {
    "TimedOut": "the server was silent for too long",
    "kind: Timeout": "the server was silent for too long",
    "IncompleteBody": "the body broke off",
    "ConnectionRefused": "connection refused",
    "ConnectionReset": "connection reset by the server",
    "IncompleteMessage": "connection closed by the server before it answered",
    "dns error": "the name of the endpoint cannot be resolved",
}


class OtherRegion(Fault):
    """The bucket is in another region than the requests were signed for."""


def answered(status: int, code: str, message: str, *, bucket: str, signed: bool, retry_after: str | None) -> Fault:
    """An error answer, by its code where it gave one (HEAD answers have no body), else by its status."""
    text = ": ".join(part for part in (f"{status} {code}".strip(), message.strip()[:200]) if part)
    if code in _THROTTLED or status in (429, 503):
        return Fault(FaultKind.THROTTLED, text, seconds(retry_after))
    if code in _REGION or status == 301:
        return OtherRegion(FaultKind.RENEWED, text)
    if code in _EXPIRED:
        return Fault(FaultKind.RENEWED, text)
    if code in _CHANGED or status == 412:
        return Fault(FaultKind.CHANGED, text)
    if code == "InvalidRange" or status == 416:
        return Fault(FaultKind.REFUSED, f"short read: the object ends before the first byte asked for ({text})")
    if code == "NoSuchBucket":
        return Fault(FaultKind.REFUSED, f"{text} (no bucket {bucket!r} there; see the address and AWS_ENDPOINT_URL)")
    if code in _ABSENT or status == 404:
        return Fault(FaultKind.ABSENT, text)
    if status >= 500 or code in ("RequestTimeout", "InternalError", "IncompleteBody"):
        return Fault(FaultKind.TRANSIENT, text)
    if not signed and status in (401, 403):
        text += " (sent unsigned, as no credentials were found: set AWS_PROFILE or AWS_ACCESS_KEY_ID)"
    return Fault(FaultKind.REFUSED, text)


def seconds(retry_after: str | None) -> float | None:
    """Retry-After is a number of seconds or a date."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def in_text(text: str, *, bucket: str, signed: bool) -> Fault | None:
    """The same from the text of an obstore error, which holds status and body; None where there was no answer."""
    if found := re.search(r"non-2xx status code: (\d+)", text):
        code, message = (_element(text, name) for name in ("Code", "Message"))
        return answered(int(found[1]), code, message, bucket=bucket, signed=signed, retry_after=None)
    if "redirect without LOCATION" in text:
        return OtherRegion(FaultKind.RENEWED, "301 PermanentRedirect")
    if "non-partial response" in text:
        return Fault(FaultKind.REFUSED, "the server ignored the Range header and sent the whole object")
    return None


def broken(text: str) -> str:
    """Why there was no whole answer, in words, from the text of an obstore error."""
    first = text.partition("\n")[0].rpartition(" - ")[2]
    return next((words for mark, words in _BROKEN.items() if mark in text), first)


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return found[1] if found else ""
