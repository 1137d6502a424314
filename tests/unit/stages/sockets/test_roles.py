"""A certificate's role is one of its names; whoever has none is what everybody was before there were roles."""

import pytest

from headway.stages.sockets.roles import OF_OLD, ROLE_URI, Role, holder, roles_among
from headway.stages.sockets.tls_identity import is_borne, other_node


@pytest.mark.parametrize(
    ("names", "roles", "told"),
    [
        (["a", "localhost", f"{ROLE_URI}node"], {Role.NODE}, "a (node)"),
        (["ann", f"{ROLE_URI}reader"], {Role.READER}, "ann (reader)"),
        (["me", f"{ROLE_URI}operator", f"{ROLE_URI}node"], {Role.NODE, Role.OPERATOR}, "me (node and operator)"),
        (["a", "10.0.0.7"], OF_OLD, "a"),
        (["a", f"{ROLE_URI}king"], set(), "a (of an unknown role)"),
        (["a", f"{ROLE_URI}NODE"], set(), "a (of an unknown role)"),
        (["a", f"{ROLE_URI.upper()}reader"], {Role.READER}, "a (reader)"),
        (["a", "URN:Headway:Role:king"], set(), "a (of an unknown role)"),
        ([], set(), "nobody"),
    ],
)
def test_the_role_is_among_the_names(names: list[str], roles: set[Role], told: str) -> None:
    """One, several, none, and one that this release does not know: that one gives nothing, as does no name at all."""
    assert roles_among(names) == roles
    assert holder(names) == told


def test_a_persons_certificate_is_no_nodes() -> None:
    """Even if it bears the node's name: links and standing by are for nodes."""
    assert is_borne("a", ["A", f"{ROLE_URI}node"])
    assert is_borne("a", ["a"])
    assert not is_borne("a", ["a", f"{ROLE_URI}operator"])
    assert not is_borne("", [])
    assert not is_borne(f"{ROLE_URI}node", [])
    assert other_node("a", ["a", f"{ROLE_URI}operator"]) == "the certificate of a (operator) is not that of node a"
    assert other_node("a", ["b", "c", f"{ROLE_URI}node"]) == "the certificate of b, c is not that of node a"
