"""A node's work on plans: finds the due steps, and does them."""
