"""Opens the storage behind a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from gemini_ft.config import without_passwords
from gemini_ft.errors import ConfigError
from gemini_ft.storage.base import Storage
from gemini_ft.storage.local import LocalStorage


def open_storage(url: str, endpoint_url: str | None = None, max_bandwidth: int | None = None, deletes: bool = True) -> Storage:
    """Returns the storage behind ``file:///folder`` or ``s3://bucket/prefix``; nothing is touched before it is used.

    ``deletes``: whether `Storage.delete` does anything; else files stay until they are deleted by other means.

    Raises ConfigError: the URL is none that this version can open, or boto3 is not installed.
    """
    parsed, shown = urlsplit(url), without_passwords(url)
    if parsed.scheme == "s3" and "@" in parsed.netloc:
        raise ConfigError(f"storage.url={shown!r}: give credentials to boto3 (environment, profile, instance role), not in the URL")
    if parsed.scheme == "s3" and parsed.netloc:
        try:
            from gemini_ft.storage.s3 import S3Storage
        except ModuleNotFoundError as error:
            raise ConfigError(f"storage.url={shown!r} needs {error.name}; pip install 'gemini-ft[s3]'") from None
        return S3Storage(parsed.netloc, parsed.path.strip("/"), endpoint_url, max_bandwidth, deletes)
    if parsed.scheme != "file" or parsed.netloc or not parsed.path.startswith("/"):
        raise ConfigError(f"storage.url={shown!r}: must be file:///folder with an absolute path, or s3://bucket/prefix")
    return LocalStorage(unquote(parsed.path), deletes)


def open_existing(url: str, endpoint_url: str | None = None) -> Storage:
    """Opens the storage behind a URL for reading.

    Raises ConfigError: the URL is none that this version can open, or its folder does not exist.
    """
    storage = open_storage(url, endpoint_url)
    if url.startswith("file:") and not Path(unquote(urlsplit(url).path)).is_dir():
        raise ConfigError(f"{url}: there is no such folder on this machine; check the URL, and whether its file system is mounted")
    return storage
