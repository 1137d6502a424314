"""The oracle: the recurrence of the pipeline in one plain loop."""
