"""A node's own certificate: what is wrong with it is said before anybody is dialled."""

import asyncio
import socket
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node import relay_host
from headway.daemon.node.config import read_node_config
from headway.daemon.node.identity import read_identity
from headway.daemon.node.settings import NodeConfig
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import NEWEST


def test_a_certificate_has_to_bear_the_nodes_name(tmp_path: Path) -> None:
    """That of node-a serves node-a, also in capitals, and no other node: the line has both names and what to do."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a", hosts=["10.0.0.7"])
    read_identity(NodeConfig(name="node-a", certificates=folder))
    read_identity(NodeConfig(name="Node-A", certificates=folder))
    with pytest.raises(ConfigError) as caught:
        read_identity(NodeConfig(name="node-b", certificates=folder))
    bears = "bears node-a, localhost, 10.0.0.7, 127.0.0.1, ::1, and not this node's name node-b"
    assert str(caught.value) == f"{folder}/cert.pem: {bears}: `headway certs` makes one that does"


def test_a_renamed_machine_is_told_how_its_node_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --name a node is called as its machine; after a renaming the line has the option that it needs."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a", hosts=["10.0.0.7"])
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    with pytest.raises(ConfigError, match=r"not this node's name renamed: .*, or --name node-a keeps the node"):
        read_identity(read_node_config(environment={}, flags={"certificates": folder}))


def test_renewals_in_a_copied_state_folder_are_another_nodes(tmp_path: Path) -> None:
    """node-b begins with a copy of node-a's state folder, where a later certificate of node-a lies: its own counts."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    own, foreign = authority.issue("node-b"), authority.issue("node-a")
    config = NodeConfig(name="node-b", certificates=own, state_dir=tmp_path / "state")
    config.renewals_dir.mkdir(parents=True)
    (config.renewals_dir / "1").symlink_to(foreign)
    (config.renewals_dir / NEWEST).symlink_to("1")
    identity, _ = read_identity(config)
    assert identity.now().certificate == (own / "cert.pem").read_bytes()


def test_a_name_in_every_certificate_cannot_name_a_node(tmp_path: Path) -> None:
    """A machine that calls itself localhost needs a configured name."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a")
    with pytest.raises(ConfigError, match="every machine's name"):
        read_identity(NodeConfig(name="localhost", certificates=folder))


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.READER])
async def test_people_run_neither_a_daemon_nor_a_relay(tmp_path: Path, role: Role) -> None:
    """Before anything listens, in one line that names the file, the holder and what is needed."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("ann", role=role)
    with pytest.raises(ConfigError) as daemons:
        read_identity(NodeConfig(name="ann", certificates=folder))
    with pytest.raises(ConfigError) as relays:
        async with asyncio.timeout(5):
            await relay_host._serve(relay_host.RelayConfig(listen="127.0.0.1:0", certificates=folder))
    told = f"{folder}/cert.pem: is of ann ({role}), and {{}} needs a node's: `headway certs` makes one"
    assert str(daemons.value) == told.format("a daemon")
    assert str(relays.value) == told.format("a relay")
