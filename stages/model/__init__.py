"""The decoder's layers: arithmetic, initial weights, names, compilation."""
