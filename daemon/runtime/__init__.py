"""Runs a daemon's activities, restarts them after errors, and writes their log."""
