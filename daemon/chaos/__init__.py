"""Breaks a cluster on purpose, and checks by its history whether it held."""
