"""Asks a cluster for people, and shapes its answers."""
