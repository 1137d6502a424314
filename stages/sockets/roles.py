"""What the holder of a certificate may be: a node, an operator or a reader. Pure.

The role is a name of the certificate, the URI `urn:headway:role:ROLE` among its subject alternative names (RFC 5280,
section 4.2.1.6), so that a peer finds it where it finds the node's name. A certificate of an earlier release, or of an
authority that knows nothing of roles, has none: then its holder may be a node and an operator, as before. A certificate
that names nobody gives nothing: nobody could revoke it.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

ROLE_URI: Final = "urn:headway:role:"


class Role(StrEnum):
    """The roles."""

    NODE = "node"
    """Runs a daemon and its workers."""
    OPERATOR = "operator"
    """Submits, changes and exports jobs, and drains nodes."""
    READER = "reader"
    """Looks on."""


ANYBODY: Final = frozenset(Role)
OF_OLD: Final = frozenset({Role.NODE, Role.OPERATOR})
"""Roles of a certificate that names none."""


def roles_among(names: Iterable[str]) -> frozenset[Role]:
    """Return the roles that a certificate with these names gives.

    None: it names nobody, or a role that this release does not know.
    """
    names = tuple(names)
    told = [name[len(ROLE_URI) :] for name in names if _is_role(name)]
    return frozenset(role for role in Role if role in told) if told or not names else OF_OLD


def without_roles(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are of hosts and nodes."""
    return tuple(name for name in names if not _is_role(name))


def holder(names: Iterable[str]) -> str:
    """Return whom a certificate names, for people: its first name, and its roles if it has any."""
    names = tuple(names)
    own = next(iter(without_roles(names)), "nobody")
    return own if len(without_roles(names)) == len(names) else f"{own} ({listed_roles(roles_among(names))})"


def listed_roles(roles: Iterable[Role]) -> str:
    """Return roles in words."""
    return " and ".join(sorted(roles)) or "of an unknown role"


def _is_role(name: str) -> bool:
    """Return whether a name says a role: the first two parts of a URN may have any case (RFC 8141, section 3.1).

    In any other part too: one that is misspelled would otherwise count as none, which gives more.
    """
    return name.casefold().startswith(ROLE_URI)
