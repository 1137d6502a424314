"""One stage at work: the executor, its graph, its sums, its replicas, its snapshots."""
