"""Who decides, and what: the view of the cluster, the coordinator's one table, the leader that runs it."""
