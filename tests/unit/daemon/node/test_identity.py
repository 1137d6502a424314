"""A node's own certificate: what is wrong with it is said before anybody is dialled."""

from pathlib import Path

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.node.config import NodeConfig
from headway.daemon.node.identity import read_identity
from headway.daemon.rpc.certificates import CertificateAuthority


def test_a_certificate_has_to_bear_the_nodes_name(tmp_path: Path) -> None:
    """That of node-a serves node-a, also in capitals, and no other node: the line has both names and what to do."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a", hosts=["10.0.0.7"])
    read_identity(NodeConfig(name="node-a", certificates=folder))
    read_identity(NodeConfig(name="Node-A", certificates=folder))
    with pytest.raises(ConfigError) as caught:
        read_identity(NodeConfig(name="node-b", certificates=folder))
    bears = "bears node-a, localhost, 10.0.0.7, 127.0.0.1, ::1, and not this node's name node-b"
    assert str(caught.value) == f"{folder}/cert.pem: {bears}: `headway certs` makes one that does"


def test_a_name_in_every_certificate_cannot_name_a_node(tmp_path: Path) -> None:
    """A machine that calls itself localhost needs a configured name."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a")
    with pytest.raises(ConfigError, match="every machine's name"):
        read_identity(NodeConfig(name="localhost", certificates=folder))
