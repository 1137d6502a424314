"""Requests of commands to a cluster, `headway plan` and `headway doctor`."""
