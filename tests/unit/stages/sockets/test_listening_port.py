"""Which port a server listens at when one of them was taken for a moment."""

from typing import Any, cast

import pytest

from headway.stages.errors import NotListeningError
from headway.stages.sockets import shared_port
from headway.stages.sockets.shared_port import listen_at_first_free


class Server:
    """gRPC's, which cannot listen at some ports."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused

    def add_secure_port(self, address: str, _credentials: object) -> int:
        port = int(address.rpartition(":")[2])
        if port in self.refused:
            raise RuntimeError(f"failed to bind to {address}")
        return port


def listen(server: Server) -> int:
    return listen_at_first_free(cast(Any, server), lambda: cast(Any, None), "127.0.0.1", (7100, 7101))


def test_a_port_that_came_free_in_between_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain socket finds nothing wrong with it: the next port is tried, and the reason told if none is left."""
    monkeypatch.setattr(shared_port, "_problem", lambda *_: None)
    assert listen(Server(7100)) == 7101
    with pytest.raises(NotListeningError, match=r"failed to bind to 127\.0\.0\.1:7101"):
        listen(Server(7100, 7101))
