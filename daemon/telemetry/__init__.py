"""Measures and reports for a node: goodput, layer times, progress, the ways to other nodes."""
