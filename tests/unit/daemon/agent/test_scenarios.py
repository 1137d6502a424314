"""A node's next steps, scenario by scenario: tests/rigs/agent_scenarios.py says how to read and to renew the file."""

from pathlib import Path

import pytest

from tests.rigs.agent_scenarios import played, scenarios

SCENARIOS = dict(scenarios(Path(__file__).with_name("scenarios.txt").read_text()))


@pytest.mark.parametrize("title", SCENARIOS, ids=lambda title: title.replace(" ", "_"))
def test_steps_are_those_of_the_scenario(title: str) -> None:
    """What is there → what the node does."""
    assert played(SCENARIOS[title]) == SCENARIOS[title]
