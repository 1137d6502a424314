"""The finding of `headway doctor` on the interface over which NCCL meets the cards of other machines."""

from collections.abc import Iterable, Mapping

from headway.daemon.base.interfaces import NCCL_INTERFACES, interface_of, nccl_takes
from headway.daemon.client.doctor_outcome import Finding
from headway.daemon.cluster.records import NodeRecord


def nccl_findings(
    nodes: Iterable[NodeRecord], addresses: list[tuple[str, str]], environment: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each node of this machine whose cards NCCL links with those of others: in a private site.

    addresses: this machine's. environment: counts as that of the node's daemon.
    """
    here = {address for _, address in addresses}
    return [
        _finding(node, addresses, environment)
        for node in nodes
        if node.site_is_private and any(device.kind == "cuda" for device in node.devices) and node.host in here
    ]


def _finding(node: NodeRecord, addresses: list[tuple[str, str]], environment: Mapping[str, str]) -> Finding:
    dialled, told = interface_of(node.host, addresses), environment.get(NCCL_INTERFACES, "")
    taken = nccl_takes(addresses, environment) if told or not dialled else dialled
    why = f"{NCCL_INTERFACES} here is {told!r}" if told else f"the one of its address {node.host}"
    advice = ""
    if taken != dialled:
        advice = f"others dial {node.host}" + (f" on {dialled}" if dialled else "")
        advice += f": if the machines of site {node.site} do not meet on {taken or 'it'}, change {NCCL_INTERFACES}"
    return Finding(
        what=f"NCCL of {node.name}", is_fine=bool(taken), found=f"interface {taken or 'none'}: {why}", advice=advice
    )
