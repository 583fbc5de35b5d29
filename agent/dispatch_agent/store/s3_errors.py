"""What an S3 answer means to the protocol, judged by its HTTP status and code, never by the Python type.

s3fs gives one status many types: a refused condition is FileExistsError from AWS and OSError(EINVAL) from SeaweedFS.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import botocore.exceptions as boto

from dispatch_agent.errors import AgentError, SettingsError, StoreDenied, StoreError, StoreTooWeak, StoreUnavailable
from dispatch_agent.store.answers import LATER, Answer, by_status

# Credentials that expired, or were replaced by others. Sent with 400 by some stores and 403 by others, so the code
# decides.
OUTDATED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
DENIED = OUTDATED | {"AccessDenied", "AccountProblem", "AllAccessDisabled", "InvalidSecurity", "UnauthorizedAccess"}
REGION = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
# The bytes did not arrive as they were sent, or too slowly: sending them again helps.
TRANSIT = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.InvalidIMDSEndpointError,
    boto.MetadataRetrievalError,
)
MISTAKEN = (
    boto.ProfileNotFound,
    boto.ParamValidationError,
    boto.NoRegionError,
    boto.InvalidRegionError,
    boto.InvalidConfigError,
    boto.ConfigParseError,
    boto.InvalidRetryConfigurationError,
    boto.UnsupportedS3ConfigurationError,
)


def answer(error: BaseException) -> Answer:
    """The server's answer behind an exception of s3fs or botocore; of status 0 if it said nothing."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            said = response.get("Error", {})
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return Answer(status, str(said.get("Code", "")), str(said.get("Message", "")))
        cause = cause.__cause__
    return Answer(0, "", str(error))


def may_be_renewed(error: Exception) -> bool:
    """Whether credentials that are looked up anew can help: the store takes these no more, or there are none yet."""
    return answer(error).code in OUTDATED or isinstance(error, NO_CREDENTIALS)


@contextmanager
def explained(what: str, url: str, key: str, *, conditional: bool = False) -> Iterator[None]:
    """Raises what the seam allows in place of what s3fs, botocore and aiohttp raise; a fault of our own passes."""
    try:
        yield
    except Exception as error:
        meant = meaning(error, what, url, key, conditional=conditional)
        if meant is error:
            raise
        raise meant from error


# What kept a request from being answered: its meaning, and what to do. The first that fits.
UNANSWERED: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[AgentError], str], ...] = (
    (NO_CREDENTIALS, StoreDenied, "give credentials by environment, config file, role or storage options"),
    (MISTAKEN, SettingsError, "correct the AWS settings or the destination"),
    (
        boto.SSLError,
        StoreUnavailable,
        "if a CA of your own signed its certificate, name that CA's file in AWS_CA_BUNDLE",
    ),
    (
        (boto.BotoCoreError, aiohttp.ClientError, asyncio.TimeoutError, OSError),
        StoreUnavailable,
        "look at endpoint and network if this stays",
    ),
)


def meaning(error: Exception, what: str, url: str, key: str, *, conditional: bool) -> Exception:
    """The exception of the seam for this one, or this one itself if it is no answer of a store."""
    said = answer(error)
    where = f"could not {what} {url}/{key}" if key else f"could not {what} {url}"
    if said.status or said.code:
        return _by_status(said, where, key, conditional=conditional)
    unread = _unread_bundle(error)
    if unread:
        msg = f"{where}: the CA bundle cannot be read: {unread}: correct AWS_CA_BUNDLE, or ca_bundle in the AWS config"
        return SettingsError(msg)
    for kinds, meant, advice in UNANSWERED:
        if isinstance(error, kinds):
            return meant(f"{where}: {error or type(error).__name__}: {advice}")
    return error


def _unread_bundle(error: Exception) -> Exception | None:
    """Why the file of the CAs could not be read, if that was it: it happens before anything is sent and has no type."""
    cause = error.kwargs.get("error") if isinstance(error, boto.HTTPClientError) else None
    bad = isinstance(cause, ssl.SSLError) and cause.library in {"PEM", "X509"}
    missing = isinstance(cause, (FileNotFoundError, IsADirectoryError, PermissionError))
    return cause if bad or missing else None


def _by_status(said: Answer, where: str, key: str, *, conditional: bool) -> Exception:
    text = f"{where}: {said.status} {said.code} {said.message}".rstrip()
    meant = by_status(said, where, key)
    if said.status == 412:
        return meant
    if said.code == "NoSuchBucket":
        meant = StoreUnavailable(f"{text}: create the bucket or correct its name")
    elif said.status == 404:
        return meant
    elif said.code in REGION or said.status in {301, 307}:
        meant = SettingsError(f"{text}: set the bucket's region (AWS_REGION)")
    elif said.code in DENIED or said.status in {401, 403}:
        meant = StoreDenied(f"{text}: look at the credentials, their age, the clock and the bucket's policy")
    elif said.status == 501 or said.code == "NotImplemented":
        kind = StoreTooWeak if conditional else StoreError
        meant = kind(f"{text}: the store does not know this kind of request")
    elif said.code in TRANSIT:
        meant = StoreUnavailable(f"{text}: {LATER}")
    return meant
