"""A node's workers: the daemon's side (`supervisor.py`, `goal.py`) and the process (`__main__.py`)."""
