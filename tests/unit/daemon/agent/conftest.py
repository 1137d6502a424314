"""Fixtures of the tests of agents."""

from pathlib import Path

import pytest

from tests.rigs.agent_scene import Scene, make_scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """An agent of node a, whose one worker trains job j."""
    return make_scene(tmp_path)
