"""The results of a run: the model folder, the metrics, a sample."""
