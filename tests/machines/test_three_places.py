"""The short form: three nodes at three places by the deployment page, one port each; the bits are the plain loop's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines.observer import assert_same_bits, nobody_is_blamed
from tests.machines.sites import Sites


@pytest.mark.timeout(300)
def test_a_job_over_three_places(three_sites: Sites, plain: Callable[[Sites, Path], dict[str, bytes]]) -> None:
    """One node is plain, one has a mapped port, one can only dial out: it joins, and trains, through the plain one."""
    assert three_sites.look()["nodes"]["node-c"]["address"].endswith("/node-c~")
    job = three_sites.submit("places", batches=12, min_nodes=3)
    model = three_sites.finished("places")
    assert_same_bits(model, plain(three_sites, job))
    nobody_is_blamed(three_sites)
