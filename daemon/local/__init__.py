"""Clusters on one machine: `up`, `run` and `demo`."""
