"""Shapes answers for people: a job, its goodput, its safety, the nodes, the live view."""
