"""Says which sources a job's rows come from, and in which shares. Pure."""

from headway.daemon.jobs.job import DataSpec


def shares_text(data: DataSpec) -> str:
    """Return `75 % /data/chats, 25 % /data/code`; empty: there is one source."""
    total = sum(data.weights)
    return ", ".join(f"{100 * each.weight / total:.3g} % {each.source}" for each in data.sources)
