"""Injects faults into a cluster, and checks by its history whether it held."""
