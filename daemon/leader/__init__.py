"""The leader's shell: runs the coordinator, writes its decisions, computes plans, sweeps checkpoint folders."""
