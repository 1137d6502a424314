"""Decides about jobs: the coordinator's one table, its conditions and its actions, and the division of devices."""
