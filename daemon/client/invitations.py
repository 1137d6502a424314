"""`headway invite`: it asks a daemon with the cluster's authority, and makes the token."""

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from headway.daemon.addresses import NodeEndpoint, split_address
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError
from headway.daemon.joining.join_messages import SERVER_NAME
from headway.daemon.joining.join_token import JoinToken, write_token
from headway.daemon.records.records import NodeRecord
from headway.daemon.rpc.peer_client import NodeClient
from headway.proto import control_pb2
from headway.stages.errors import PeerError, ProtocolError
from headway.stages.sockets.shared_port import listening_ports, shared_address

MAX_ADDRESSES = 3
"""In a token, which people copy."""


async def invite(
    session: ClusterSession,
    name: str,
    *,
    role: str,
    hosts: Sequence[str],
    lasts_s: float,
    valid_s: float,
    again: bool = False,
    etcd: Sequence[str] = (),
) -> str:
    """Return the token with which somebody joins once. etcd: its members as the new machine dials them; empty: as here.

    Raises ConfigError: nobody may be invited by this name, or no daemon invites; UnavailableError.
    """
    if session.identity is None:
        raise ConfigError("an operator's certificate is needed", "--certs")
    signers = sorted((node for node in (await session.view()).nodes.values() if node.has_authority), key=_by_name)
    if not signers:
        what = "no daemon has the authority: set `authority` in the settings of one, or use `headway certs`"
        raise ConfigError(what, "invite")
    members = tuple(etcd) or session.address.etcd
    if not etcd:
        _check_members(members, signers)
    request = control_pb2.InviteRequest(
        name=name, role=role, hosts=hosts, etcd=members, lasts_s=lasts_s, valid_s=valid_s, again=again
    )
    client = NodeClient(session.identity)
    try:
        signer, reply = await _first_answer(client, signers, request)
    finally:
        await client.close()
    asked_first = sorted(signers, key=lambda node: node is not signer)
    addresses = tuple(shared_address(node.address, SERVER_NAME) for node in asked_first[:MAX_ADDRESSES])
    return write_token(JoinToken(name, addresses, reply.ca_sha256, reply.secret))


async def _first_answer(
    client: NodeClient, signers: Sequence[NodeRecord], request: control_pb2.InviteRequest
) -> tuple[NodeRecord, control_pb2.InviteReply]:
    """Return the first answer, and whose it is. Raises ConfigError for a refusal, PeerError when nobody answers."""
    for signer in signers:
        try:
            return signer, await client.invite(NodeEndpoint(signer.name, signer.address), request)
        except ProtocolError as error:
            raise ConfigError(error.reason, "invite") from error
        except PeerError:
            if signer is signers[-1]:
                raise
    raise AssertionError("there are no signers")


def _by_name(node: NodeRecord) -> str:
    return node.name


def _check_members(members: Iterable[str], signers: Iterable[NodeRecord]) -> None:
    """Raise ConfigError when this machine dials etcd at an address that means another machine elsewhere."""
    ports = [port for node in signers for port in listening_ports(node.address)]
    if all(_is_loopback(port) for port in ports):
        return  # the whole cluster is on this machine
    for member in members:
        if _is_loopback(member):
            raise ConfigError(f"{member} is another machine there: name etcd's members with --etcd-there", "invite")


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address.removeprefix("https://").removeprefix("http://"), "etcd")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
