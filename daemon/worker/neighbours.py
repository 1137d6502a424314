"""A stage's links to the stages before and after it, for one generation."""

import queue
from datetime import timedelta

from headway.daemon.jobs.job import JobSpec
from headway.proto.control_pb2 import Start
from headway.stages.frame_contract import FrameContract
from headway.stages.ids import Generation, StageIndex
from headway.stages.link import Frame, Link, LinkLost
from headway.stages.link_endpoint import LinkEndpoint

FIRST_CONTACT = timedelta(minutes=10)
"""How long a neighbour may load its layers before it answers or dials; the coordinator's own deadline is the sharper.
Only a link that was there once breaks after the job's `link_timeout_s`."""


class Neighbours:
    """Opens and closes the links, and clears away what they have left in the inbox."""

    def __init__(self, endpoint: LinkEndpoint, inbox: "queue.SimpleQueue[object]") -> None:
        self._endpoint = endpoint
        self._inbox = inbox
        self._links: list[Link] = []

    def open(self, start: Start, spec: JobSpec) -> tuple[Link | None, Link | None]:
        """To the neighbours of this generation, after those of the one before are closed and forgotten."""
        self.close()
        stage, job, generation = StageIndex(start.stage.index), start.job_name, Generation(start.generation)
        contract = FrameContract.of(spec.model, spec.train)
        resume_timeout = timedelta(seconds=spec.fault.link_timeout_s)
        upstream: Link | None = None
        downstream: Link | None = None
        if stage > 0:
            upstream = self._endpoint.accept(
                job,
                generation,
                stage=stage,
                peer_incarnation=start.upstream.incarnation,
                inbox=self._inbox,
                contract=contract,
                first_contact=max(FIRST_CONTACT, resume_timeout),
                resume_timeout=resume_timeout,
                address=start.upstream.address,
            )
            self._links.append(upstream)
        if stage + 1 < start.stage.num_stages:
            downstream = self._endpoint.dial(
                start.downstream.address,
                job,
                generation,
                stage=stage,
                peer_incarnation=start.downstream.incarnation,
                inbox=self._inbox,
                contract=contract,
                first_contact=max(FIRST_CONTACT, resume_timeout),
                resume_timeout=resume_timeout,
            )
            self._links.append(downstream)
        return upstream, downstream

    def close(self) -> None:
        """Nothing arrives from a closed link; what has arrived from it before is of no use to anybody."""
        for link in self._links:
            link.close()
        self._links.clear()
        arrived = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        for item in arrived:
            if not isinstance(item, Frame | LinkLost):
                self._inbox.put(item)
