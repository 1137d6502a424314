"""What a stage does next, and how long a pipeline takes that way. Pure."""
