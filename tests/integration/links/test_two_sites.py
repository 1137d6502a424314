"""Two sites with a long line between them: what it loses is counted, and a job gives the same bits."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent.probing import sent_segments

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benches' emulated line and worker processes."""
    if not BENCH.is_dir():
        pytest.skip("the benches are in a checkout only")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    files = {"wan": "wan", "line": "lines.wan_line", "namespaces": "lines.wan_namespaces"}
    yield SimpleNamespace(**{name: importlib.import_module(file) for name, file in files.items()})
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and BENCH in Path(str(sys.modules[name].__file__)).parents:
            del sys.modules[name]


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
def test_two_sites_give_the_bits_of_one(bench: Any) -> None:
    """Real compute, 2bw, over 60 ms with jitter and with a cut of a second and a half in the middle, deeper than on
    one site: every loss of every batch is bit for bit that of one site."""
    if not bench.namespaces.is_possible():
        pytest.skip("needs root and /dev/net/tun")
    wan = bench.wan
    with wan.Processes(2) as near, wan.sites() as far:
        of_one = _losses(wan, near, depths=(2, 1))
        far.wan.set(bench.line.Line(round_trip_ms=60, mbit_s=200, jitter_ms=10))
        cut = threading.Timer(0.8, far.wan.cut, args=(1.5,))
        cut.start()
        of_two = _losses(wan, far.processes, depths=(6, 1))
        cut.join()
    assert len(of_one) == 16
    assert all(loss > 0 for loss in of_one)
    assert of_two == of_one
    assert len(set(of_one)) > 12


def _losses(wan: Any, processes: Any, *, depths: tuple[int, int]) -> list[float]:
    run = wan.WanRun(
        job=processes.new_name(),
        model=wan.MODEL,
        train=wan.TrainSpec(schedule="2bw", batches=16, microbatches=4, microbatch_size=1, sequence_length=32),
        optim=wan.OptimSpec(),
        cuts=wan.cut(wan.layer_names(wan.MODEL), 2),
        depths=depths,
    )
    found: list[float] = processes.run(run, number=2)[1].stage.losses
    return found
