"""Optimizers that make one step of delay cost nothing. Depends on torch alone."""
