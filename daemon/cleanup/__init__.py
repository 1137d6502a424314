"""Deletes unused files of a node once a day."""
