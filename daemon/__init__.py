"""The daemon of a node: coordinator, planner, agent, supervisor, state store, and the command line."""
