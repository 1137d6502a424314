"""Headway from Python: what the commands do to a cluster, as functions, and what `--json` prints, as types.

    import headway

    with headway.Client() as cluster:          # as the commands find it; or etcd=…, certs=…
        cluster.submit("my-job.toml")
        for report in cluster.watch("my-job"):
            print(report.batch, report.loss)

Importing the package loads nothing else of it: each name is loaded when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.client import *  # noqa: F403

__version__: str
"""Release of Headway."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("headway")
    if name.startswith("__"):
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    client = import_module("headway.client")
    if name in client.__all__:
        return getattr(client, name)
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *import_module("headway.client").__all__]
