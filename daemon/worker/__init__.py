"""The process that computes one stage: `python -m headway.daemon.worker`."""
