"""What a run leaves: the model folder, the metrics, a sample."""
