"""Decides what a stage does next, and simulates how long a pipeline takes. Pure."""
