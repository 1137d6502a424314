"""Answers RPCs of other daemons and of the command line, and Prometheus."""
