"""Defines jobs: their content, the reading of their files, and the refusal of invalid ones."""
