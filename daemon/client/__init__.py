"""Requests of commands to a cluster: each finds it, asks it, and returns the answer."""
