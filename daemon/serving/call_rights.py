"""Which roles may call which method of a daemon. Pure."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from headway.stages.sockets.roles import ANYBODY, Role, holder, listed_roles, roles_among

_OPERATORS: Final = frozenset({Role.OPERATOR})
_NODES: Final = frozenset({Role.NODE})
_NO_READERS: Final = _OPERATORS | _NODES

CALLERS: Final[Mapping[str, frozenset[Role]]] = {
    "Describe": ANYBODY,
    "Status": ANYBODY,
    "Logs": ANYBODY,
    "Journal": ANYBODY,
    "Trace": ANYBODY,
    "Accompany": ANYBODY,
    "FetchState": _NO_READERS,  # weights: a node takes those of its layers, and an operator exports
    "FetchData": _NO_READERS,
    "Probe": _NO_READERS,
    "DialPeers": _NO_READERS,
    "HasData": _NO_READERS,
    "GiveData": _OPERATORS,
    "TryFolder": _OPERATORS,
    "StandBy": _NODES,
    "Invite": _OPERATORS,
    "Renew": ANYBODY,  # for the holder of the certificate alone
}
"""Nobody may call a method that is not named here."""


def revocation(names: Iterable[str], revoked: Collection[str]) -> str:
    """Return why a certificate of these names does not count; empty: it does. revoked: names in small letters."""
    found = next((name for name in names if name.casefold() in revoked), "") if revoked else ""
    return f"the certificate of {found} is revoked" if found else ""


def refusal(method: str, names: Iterable[str]) -> str:
    """Return why a caller with a certificate of these names may not call a method; empty: it may."""
    names, callers = tuple(names), CALLERS.get(method, frozenset())
    if callers & roles_among(names):
        return ""
    who = f"only {listed_roles(callers)}" if callers else "nobody"
    return f"{method} is refused: the certificate is of {holder(names)}, and {who} may call it"
