"""Finds the address that a provider of rented machines maps to this node's port, by the variables that it sets. Pure.

RunPod and Vast.ai share a public address among machines, and map a few ports of each to others there. Sources:
https://docs.runpod.io/pods/configuration/expose-ports, https://docs.vast.ai/guides/instances/connect/networking.
"""

from collections.abc import Mapping
from typing import Final

from headway.daemon.addresses import MAX_PORT, join_address

PROVIDERS: Final = (("RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"), ("PUBLIC_IPADDR", "VAST_TCP_PORT_"))
"""The variable with the public address, and the begin of those that name a port here and have the one outside."""


def mapped_address(environment: Mapping[str, str], port: int) -> str:
    """Return host:port outside of a port at which this node listens; empty: no provider says that it maps this port.

    A port that a provider maps to the same number has a variable of another name: a number above all ports.
    """
    for host_variable, prefix in PROVIDERS:
        host = environment.get(host_variable, "").strip()
        ports = {name.removeprefix(prefix): text for name, text in environment.items() if name.startswith(prefix)}
        is_same = any(text == str(port) for name, text in ports.items() if name.isdigit() and int(name) > MAX_PORT)
        outside = str(port) if is_same else ports.get(str(port), "")
        if host and outside.isascii() and outside.isdigit() and 0 < int(outside) <= MAX_PORT:
            return join_address(host, int(outside))
    return ""
