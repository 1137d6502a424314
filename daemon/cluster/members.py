"""Reads the members of etcd from a list or between commas: one rule for daemons and clients."""

from collections.abc import Iterable

from headway.daemon.base.addresses import join_address, split_address
from headway.daemon.base.errors import ConfigError


def read_members(told: Iterable[str], where: str, *, has_certificates: bool) -> tuple[str, ...]:
    """Return host:port of each member. An entry may name several, between commas, each with its scheme or without.

    Certificates mean TLS, and no certificates mean no TLS: a contradicting scheme is refused. Raises ConfigError,
    naming `where` the entry came from.
    """
    entries = [text.strip() for entry in told for text in entry.split(",")]
    if not any(entries):
        raise ConfigError("name at least one host:port of etcd", where)
    return tuple(_member(text, where, has_certificates=has_certificates) for text in entries)


def _member(text: str, where: str, *, has_certificates: bool) -> str:
    scheme, mark, address = text.rpartition("://")
    match scheme.lower(), has_certificates:
        case "http", True:
            what = "http means no TLS, and certificates (--certs, HEADWAY_CERTS) mean TLS: write https"
            raise ConfigError(f"etcd member {text!r}: {what}; only a client may do without certificates", where)
        case "https", False:
            what = "https needs certificates: name their folder with --certs or HEADWAY_CERTS"
            raise ConfigError(f"etcd member {text!r}: {what}", where)
        case (("http" | "https"), _):
            address = address.removesuffix("/")
        case _ if mark:
            raise _no_address(text, where)
    try:
        host, port = split_address(address, where)
    except ConfigError as error:
        raise _no_address(text, where) from error
    if not host or not port or set(host) & set(" /@"):
        raise _no_address(text, where)
    return join_address(host, port)


def _no_address(text: str, where: str) -> ConfigError:
    what = "is not host:port; commas stand between members, brackets around an IPv6 address"
    return ConfigError(f"etcd member {text!r} {what}", where)
