"""The oracle: the same recurrence in one plain loop."""
