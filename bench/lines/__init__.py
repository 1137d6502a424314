"""Emulated lines between two sites, and what benches run over them."""
