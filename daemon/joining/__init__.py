"""How a new machine gets its certificate: tokens, invitations, and the port that needs no certificate."""
