"""Everything that reaches a worker's main thread, in one queue: `StageWorker` takes each item, run or no run."""

from queue import SimpleQueue

from headway.proto.control_pb2 import Order
from headway.stages.links.link import Frame, LinkLost
from headway.stages.state.snapshot_writer import SnapshotEnded

WorkerItem = Order | Frame | LinkLost | SnapshotEnded | BaseException
"""From the daemon, from the links, from the snapshot writer; an exception is another thread's failure."""

WorkerInbox = SimpleQueue[WorkerItem]
