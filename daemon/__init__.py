"""What a node runs: coordinator, planner, agent, supervisor, state store, and the command line."""
