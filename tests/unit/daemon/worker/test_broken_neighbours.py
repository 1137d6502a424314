"""Which neighbours a worker's heartbeat names as broken: positions in the plan alone."""

import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.worker import neighbours
from headway.daemon.worker.neighbours import Neighbours


def test_a_link_that_no_position_is_known_of_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat is written while links are opened."""
    monkeypatch.setattr(neighbours, "GrpcLink", SimpleNamespace)
    found = Neighbours(cast(Any, None), cast(Any, None), queue.SimpleQueue())
    found._links = [cast(Any, SimpleNamespace(peer=name, broken_at=1.0, is_over=False)) for name in ("b", "c")]
    found._positions = {"b": 1}
    assert found.broken == [1]
