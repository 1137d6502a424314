"""The one queue of everything that reaches a worker's main thread. `StageWorker` takes each item, in or
between runs.
"""

from queue import SimpleQueue

from headway.proto.control_pb2 import Order
from headway.stages.device.run_events import DeviceDone
from headway.stages.links.link import Frame, LinkLost
from headway.stages.state.snapshot_writer import SnapshotEnded

WorkerItem = Order | Frame | LinkLost | DeviceDone | SnapshotEnded | BaseException
"""An item from the daemon, the links, the device or the snapshot writer; an exception is another thread's failure."""

WorkerInbox = SimpleQueue[WorkerItem]
