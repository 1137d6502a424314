"""What ships for Prometheus, tried on the real one: the names, every query of the dashboard, every alert.

Two alerts fire by a real fault in a real cluster: a daemon is killed, and etcd stands still. For all of them promtool
reads the same rules over series that are written down here.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import JOB, Program
from tests.rigs.scrapes import PAGE, families, told_in

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "systemd/prometheus"
RULES = SHIPPED / "headway.rules.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="no Prometheus here; `make prometheus` says how to get it",
)
OF_CARDS = "headway_device_peak_bytes"
"""Has samples only where a worker computes on a card."""
MINUTES = 800
"""Length of the written series; the longest alert waits for 12 hours."""
NOW = f"0+60x{MINUTES}"
RUNNING = ('headway_job_phase{job="a",phase="running"}', f"1x{MINUTES}")

QUIET = {
    'up{job="headway",instance="n"}': f"1x{MINUTES}",
    'headway_leader{node="n"}': f"1x{MINUTES}",
    'headway_node_state{node="n",state="ready"}': f"1x{MINUTES}",
    'headway_node_ailments{node="n"}': f"0x{MINUTES}",
    RUNNING[0]: RUNNING[1],
    'headway_job_last_batch_timestamp_seconds{job="a"}': NOW,
    'headway_job_phase_timestamp_seconds{job="a"}': f"60x{MINUTES}",
    'headway_job_phase{job="starts",phase="preparing"}': f"1x{MINUTES}",
    'headway_job_phase_timestamp_seconds{job="starts"}': NOW,
    'headway_job_batches{job="starts"}': f"9x{MINUTES}",
    'headway_job_predicted_batch_seconds{job="a"}': f"1x{MINUTES}",
    'headway_job_batches{job="a"}': f"9x{MINUTES}",
    'headway_job_checkpoint_timestamp_seconds{job="a"}': NOW,
    'headway_job_troubles{job="a"}': f"0x{MINUTES}",
    'headway_goodput_seconds_total{job="a",class="useful"}': NOW,
    'headway_goodput_seconds_total{job="a",class="waiting"}': NOW,
    'headway_certificate_expiry_timestamp_seconds{node="n",certificate="node"}': f"9999999x{MINUTES}",
    'headway_etcd_reachable{node="n"}': f"1x{MINUTES}",
    'headway_unreadable_keys{node="n"}': f"0x{MINUTES}",
    'headway_clock_timestamp_seconds{node="n"}': NOW,
    'headway_disk_free_bytes{node="n",folder="state"}': f"50x{MINUTES}",
    'headway_disk_size_bytes{node="n",folder="state"}': f"100x{MINUTES}",
}
"""A healthy cluster, minute by minute from 1970 on: no alert fires."""

FAULTS: dict[str, tuple[str, str]] = {
    "HeadwayDaemonAway": ('up{job="headway",instance="n"}', "0"),
    "HeadwayNobodyLeads": ('headway_leader{node="n"}', "0"),
    "HeadwayNodeQuarantined": ('headway_node_state{node="n",state="quarantined"}', "1"),
    "HeadwayNodeAils": ('headway_node_ailments{node="n"}', "2"),
    "HeadwayJobNotMoving": ('headway_job_phase_timestamp_seconds{job="starts"}', "60"),
    "HeadwayJobFailed": ('headway_job_phase{job="a",phase="failed"}', "1"),
    "HeadwayCheckpointTooOld": ('headway_job_checkpoint_timestamp_seconds{job="a"}', "60"),
    "HeadwayBoundariesNotWritten": ('headway_job_troubles{job="a"}', "1"),
    "HeadwayJobQueuedLong": ('headway_job_queued_timestamp_seconds{job="b"}', "60"),
    "HeadwayGoodputLow": ('headway_goodput_seconds_total{job="a",class="useful"}', "60"),
    "HeadwayCertificateEnds": ('headway_certificate_expiry_timestamp_seconds{node="n",certificate="node"}', "60"),
    "HeadwayEtcdUnreachable": ('headway_etcd_reachable{node="n"}', "0"),
    "HeadwayRecordsSetAside": ('headway_unreadable_keys{node="n"}', "1"),
    "HeadwayClockSkew": ('headway_clock_timestamp_seconds{node="n"}', "60"),
    "HeadwayDiskNearlyFull": ('headway_disk_free_bytes{node="n",folder="state"}', "3"),
}
"""Alert to the one series that differs, and its value in all minutes."""


def promtool(*arguments: str, told: str = "") -> str:
    """Return what promtool prints; it must be content."""
    asked = subprocess.run([str(PROMTOOL), *arguments], input=told, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    return asked.stdout + asked.stderr


def alert_case(series: dict[str, str], firing: list[str]) -> dict[str, Any]:
    """Return a case of promtool: these series, and the alerts that fire at the end."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    query = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{MINUTES}m"}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [query | {"exp_samples": expected}],
    }


def test_every_alert_fires_for_its_fault_alone(tmp_path: Path) -> None:
    """A healthy cluster is silent; with one series changed, the alert of that fault fires and no other."""
    assert set(FAULTS) == set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    cases = [alert_case(QUIET, [])]
    cases += [alert_case(QUIET | {name: f"{value}x{MINUTES}"}, [alert]) for alert, (name, value) in FAULTS.items()]
    (tmp_path / "cases.yml").write_text(json.dumps({"rule_files": [str(RULES)], "tests": cases}))  # YAML has JSON in it
    promtool("test", "rules", str(tmp_path / "cases.yml"))
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(SHIPPED / "prometheus.yml"))


class Prometheus:
    """A Prometheus that scrapes once a second by the shipped files, with alerts that wait for nothing."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        folder.mkdir()
        config = (SHIPPED / "prometheus.yml").read_text().replace("15s", "1s")
        (folder / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{config}")
        (folder / "headway.rules.yml").write_text(re.sub(r"for: \w+", "for: 0s", RULES.read_text()))
        (folder / "headway-nodes.json").write_text(json.dumps([{"targets": targets}]))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        options = {"config.file": "prometheus.yml", "storage.tsdb.path": "data", "web.listen-address": self._address}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [str(PROMETHEUS), *(f"--{name}={value}" for name, value in options.items())], cwd=folder, stderr=log
            )

    def ask(self, path: str, **arguments: str) -> Any:
        """Return the data of an answer of its API; None: it is not up yet."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        except OSError:
            return None

    def samples(self, query: str) -> list[Any]:
        """Return the samples of an instant query."""
        answer = self.ask("query", query=query)
        return answer["result"] if answer else []

    def fired(self) -> set[str]:
        """Return the alerts that have fired so far."""
        return {each["metric"]["alertname"] for each in self.samples('last_over_time(ALERTS{alertstate="firing"}[1h])')}

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(30)


@pytest.fixture
def scraped(program: Program, tmp_path: Path) -> Iterator[tuple[Program, Prometheus, list[str]]]:
    """Two nodes that train a job with held-out text while another one waits, and a Prometheus that scrapes them."""
    rows = (json.dumps({"text": f"document {number} " + "abc def " * 40}) for number in range(60))
    (program.folder / "text.jsonl").write_text("\n".join(rows))
    prepare = ("text.jsonl", "--tokenizer", "bytes", "--validation", "0.2", "--out", "shards")
    assert program.run("data", "prepare", *prepare)[0] == 0
    for name, more in (("runs", 2), ("waits", 4)):
        told = JOB.format(name=name, data=program.folder / "shards", batches=1_000_000, min_nodes=more)
        told = told.replace("batches = 1000000", "batches = 1000000\neval_every = 50")
        (program.folder / f"{name}.toml").write_text(f"{told}[fault]\ncheckpoint_every = 100\n")
    (program.folder / "bin").mkdir()
    cards = program.folder / "bin/nvidia-smi"
    cards.write_text("#!/bin/sh\necho '0, 1024, 81559, 37'\n")
    cards.chmod(0o755)
    path = f"{cards.parent}:{os.environ['PATH']}"
    up = program.up("--nodes", "2", variables={"HEADWAY_METRICS_LISTEN": "127.0.0.1:0", "PATH": path})
    assert up.stdout is not None
    targets: list[str] = []
    while len(targets) < 2:
        targets += re.findall(r"http://([\d.:]+)/metrics", up.stdout.readline())
    prometheus = Prometheus(tmp_path / "prometheus", targets)
    try:
        for name in ("runs", "waits"):
            assert program.run("submit", f"{name}.toml")[0] == 0
        yield program, prometheus, targets
    finally:
        prometheus.stop()


def dashboard() -> dict[str, Any]:
    """The dashboard as it ships."""
    found: dict[str, Any] = json.loads((SHIPPED / "grafana-dashboard.json").read_text())
    return found


def queries() -> list[str]:
    """Every query of the dashboard, with its variables filled in as Grafana does it for `All`."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    filled = [query.replace("$__rate_interval", "10s").replace("$job", ".+").replace("$node", ".+") for query in found]
    return [query for query in filled if OF_CARDS not in query]


def test_every_query_of_the_dashboard_returns_data_and_real_faults_fire(
    scraped: tuple[Program, Prometheus, list[str]], wait_until: Callable[..., None]
) -> None:
    """While a job trains and another waits: promtool finds no fault in the metrics, docs/monitoring.md lists their
    names, each query has data; then a daemon is killed and etcd stands still, and the alerts for both fire."""
    program, prometheus, targets = scraped
    missing: list[str] = []

    def has_all() -> bool:
        missing[:] = [query for query in queries() if not prometheus.samples(query)]
        return not missing

    wait_until(lambda: prometheus.ask("query", query="up") is not None, "Prometheus is up")
    try:
        wait_until(has_all, "every query has data", within_s=90)
    except AssertionError:
        pytest.fail(f"no data for {missing}")
    for variable in dashboard()["templating"]["list"][1:]:
        metric, label = re.findall(r"\w+", variable["query"]["query"].removeprefix("label_values"))
        assert prometheus.ask(f"label/{label}/values", **{"match[]": metric})
    assert prometheus.fired() <= {"HeadwayNobodyLeads"}, "while all is well; before the first election nobody leads"

    told = {
        target: urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode() for target in targets
    }
    for text in told.values():
        promtool("check", "metrics", told=text)
    names = {name for text in told.values() for name in families(text)}
    assert names == set(told_in(PAGE.read_text()))

    os.kill(program.pids("headway.daemon.cli.main daemon")[0], signal.SIGKILL)
    wait_until(lambda: "HeadwayDaemonAway" in prometheus.fired(), "the loss of a daemon is told")
    (etcd,) = program.pids("etcd --name")
    os.kill(etcd, signal.SIGSTOP)
    try:
        wait_until(lambda: "HeadwayEtcdUnreachable" in prometheus.fired(), "etcd's silence is told")
    finally:
        os.kill(etcd, signal.SIGCONT)
