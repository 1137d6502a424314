"""`python asker.py ETCD CERTIFICATES`, inside a machine: answers each line with what etcd says, as a line of JSON."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.daemon.base.errors import StoreError
from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.cluster.format import to_builtins
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.reports.job_report import link_waits


def told(view: ClusterView) -> dict[str, Any]:
    """Return the parts of the view that tests read."""
    return {
        "nodes": {name: to_builtins(node) for name, node in view.nodes.items()},
        "failures": {name: [to_builtins(found) for found in told.values()] for name, told in view.failures.items()},
        "reach": {name: to_builtins(record) for name, record in view.reach.items()},
        "jobs": {
            name: {
                "phase": str(job.phase.phase),
                "reason": job.phase.reason,
                "waits": link_waits(view, job),
                "error": job.phase.error,
                "generation": job.phase.generation,
                "batch": job.progress.batch if job.progress is not None else -1,
                "plan": [stage.node for stage in job.plan.workers] if job.plan is not None else [],
                "next": [stage.node for stage in job.next.workers] if job.next is not None else [],
            }
            for name, job in view.jobs.items()
        },
    }


async def main() -> None:
    """Run until the standard input ends."""
    address = find_cluster(etcd=sys.argv[1], certs=Path(sys.argv[2]), environment={})
    async with ClusterSession(address) as session:
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(json.dumps(told(await _view(session))) + "\n")
            sys.stdout.flush()


async def _view(session: ClusterSession) -> ClusterView:
    """Ask until etcd answers: on a busy machine it may be late. The test has the deadline."""
    while True:
        with suppress(StoreError):
            return await session.view()


asyncio.run(main())
