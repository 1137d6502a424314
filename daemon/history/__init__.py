"""What happened, as lines of a history: the events and their writer."""
