"""A URL becomes a store. Nothing is asked of the destination yet; what cannot be a destination is refused here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

from dispatch_agent.errors import SettingsError
from dispatch_agent.store.base import Store
from dispatch_agent.store.memory import MemoryStore
from dispatch_agent.store.posix import PosixStore

S3 = {"s3", "s3a"}
SFTP = {"sftp", "ssh"}


def open_store(url: str, options: Mapping[str, object] | None = None) -> Store:
    """The store at `url`: a folder's path (relative ones are below the current folder), file://, s3://bucket/prefix,
    gs://bucket/prefix, abfs://container/prefix, memory://name, or any URL that fsspec knows.

    `options` are fsspec's storage options for this kind of URL (endpoint_url, profile, client_kwargs, ...). What is not
    given is taken from where the SDKs look: environment, config files, the instance. Open it in the process that uses
    it, never before a fork. Raises SettingsError.
    """
    if not url.strip() or url.startswith("://") or "\0" in url:
        msg = f"the destination is {url!r}: name a folder or a URL such as s3://bucket/prefix"
        raise SettingsError(msg)
    scheme, mark, rest = url.partition("://")
    if not mark:
        if re.match(r"[a-z][a-z0-9+.]*:", url, re.IGNORECASE):
            msg = f"the destination is {url!r}: a URL has two slashes after the colon; a folder of that name is ./{url}"
            raise SettingsError(msg)
        return _folder(url, options)
    refuse_secrets(url)
    if scheme == "file":
        # file://host/path has no meaning here, and file://a/b is nearly always a missing slash.
        host, _, path = rest.partition("/")
        if host not in {"", "localhost"} or not path:
            msg = f"the destination is {url!r}: a file URL is file:///absolute/path"
            raise SettingsError(msg)
        return _folder("/" + unquote(path), options)
    if scheme == "memory":
        return MemoryStore(rest.strip("/"))
    return OPENERS.get(scheme, _generic)(url, rest, options or {})


def _folder(path: str, options: Mapping[str, object] | None) -> Store:
    if options:
        msg = f"storage options ({', '.join(sorted(options))}) are for URLs, and {path!r} is a folder: leave them out"
        raise SettingsError(msg)
    return PosixStore(path)


def _s3(url: str, rest: str, options: Mapping[str, object]) -> Store:
    bucket, prefix = _bucket(url, rest, "an S3 URL is s3://bucket or s3://bucket/prefix")
    _need("s3fs", url, "s3")
    from dispatch_agent.store.s3 import S3Store  # noqa: PLC0415 (folders must not need s3fs)

    return S3Store(bucket, prefix, options)


def _azure(url: str, rest: str, options: Mapping[str, object]) -> Store:
    """Also abfs://container@account.dfs.core.windows.net/prefix, as Hadoop writes it."""
    container, prefix = _bucket(url, rest, "an Azure URL is abfs://container or abfs://container/prefix")
    shown = f"abfs://{container}/{prefix}".rstrip("/")
    container, at, host = container.partition("@")
    if at:
        account, _, _ = host.partition(".")
        options = {"account_name": account, "account_host": host.replace(".dfs.", ".blob.", 1), **options}
    _need("adlfs", url, "azure")
    from dispatch_agent.store.azure import AzureStore  # noqa: PLC0415 (folders must not need adlfs)

    return AzureStore(shown, container, prefix, options)


def _gcs(url: str, rest: str, options: Mapping[str, object]) -> Store:
    bucket, prefix = _bucket(url, rest, "a Google Cloud Storage URL is gs://bucket or gs://bucket/prefix")
    _need("gcsfs", url, "gcs")
    from dispatch_agent.store.gcs import GcsStore  # noqa: PLC0415 (folders must not need gcsfs)

    return GcsStore(bucket, prefix, options)


def _bucket(url: str, rest: str, form: str) -> tuple[str, str]:
    """Bucket and prefix of what follows the scheme."""
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket or any(part in {"", ".", ".."} for part in prefix.split("/") if prefix) or "?" in rest or "#" in rest:
        shown, query, _ = url.partition("?")  # a signature may stand there
        msg = f"the destination is {shown + ('?...' if query else '')!r}: {form}"
        raise SettingsError(msg)
    return bucket, prefix


def _generic(url: str, _: str, options: Mapping[str, object]) -> Store:
    scheme = url.partition("://")[0]
    if scheme in SFTP:
        _need("paramiko", url, "sftp")
    _need("fsspec", url, "publish")
    from dispatch_agent.store.generic import GenericStore  # noqa: PLC0415 (folders must not need fsspec)

    return GenericStore(url, scheme, options)


def _need(package: str, url: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        msg = f"the destination {url!r} needs {package}, which is not installed: pip install 'dispatch-agent[{extra}]'"
        raise SettingsError(msg)


def refuse_secrets(url: str) -> None:
    """URLs end in logs and process lists, so no password may be in one. Raises SettingsError."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at and ":" in parts.netloc and "@" in parts.path and not parts.netloc.rpartition(":")[2].isdigit():
        # A secret may hold a slash, which ends the host for urlsplit; a port is digits.
        userinfo, host = parts.netloc, parts.path.rpartition("@")[2]
    if ":" in userinfo or (at and parts.scheme in S3):
        msg = (
            f"the destination {parts.scheme}://...@{host} has credentials in it, which logs would show: give them by"
            " environment, config file or storage options"
        )
        raise SettingsError(msg)


OPENERS: dict[str, Callable[[str, str, Mapping[str, object]], Store]] = {
    **dict.fromkeys(S3, _s3),
    **dict.fromkeys(("abfs", "abfss", "az"), _azure),
    **dict.fromkeys(("gs", "gcs"), _gcs),
}
