"""What `make gpu` measures on a card. `python -m gpu`, with bench/ on the path, is the command."""
