"""What providers of rented machines say of the ports that they map."""

import pytest

from headway.daemon.node.own_host import mapped_address

RUNPOD = {"RUNPOD_PUBLIC_IP": "203.0.113.7", "RUNPOD_TCP_PORT_7070": "41022", "RUNPOD_TCP_PORT_22": "41000"}
VAST = {"PUBLIC_IPADDR": "2001:db8::7", "VAST_TCP_PORT_7070": "50123", "VAST_TCP_PORT_70000": "50200"}


@pytest.mark.parametrize(
    ("environment", "port", "address"),
    [
        (RUNPOD, 7070, "203.0.113.7:41022"),
        (VAST, 7070, "[2001:db8::7]:50123"),
        (VAST, 50200, "[2001:db8::7]:50200"),
        (RUNPOD, 7071, ""),
        (RUNPOD, 0, ""),
        ({"RUNPOD_TCP_PORT_7070": "41022"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_7070": "none"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_7070": "70001"}, 7070, ""),
        (RUNPOD | {"RUNPOD_TCP_PORT_x": "7071"}, 7071, ""),
        ({}, 7070, ""),
    ],
)
def test_the_address_outside(environment: dict[str, str], port: int, address: str) -> None:
    """The provider's address with the port outside; a port that is not mapped, or not readably, has none."""
    assert mapped_address(environment, port) == address
