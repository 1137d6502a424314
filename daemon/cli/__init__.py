"""The commands, each a thin wrapper that imports its work when it runs."""
