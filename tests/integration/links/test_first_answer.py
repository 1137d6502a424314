"""A link may take to open as long as the neighbour answers that it is not ready, and not much longer."""

import queue
import socket
from datetime import timedelta

import pytest

from headway.stages.links.link import Frame
from tests.integration.links.conftest import Endpoints
from tests.rigs.grpc_link import Inbox, accept, dial, lost, total

SHORT = timedelta(seconds=1.0)


def test_a_neighbour_that_says_nothing_was_unreached(endpoints: Endpoints) -> None:
    """A listener without TLS stands for any port that swallows what it is told."""
    inbox: Inbox = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dial(endpoints[1], silent.getsockname()[1], "silent", inbox, timeout=SHORT)
        found = lost(inbox)
    assert found.was_unreached
    assert "not connected within 1 s" in found.reason


def test_a_neighbour_that_refuses_was_reached(endpoints: Endpoints) -> None:
    """Another process has its port by now: that is no fact about two machines."""
    inbox: Inbox = queue.SimpleQueue()
    dial(endpoints[1], endpoints[2].port, "refused", inbox, peer_incarnation="who was here before")
    assert not lost(inbox).was_unreached


def test_a_neighbour_that_is_not_ready_is_waited_for(endpoints: Endpoints) -> None:
    """It answers `not yet` for longer than a silent one would be waited for, then accepts: the link is not lost."""
    inbox: Inbox = queue.SimpleQueue()
    heard: Inbox = queue.SimpleQueue()
    link = dial(endpoints[1], endpoints[2].port, "slow", inbox, first_contact=SHORT)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=2.5 * SHORT.total_seconds())
    accepted = accept(endpoints[2], "slow", heard)
    link.send(total())
    assert isinstance(heard.get(timeout=20), Frame)
    assert inbox.empty()
    link.close()
    accepted.close()
