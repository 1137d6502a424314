"""Translates errors of file systems: any driver's exception becomes our error, with the URL and one plain sentence.

Drivers raise their libraries' errors (botocore, aiohttp, google.auth), and few of these are OSErrors. None of these
libraries is imported here: their errors are known by the names of their classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.request import getproxies_environment

import fsspec

from headway.daemon.base.allowed_places import AllowedPlaces
from headway.daemon.base.errors import NoAccessError, RecoveryError

MAX_SENTENCE: Final = 300
"""Maximum number of characters quoted from a driver's message."""

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}}
}
"""Options for drivers that retry by themselves: an outage must be reported within seconds, and daemons retry anyway.

A protocol that the configuration of fsspec names keeps that configuration.
"""

_NO_CREDENTIALS: Final = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "NoAuthTokenError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
    "PermissionError",
)
_NO_ANSWER: Final = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "ConnectionError",
    "ClientConnectorError",
    "ServerDisconnectedError",
    "FSTimeoutError",
    "TimeoutError",
    "ConnectError",  # of httpx, which asks the Hub
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
)


_allowed: AllowedPlaces | None = None
"""Of this process: every file system of a job is opened here. None: a command opens what its user may."""


def allow_only(places: AllowedPlaces | None) -> None:
    """Let this process open jobs' places below these, and no others, from now on; None: any."""
    global _allowed
    _allowed = places


def check_allowed(place: str) -> None:
    """Raise NoAccessError for a folder or URL that a job may not name on this node."""
    if _allowed is not None and (why := _allowed.why_not(place)):
        raise NoAccessError(place, why)


def check_opened(file: Any) -> None:
    """Raise NoAccessError for an open local file that no job may read: a link may have changed since its path was
    checked.
    """
    if _allowed is not None:
        check_allowed(str(Path(f"/proc/self/fd/{file.fileno()}").readlink()))


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there. Raises NoAccessError when its package is missing or the node
    does not allow it, RecoveryError.
    """
    check_allowed(url)
    protocol = url.partition("://")[0]
    options = {} if protocol in fsspec.config.conf else OPTIONS.get(protocol, {})
    with told_as(url, "opened"):
        file_system, path = fsspec.core.url_to_fs(url, **options)
    return file_system, path


def is_local(file_system: Any) -> bool:
    """Return whether a file system is this machine's own tree of files."""
    return "file" in ((file_system.protocol,) if isinstance(file_system.protocol, str) else file_system.protocol)


def file_system_of(url: str) -> str:
    """Return a key of the file system of a URL or path, by its text: a hang of one says nothing about another."""
    protocol, separator, rest = url.partition("://")
    if separator:
        return f"{protocol}://{rest.partition('/')[0]}"
    return "/".join(url.split("/")[:3])


@contextmanager
def told_as(url: str, done: str, kind: type[RecoveryError] = RecoveryError) -> Iterator[None]:
    """Translate a driver's errors into NoAccessError or `kind`, naming the URL; our own errors pass.

    done: the verb of the failed action, as in "cannot be read".
    """
    try:
        yield
    except RecoveryError:
        raise
    except Exception as error:
        told = NoAccessError if lacks_access(error) else kind
        raise told(url, f"cannot be {done}: {sentence(error)}") from error


def lacks_access(error: BaseException) -> bool:
    """Return whether this node lacks the package or the credentials, so that another attempt here would fail too."""
    return isinstance(error, ImportError) or _is_named(error, _NO_CREDENTIALS)


def sentence(error: BaseException) -> str:
    """Return an error's message as one line of printable characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = next(iter(str(error).strip().splitlines()), "")
    said = "".join(character if character.isprintable() else "?" for character in said[:MAX_SENTENCE])
    if isinstance(error, ImportError):
        return said or "a package is missing on this node"
    if isinstance(error, PermissionError):
        return f"this node has no access: {said}" if said else "this node has no access"
    if _is_named(error, _NO_CREDENTIALS):
        return f"this node has no credentials for it ({said or type(error).__name__})"
    if _is_named(error, _NO_ANSWER):
        through = (
            ", or the web proxy of the environment,"
            if getproxies_environment().keys() & {"http", "https", "all"}
            else ""
        )
        return f"its server{through} does not answer ({said or type(error).__name__})"
    if isinstance(error, OSError | ValueError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_named(error: BaseException, names: tuple[str, ...]) -> bool:
    """Return whether an error, or its cause, is of a class with one of the names, or of a subclass."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if any(kind.__name__ in names for kind in type(current).__mro__):
            return True
        seen.add(id(current))
        current = current.__cause__
    return False
