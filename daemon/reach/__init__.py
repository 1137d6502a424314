"""Finds out which ports of other nodes this node can reach."""
