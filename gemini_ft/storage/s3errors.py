"""Turns errors of S3 and boto3 into StorageErrors that name place, reason and way out.

Nothing of the credentials is in a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ReadTimeoutError
from botocore.httpsession import URLLib3SSLError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError
from urllib3.exceptions import ReadTimeoutError as SilentError

from gemini_ft.config import without_passwords
from gemini_ft.errors import ObjectGoneError, StorageError

# boto3 passes some errors of the library below it on as they are: while it reads a body within TLS, or the body of a refusal.
_BROKEN: Final = (BotoCoreError, Boto3Error, URLLib3SSLError, HTTPError, OSError)
S3_ERRORS: Final = (ClientError, ResponseParserError, *_BROKEN)

_PERMISSIONS = "let these credentials list, read, write and delete under the prefix"
UNDELETABLE: Final = "where only the store's own rules may delete, set storage.keep_last=all (GEMINI_STORAGE__KEEP_LAST=all)"
_CREDENTIALS = "check the credentials that boto3 finds (environment, profile, instance role)"
_EXPIRED = (
    "the credentials have run out: renew them, or use a profile or role that renews itself. An agent has those of the environment it "
    "was started in: `gemini leave` ends it, the next start brings new ones"
)
_REGION = "the bucket is in another region{region}: set AWS_DEFAULT_REGION, or storage.endpoint_url to that region's endpoint"
_OVERLOADED = "the store is overloaded; lower storage.max_bandwidth or upload less often"
_WAY_OUT = {
    "NoSuchBucket": "create the bucket, or correct storage.url",
    "NoSuchKey": "the object is gone; was it deleted while in use?",
    "404": "the object or bucket is gone; check storage.url",
    "AccessDenied": _PERMISSIONS,
    "AllAccessDisabled": _PERMISSIONS,
    "403": _PERMISSIONS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "SignatureDoesNotMatch": "check the credentials that boto3 finds, and the clock of this host",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": "set this host's clock{skew}; an NTP client keeps it right",
    "RequestExpired": "set this host's clock{skew}; an NTP client keeps it right",
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "BadDigest": "bytes were changed on the way to the store; check the memory and the network of this host",
    "SlowDown": _OVERLOADED,
    "ServiceUnavailable": "the store is overloaded or down",
    "503": "the store is overloaded or down",
    "InternalError": "the store has trouble of its own",
    "500": "the store has trouble of its own",
    "RequestTimeout": "the network between this host and the store is slow or broken",
}


class BrokenError(StorageError):
    """An answer whose body broke off, or did not come; another connection may bring it."""


class GarbledError(StorageError):
    """An answer is none that a store would give to this request; the next one may be."""

    def __init__(self, url: str, what: str, found: str) -> None:
        super().__init__(
            f"{url}: {what}: {found}. This says nothing about the stored objects; check storage.url and storage.endpoint_url, and whatever "
            "stands between this host and the store (proxy, gateway, load balancer)"
        )


@contextmanager
def explained(url: str, what: str, silence: float) -> Iterator[None]:
    """Turns boto3's errors into StorageErrors.

    ``what``: that did not work, as in "cannot read a/b". ``silence``: seconds after which a request that gets no answer fails.
    """
    try:
        yield
    except NoCredentialsError:
        raise StorageError(f"{url}: {what}: boto3 finds no credentials; set up its environment, profile or instance role") from None
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "?"))
        kind = ObjectGoneError if code in ("NoSuchKey", "NoSuchBucket") else StorageError
        raise kind(f"{url}: {what}: {code}; {_way_out(code, error)}") from None
    except ResponseParserError:
        raise GarbledError(url, what, "the answer is no XML of S3") from None
    except (ReadTimeoutError, SilentError) as error:
        kind = BrokenError if isinstance(error, HTTPError) else StorageError
        raise kind(f"{url}: {what}: the store fell silent, no byte came for {silence:g} s; is it, or the way to it, stuck?") from None
    except RecursionError:  # boto3 asks the bucket for its region, and is redirected again
        raise StorageError(f"{url}: {what}: redirected in a circle; {_REGION.format(region='')}") from None
    except _BROKEN as error:
        reason = without_passwords(str(error).partition("?")[0])  # of the endpoint, or a proxy; nor is a signed URL's query shown
        kind = BrokenError if isinstance(error, HTTPError) else StorageError
        raise kind(f"{url}: {what}: {reason}; is the endpoint up and reachable from this host?") from None


def store_time(answer: Mapping[str, Any]) -> datetime | None:
    """Returns the store's clock as it was when it gave this answer, None where it did not say."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError):
        return None


def _way_out(code: str, error: ClientError) -> str:
    way_out = _WAY_OUT.get(code, "see the store's documentation of this error")
    if way_out is _PERMISSIONS:
        elsewhere = f"; {UNDELETABLE}" if error.operation_name == "DeleteObject" else ""
        return f"{way_out}{elsewhere} (denied: {error.operation_name})"
    return way_out.format(region=_region(error), skew=_skew(error))


def _region(error: ClientError) -> str:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    details: Mapping[str, Any] = error.response.get("Error", {})
    region = headers.get("x-amz-bucket-region") or details.get("Region")
    return f", {region}" if region else ""


def _skew(error: ClientError) -> str:
    theirs = store_time(error.response)
    if theirs is None:
        return ""
    ahead = (datetime.now(UTC) - theirs).total_seconds()
    return f", it is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the store's"
