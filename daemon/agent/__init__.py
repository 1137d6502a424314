"""What a node does about the plans: which steps are due, and doing them."""
