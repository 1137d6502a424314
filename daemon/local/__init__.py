"""Clusters on one machine: `up`, `run`, `demo`, faults on purpose, and the reference."""
