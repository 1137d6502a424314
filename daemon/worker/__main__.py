"""`python -m headway.daemon.worker`: the process that computes one stage on one device. Started by the supervisor.

The main thread goes from goal to goal; a loop thread talks to the daemon and to neighbouring stages. The process
ends by an error, by its goal, or with its daemon: the kernel kills it when its parent dies, and it ends itself when its
stream to the daemon ends.
"""

import faulthandler
import os
import signal
import sys
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import msgspec

from headway.daemon.base.own_process import EXIT_ORPHANED, die_with_parent
from headway.daemon.worker.process import SPARE_INDEX, WorkerOptions, leave_error

EXIT_STUCK = 76
"""Exit code when a link's process group could not be ended otherwise."""


def work(options: WorkerOptions) -> None:
    """Do the work."""
    # torch takes seconds to import, so the kernel must know our parent before that
    import structlog

    from headway.daemon.base.addresses import bracketed, read_ports
    from headway.daemon.base.fault_points import arm, register_action
    from headway.daemon.base.logging import configure_logs
    from headway.daemon.cluster.records import PROTOCOL_VERSION
    from headway.daemon.worker.control import WorkerControl
    from headway.daemon.worker.device import WorkerDevice, warm_up
    from headway.daemon.worker.goal import Hello
    from headway.daemon.worker.neighbours import WorkerInbox
    from headway.daemon.worker.out_of_memory import CUDA_FAULT, refuse_memory
    from headway.daemon.worker.stage_records import StageRecords, WorkerOutput
    from headway.daemon.worker.stage_worker import StageWorker
    from headway.stages.links.collective.endpoint import CollectiveEndpoint
    from headway.stages.links.collective.nccl_settings import outlive_peers
    from headway.stages.links.endpoint import ANY_PORT, LinkEndpoint
    from headway.stages.links.loop_thread import LoopThread
    from headway.stages.links.streams import LocalPlace
    from headway.stages.sockets.open_files import raise_open_file_limit
    from headway.stages.sockets.shared_port import dial_within
    from headway.stages.sockets.tls_identity import RenewableIdentity
    from headway.stages.stage.allocator import keep_freed_memory

    configure_logs("info", "auto", node=options.node)
    arm()
    structlog.contextvars.bind_contextvars(worker=f"{options.device_kind}:spare", pid=os.getpid())
    log = structlog.get_logger()

    def end(reason: str) -> None:
        """End the process, because the daemon is gone, at any point of the main thread."""
        try:
            log.warning("daemon_lost", reason=reason)
        finally:
            os._exit(EXIT_ORPHANED)

    def end_stuck(peer: str) -> None:
        """End the process, because a process group holds its threads or the device: only the process's end
        frees them.
        """
        try:
            log.error("link_stuck", peer=peer)
        finally:
            os._exit(EXIT_STUCK)

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
    incarnation = uuid.uuid4().hex
    inbox = WorkerInbox()
    loop = LoopThread("headway-worker-loop", on_failure=inbox.put)
    loop.start()
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
    collective = CollectiveEndpoint(
        loop=loop,
        identity=identity,
        host=options.host,
        incarnation=incarnation,
        protocol=PROTOCOL_VERSION,
        on_stuck=end_stuck,
    )
    for name, answer in collective.methods.items():
        endpoint.add_method(name, answer)
    endpoint.start()

    def cut_links(seconds: float) -> None:
        endpoint.cut(timedelta(seconds=seconds))
        collective.cut()

    register_action("cut_links", cut_links)
    register_action(CUDA_FAULT, refuse_memory)
    register_action("deafen_links", lambda seconds: endpoint.deafen(timedelta(seconds=seconds)))
    output = WorkerOutput()
    records = StageRecords(
        Path(options.history_dir) if options.history_dir else None, node=options.node, incarnation=incarnation
    )
    worker = StageWorker(
        inbox=inbox, endpoint=endpoint, collective=collective, device=device, output=output, records=records
    )
    control = WorkerControl(
        loop, Path(options.socket_path), inbox=inbox, heartbeat=worker.heartbeat, recent=records.recent, on_end=end
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


def main() -> None:
    """Run the process."""
    die_with_parent()
    # A terminal's Ctrl-C and a batch system's SIGTERM reach all processes, and only the daemon decides. Compilers,
    # which the worker may start, would inherit that a signal is ignored, and could not be ended by SIGTERM any more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    faulthandler.enable()
    try:
        work(msgspec.json.decode(sys.argv[1], type=WorkerOptions))
    except Exception as error:
        leave_error(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: threads inside a process group would crash the interpreter's end


if __name__ == "__main__":
    main()
