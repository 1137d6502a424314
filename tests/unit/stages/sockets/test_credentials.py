"""gRPC is given another certificate once for each renewal: whatever it is given replaces what its threads use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.tls_identity import TlsIdentity, serving


class Renewable:
    """An identity that the test renews."""

    def __init__(self, first: TlsIdentity) -> None:
        self.newest = first

    def now(self) -> TlsIdentity:
        """As of a node."""
        return self.newest


def test_a_handshake_without_a_renewal_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC frees a replaced configuration under the handshakes of its other threads, which ends the process."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    first, second = (TlsIdentity.read(authority.issuing_into(tmp_path / name).issue("n")) for name in ("one", "two"))
    asked: list[Callable[[], Any]] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda _first, newest, **_: asked.append(newest))
    identity = Renewable(first)
    serving(identity)
    assert [asked[0]() for _ in range(3)] == [None] * 3
    identity.newest = second
    assert [asked[0]() is None for _ in range(3)] == [False, True, True]
