"""Breaks a cluster on purpose, reproducibly, and says whether it held."""
