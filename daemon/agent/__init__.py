"""A node's part in plans: finds the steps that are due, takes them, measures, and cleans up."""
