"""The history of a run: its events and their writer."""
