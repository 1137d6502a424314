"""What a worker process does: it opens its device and its ends of links, attaches to its daemon, and serves."""

import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import structlog

from headway.daemon.base.addresses import bracketed, read_ports
from headway.daemon.base.fault_points import arm, register_action
from headway.daemon.base.logging import configure_logs
from headway.daemon.base.own_process import EXIT_ORPHANED
from headway.daemon.cluster.records import PROTOCOL_VERSION
from headway.daemon.worker.control import WorkerControl
from headway.daemon.worker.device import WorkerDevice, warm_up
from headway.daemon.worker.goal import Hello
from headway.daemon.worker.neighbours import WorkerInbox
from headway.daemon.worker.out_of_memory import CUDA_FAULT, refuse_memory
from headway.daemon.worker.process import SPARE_INDEX, WorkerOptions
from headway.daemon.worker.stage_records import StageRecords, WorkerOutput
from headway.daemon.worker.stage_worker import StageWorker
from headway.stages.links.endpoint import ANY_PORT, LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.nccl import outlive_peers
from headway.stages.links.streams import LocalPlace
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.shared_port import dial_within
from headway.stages.sockets.tls_identity import RenewableIdentity
from headway.stages.stage.allocator import keep_freed_memory

EXIT_STUCK = 76
"""Exit code when the attachment of a link could not be ended otherwise."""

log = structlog.get_logger()


def work(options: WorkerOptions) -> None:
    """Do the work of a worker until a goal ends the process, or its daemon is gone."""
    configure_logs("info", "auto", node=options.node)
    arm()
    structlog.contextvars.bind_contextvars(worker=f"{options.device_kind}:spare", pid=os.getpid())
    raise_open_file_limit()
    keep_freed_memory()
    outlive_peers(os.environ)
    # Before a device is touched: a spare does this once and is then ready in milliseconds.
    warm_up()
    device = WorkerDevice(
        options.device_kind, is_to_be_measured=options.is_to_be_measured, num_sharers=options.num_sharers
    )
    if options.device_index != SPARE_INDEX:
        device.claim(options.device_index)
    incarnation, inbox = uuid.uuid4().hex, WorkerInbox()
    loop = LoopThread("headway-worker-loop", on_failure=inbox.put)
    loop.start()
    endpoint = _open_links(options, loop, incarnation)
    records = StageRecords(
        Path(options.history_dir) if options.history_dir else None, node=options.node, incarnation=incarnation
    )
    worker = StageWorker(
        inbox=inbox,
        endpoint=endpoint,
        # An attachment holds its threads or the device: only the process's end frees them.
        on_stuck=lambda peer: _end(EXIT_STUCK, "link_stuck", peer=peer),
        device=device,
        output=WorkerOutput(),
        records=records,
    )
    control = WorkerControl(
        loop,
        Path(options.socket_path),
        inbox=inbox,
        heartbeat=worker.heartbeat,
        recent=records.recent,
        on_end=lambda reason: _end(EXIT_ORPHANED, "daemon_lost", reason=reason),
    )
    control.attach(
        Hello(
            protocol=PROTOCOL_VERSION,
            incarnation=incarnation,
            pid=os.getpid(),
            link_port=endpoint.port,
            device_index=options.device_index,
        )
    )
    log.info("worker_attached", socket=options.socket_path, link_port=endpoint.port)
    worker.serve(control)
    log.info("worker_quit")
    endpoint.stop()
    os._exit(0)  # the loop's stream to the daemon is still open, so nothing can be torn down


def _open_links(options: WorkerOptions, loop: LoopThread, incarnation: str) -> LinkEndpoint:
    """Return what opens the process's links, and listens from now on."""
    identity = RenewableIdentity(Path(options.certificates), Path(options.renewals))
    if options.inner_port:
        dial_within(options.shared_port, options.inner_port)
    endpoint = LinkEndpoint(
        loop=loop,
        identity=identity,
        host=bracketed(options.host),
        ports=read_ports(options.ports, "worker_ports") if options.ports else ANY_PORT,
        incarnation=incarnation,
        protocol=PROTOCOL_VERSION,
        local=LocalPlace(options.node, Path(options.socket_path).parent),
        is_behind_shared_port=bool(options.shared_port),
    )
    endpoint.start()

    actions: dict[str, Callable[[float], None]] = {
        "cut_links": lambda seconds: endpoint.cut(timedelta(seconds=seconds)),
        "deafen_links": lambda seconds: endpoint.deafen(timedelta(seconds=seconds)),
        CUDA_FAULT: refuse_memory,
    }
    for fault, action in actions.items():
        register_action(fault, action)
    return endpoint


def _end(status: int, event: str, **fields: str) -> None:
    """End the process, at any point of the main thread."""
    try:
        log.warning(event, **fields)
    finally:
        os._exit(status)
