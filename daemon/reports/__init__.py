"""How answers look: a job, its goodput, its safety, the nodes, the live view."""
