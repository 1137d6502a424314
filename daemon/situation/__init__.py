"""The coordinator's knowledge about one job: boundaries, losses, deadlines, possible plans."""
