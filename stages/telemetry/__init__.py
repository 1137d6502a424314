"""What a worker records of itself: operations, seconds, times of layers."""
