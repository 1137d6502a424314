"""Wire formats and their generated stubs (`make proto`)."""
