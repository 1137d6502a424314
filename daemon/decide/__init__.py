"""Decides about jobs: the cluster as a view, what is known of one job, the table, its conditions and actions."""
