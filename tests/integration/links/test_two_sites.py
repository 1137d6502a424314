"""Two sites with a long line between them: the emulated line does what it says, and a job gives the same bits."""

import importlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent.probing import sent_segments

BENCH = Path(__file__).resolve().parents[3] / "bench"
TIMEOUT_S = 20.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benches' emulated line and worker processes."""
    if not BENCH.is_dir():
        pytest.skip("the benches are in a checkout only")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    files = {"wan": "wan", "line": "lines.wan_line", "namespaces": "lines.wan_namespaces", "proxy": "lines.wan_proxy"}
    yield SimpleNamespace(**{name: importlib.import_module(file) for name, file in files.items()})
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and BENCH in Path(str(sys.modules[name].__file__)).parents:
            del sys.modules[name]


class Echo:
    """A server that sends back what it hears."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.port = server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(end,), daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        with end, suppress(OSError):
            while data := end.recv(1 << 16):
                end.sendall(data)


@pytest.fixture(params=["proxy", "namespaces"])
def kind(request: pytest.FixtureRequest, bench: Any) -> str:
    """Return the kind of emulator."""
    if request.param == "namespaces" and not bench.namespaces.is_possible():
        pytest.skip("needs root and /dev/net/tun")
    return str(request.param)


@pytest.fixture
def line_to_echo(bench: Any, kind: str) -> Iterator[tuple[Any, socket.socket]]:
    """The emulator, and a connection over it to an echo."""
    with ExitStack() as stack:
        if kind == "proxy":
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            wan = stack.enter_context(bench.proxy.ProxyWan(Echo(server).port))
            end = socket.create_connection(("127.0.0.1", wan.port), timeout=TIMEOUT_S)
        else:
            wan = stack.enter_context(bench.namespaces.NamespacesWan())
            here, there = wan.namespaces
            address = bench.namespaces.ADDRESSES[1]
            server = bench.namespaces.in_namespace(there, lambda: socket.create_server((address, 0)))
            port = Echo(stack.enter_context(server)).port
            end = bench.namespaces.in_namespace(
                here, lambda: socket.create_connection((address, port), timeout=TIMEOUT_S)
            )
        stack.enter_context(end)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield wan, end


def there_and_back(end: socket.socket, num_bytes: int) -> float:
    """Seconds until so many bytes are back, unchanged."""
    sent = bytes(index % 251 for index in range(min(num_bytes, 1 << 16))) * max(1, num_bytes >> 16)
    began, received = time.perf_counter(), bytearray()
    threading.Thread(target=end.sendall, args=(sent,), daemon=True).start()
    while len(received) < len(sent):
        data = end.recv(1 << 16)
        assert data, "the connection ended"
        received += data
    assert bytes(received) == sent
    return time.perf_counter() - began


def test_a_line_delays_and_carries_what_it_says(bench: Any, line_to_echo: tuple[Any, socket.socket]) -> None:
    """80 ms and 40 Mbit/s: one byte is back after 80 ms, two megabytes after 0.42 s more at the soonest."""
    wan, end = line_to_echo
    wan.set(bench.line.Line(round_trip_ms=80, mbit_s=40))
    there_and_back(end, 1)
    assert 0.08 <= there_and_back(end, 1) < 0.5
    assert there_and_back(end, 2 << 20) >= 0.08 + (2 << 20) * 8 / 40e6


def test_a_cut_ends_with_a_retransmission(line_to_echo: tuple[Any, socket.socket]) -> None:
    """What is sent in a cut of one second arrives with TCP's next retransmission after it; then all is as before."""
    wan, end = line_to_echo
    there_and_back(end, 1)
    wan.cut(1.0)
    assert 1.0 <= there_and_back(end, 1) < 4.0
    assert there_and_back(end, 1) < 1.0


def test_loss_sets_a_ceiling(bench: Any) -> None:
    """0.1 % of segments at 100 ms: about 4.5 Mbit/s for one connection, whatever the line; n connections n times."""
    line = bench.line.Line(round_trip_ms=100, mbit_s=100, loss=1e-3)
    assert line.connection_bytes_per_s * 8 / 1e6 == pytest.approx(4.49, abs=0.01)
    way, streams = bench.line.Way(line), [bench.line.Stream() for _ in range(4)]
    ends = [way.put(1 << 20, 0.0, stream) for stream in streams]
    assert max(ends) < 2.2


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_what_a_line_loses_is_counted(bench: Any, loss: float) -> None:
    """Two megabytes in pieces that fill no queue: of some 1500 packets about every hundredth, or none, went twice."""
    if not bench.namespaces.is_possible():
        pytest.skip("needs root and /dev/net/tun")
    with bench.namespaces.NamespacesWan(mtu=bench.namespaces.PLAIN_MTU) as wan:
        near, far = bench.namespaces.connected(wan)
        with near, far:
            wan.set(bench.line.Line(round_trip_ms=10, mbit_s=100, loss=loss))
            for _ in range(2 * 32):
                near.sendall(bytes(1 << 15))
                left = 1 << 15
                while left:
                    left -= len(far.recv(left))
            sent = sent_segments("ipv4:{}:{}".format(*near.getpeername()))
    assert sent is not None
    assert sent.number >= (2 << 20) / 1448
    assert (sent.num_lost >= 3) == bool(loss)
    assert sent.num_lost < 0.05 * sent.number


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["proxy", pytest.param("namespaces", marks=pytest.mark.slow)], indirect=True)
def test_two_sites_give_the_bits_of_one(bench: Any, kind: str) -> None:
    """Real compute, 2bw, over 60 ms with jitter and with a cut of a second and a half in the middle, deeper than on
    one site: every loss of every batch is bit for bit that of one site."""
    wan = bench.wan
    with wan.Processes(2) as near, wan.sites(kind, near) as far:
        of_one = _losses(wan, near, address="", depths=(2, 1))
        far.wan.set(bench.line.Line(round_trip_ms=60, mbit_s=200, jitter_ms=10))
        cut = threading.Timer(0.8, far.wan.cut, args=(1.5,))
        cut.start()
        of_two = _losses(wan, far.processes, address=far.address, depths=(6, 1))
        cut.join()
    assert len(of_one) == 16
    assert all(loss > 0 for loss in of_one)
    assert of_two == of_one
    assert len(set(of_one)) > 12


def _losses(wan: Any, processes: Any, *, address: str, depths: tuple[int, int]) -> list[float]:
    run = wan.WanRun(
        job=processes.new_name(),
        model=wan.MODEL,
        train=wan.TrainSpec(schedule="2bw", batches=16, microbatches=4, microbatch_size=1, sequence_length=32),
        optim=wan.OptimSpec(),
        cuts=wan.cut(wan.layer_names(wan.MODEL), 2),
        address=address,
        depths=depths,
    )
    found: list[float] = processes.run(run, number=2)[1].stage.losses
    return found
