"""The events of a run as lines on disk: written by daemons and workers, read back, checked against the rules."""
