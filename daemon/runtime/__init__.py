"""How a daemon's activities run, restart after errors and write their log."""
