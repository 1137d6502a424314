"""A node's part in plans: finds the steps that are due, and carries them out."""
