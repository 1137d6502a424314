"""Who may call what: every method is in the table, and a refusal says whose certificate it is and who may."""

from headway.daemon.blobs.peer_client import _REQUESTS
from headway.daemon.node.stream_limits import CALLERS, refusal, revocation
from headway.proto import control_pb2
from headway.stages.sockets.roles import ROLE_URI


def test_every_method_has_its_callers() -> None:
    """A method of the two services that the table forgets could be called by nobody; a name too many, by mistake."""
    methods = {method.name for method in control_pb2.DESCRIPTOR.services_by_name["Node"].methods}
    assert CALLERS.keys() == methods | _REQUESTS.keys()
    assert all(CALLERS.values())


def test_a_refusal_names_the_certificate_and_who_may() -> None:
    """A reader gives no data, a node neither; a certificate without a role does all; an unknown method is nobody's."""
    words = "GiveData is refused: the certificate is of {}, and only operator may call it"
    assert refusal("GiveData", ["ann", f"{ROLE_URI}reader"]) == words.format("ann (reader)")
    assert refusal("GiveData", ["a", f"{ROLE_URI}node"]) == words.format("a (node)")
    assert not refusal("GiveData", ["me", f"{ROLE_URI}operator"])
    assert not any(refusal(method, ["old"]) for method in CALLERS)
    assert refusal("Status", ["a", f"{ROLE_URI}king"])
    assert "nobody" in refusal("Format", ["old"])


def test_a_revoked_name_counts_nowhere_in_a_certificate() -> None:
    """In any case of letters; another name, and one that is only a part, stay as they are."""
    assert revocation(["A", "localhost", f"{ROLE_URI}node"], {"a"}) == "the certificate of A is revoked"
    assert revocation(["x", "a"], {"a"})
    assert not revocation(["ab", f"{ROLE_URI}node"], {"a"})
    assert not revocation(["a"], ())
