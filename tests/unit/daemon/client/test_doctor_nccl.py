"""`doctor` says over which interface NCCL meets the cards of a private site's other machines."""

from typing import Any

import pytest

from headway.daemon.client.doctor_nccl import nccl_findings
from headway.daemon.cluster.records import Device, NodeRecord
from tests.rigs.agent_views import node_record

ADDRESSES = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth0", "192.168.1.5"), ("eth1", "10.0.0.7")]
CARD = Device(kind="cuda", index=0, model="H100", memory_bytes=1, arithmetic_class="h100")


def private(**fields: object) -> NodeRecord:
    """A node of this machine."""
    usual: dict[str, Any] = {"host": "10.0.0.7", "site": "hall", "site_is_private": True, "devices": (CARD,)}
    return node_record("a", **{**usual, **fields})


@pytest.mark.parametrize(
    ("told", "found", "advice"),
    [
        ("", "interface eth1: the one of its address 10.0.0.7", ""),
        ("=eth1", "interface eth1: NCCL_SOCKET_IFNAME here is '=eth1'", ""),
        (
            "eth0",
            "interface eth0: NCCL_SOCKET_IFNAME here is 'eth0'",
            "others dial 10.0.0.7 on eth1: if the machines of site hall do not meet on eth0, change NCCL_SOCKET_IFNAME",
        ),
    ],
)
def test_the_interface_and_what_to_do(told: str, found: str, advice: str) -> None:
    """The one of the node's address, unless the user has named another."""
    (finding,) = nccl_findings([private()], ADDRESSES, {"NCCL_SOCKET_IFNAME": told} if told else {})
    assert (finding.what, finding.is_fine, finding.found, finding.advice) == ("NCCL of a", True, found, advice)


def test_an_interface_that_is_not_there_is_a_fault() -> None:
    """NCCL would find none, and each link would go through the hosts."""
    (finding,) = nccl_findings([private()], ADDRESSES, {"NCCL_SOCKET_IFNAME": "ens"})
    assert (finding.is_fine, finding.found) == (False, "interface none: NCCL_SOCKET_IFNAME here is 'ens'")
    assert "others dial 10.0.0.7 on eth1" in finding.advice


def test_only_nodes_here_whose_cards_nccl_links_with_other_machines() -> None:
    """No CPU, no open site, and no other machine: their interfaces are not to be seen from here."""
    cpu = Device(kind="cpu", index=0, model="", memory_bytes=1, arithmetic_class="x")
    others = [private(devices=(cpu,)), private(site_is_private=False), private(host="10.0.0.8")]
    assert not nccl_findings(others, ADDRESSES, {})
