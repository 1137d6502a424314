"""Decides for the whole cluster: the view of the cluster, the coordinator's one table, the leader that runs it."""
