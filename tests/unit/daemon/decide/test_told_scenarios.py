"""Scenarios of the coordinator as text: `>` begins what happens, `#` how long it took; other lines are decisions.

HEADWAY_WRITE=1 writes the decisions again; read the difference before you commit it. `_act` has the words. What leads
to `trained`, a job that has trained so many batches on its nodes, is not told.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.cluster.cluster_records import NodeFailureRecord, SharesRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Desired,
    Failure,
    Phase,
    PhaseRecord,
    PlanRecord,
    StopRecord,
)
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.recovery import lose, workers
from tests.rigs.simulated_cluster import KILLED, SimulatedCluster, small_spec
from tests.rigs.simulated_node import Worker

FILES = sorted(Path(__file__).parent.glob("*.scenarios"))
WISHES = {"pause": Desired.PAUSED, "resume": Desired.RUNNING, "cancel": Desired.CANCELLED}


def scenarios(path: Path) -> list[str]:
    """The scenarios of a file; an empty line ends one, and the first line of each says what it shows."""
    return [text for text in path.read_text().strip().split("\n\n") if text]


def name_of(scenario: str) -> str:
    """The first line's words, as the name of a test."""
    return re.sub(r"\W+", "_", scenario.partition("\n")[0].lower()).strip("_")


CASES = [pytest.param(path, text, id=name_of(text)) for path in FILES for text in scenarios(path)]


@pytest.mark.parametrize(("path", "scenario"), CASES)
def test_a_scenario_is_decided_as_it_is_told(path: Path, scenario: str) -> None:
    told = "\n".join(_play(scenario))
    if os.environ.get("HEADWAY_WRITE"):
        path.write_text(path.read_text().replace(scenario, told))
        scenario = told
    assert told.splitlines() == scenario.splitlines()


def _play(scenario: str) -> Iterator[str]:
    cluster, seen, before = SimulatedCluster(), 0, dict[str, str]()
    for line in scenario.splitlines():
        if line.startswith("#"):
            yield line
        if not line.startswith(">"):
            continue
        began, does = cluster.now, line.partition(" #")[0]
        _act(cluster, *does[1:].split())
        yield f"{does} # {cluster.now - began:g} s" if does.startswith("> until") else does
        for change in cluster.store.history[seen:] if not does.startswith("> trained") else ():
            told = _decided(change.key, change.value)
            if told and before.get(change.key) != told:
                yield f"  {told}"
            before[change.key] = told
        seen = len(cluster.store.history)


def _act(cluster: SimulatedCluster, what: str, *told: str) -> None:
    words = [word for word in told if "=" not in word]
    options = {key: _value(value) for key, _, value in (word.partition("=") for word in told if "=" in word)}
    match what, words:
        case "nodes", names:
            for name in names:
                cluster.add_node(name, **options)
        case "trained", [number, *names]:
            _act(cluster, "nodes", *names)
            _act(cluster, "submit", "first", *(word for word in told if "=" in word))
            _act(cluster, "until", "first", "running")
            cluster.calm(max_rounds=3)
            cluster.calm(until=lambda: all(worker.applied >= int(number) for worker in workers(cluster)))
            cluster.calm(max_rounds=2)
        case "submit", [name, *user]:
            settings = {"snapshot_every": 4, "checkpoint_every": 12, "checkpoints_kept": 2}
            fault = FaultSpec(**{key: options.pop(key, usual) for key, usual in settings.items()})
            priority, compiles = options.pop("priority", 0), options.pop("compile", False)
            spec = small_spec(name, fault=fault, **({"batches": 200} | options)).with_priority(priority)
            cluster.submit(replace(spec, train=replace(spec.train, compile=compiles)), user="".join(user))
        case "quarantine", [number]:
            cluster.quarantine_after = int(number)
        case "slice", [seconds]:
            cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(slice_s=float(seconds)))})
        case "until", [job, phase]:
            cluster.calm(until=lambda: cluster.phase(job).phase is Phase(phase), max_rounds=4000)
        case "seconds", [seconds]:
            step_s = options.get("step_s", 0.5)
            cluster.calm(max_rounds=int(float(seconds) / step_s), step_s=step_s)
        case (("pause" | "resume" | "cancel"), [job]):
            cluster.want(job, WISHES[what])
        case "lose", [name]:
            lose(cluster, name)
        case "flap", [name, times]:
            for _ in range(int(times)):
                cluster.add_node(name)
                cluster.calm(max_rounds=3)
                lose(cluster, name)
                cluster.calm(max_rounds=3)
        case (("drain" | "lapse" | "replace"), [name]):
            {"drain": cluster.drain, "lapse": cluster.lapse, "replace": cluster.replace_worker}[what](name)
        case "kill", [name]:
            cluster.fail_worker(name, **options)
        case "fail", [name, *error]:
            cluster.fail_worker(name, f"worker-0\n{' '.join(error)}", fault=" ".join(error))
        case "reports", [name, generation, *error]:
            cluster.nodes[name].workers[0].failure = int(generation), Failure(" ".join(error))
        case (("hang" | "recover"), [name]):
            cluster.nodes[name].workers[0].hangs = what == "hang"
        case "say", [name]:
            cluster.say(name, **options)
        case "has-no-port", [name]:  # its process died before it had heard of any plan, and no other one starts
            cluster.nodes[name].workers[0].is_down = True
            cluster.say(name, down_devices=(0,), worker_trouble="each port is in use")
        case "has-a-port", [name]:
            cluster.nodes[name].workers[0].is_down = False
            cluster.say(name, down_devices=(), worker_trouble="")
        case "dies-preparing", [name]:  # the leader first sees that the device is down, then why
            successor, node = cluster.facts().jobs["first"].next, cluster.nodes[name]
            assert successor is not None
            failure = (successor.generation, Failure(KILLED))
            node.workers[0] = Worker(f"{name}/next", failure=failure, failed_job="first", is_down=True)
            cluster.say(name, down_devices=(0,))
        case "look", []:  # before its next step, each node's
            cluster.deliver(cluster.nodes[cluster.leader])
            cluster.lead()
        case "act", [number]:  # while no leader looks
            for _ in range(int(number)):
                for node in cluster.nodes.values():
                    cluster.deliver(node)
                    cluster.act(node)
        case "block", [source, target]:
            cluster.blocked.add((source, target))
        case "heal", []:
            cluster.blocked.clear()
        case "lacks", [name, storage]:
            cluster.nodes[name].lacks = {storage}
        case "reads-again", storage:  # and says so at once, though its workers hang, if it is named
            for node in cluster.nodes.values():
                node.lacks.clear()
                cluster.deliver(node)
                for ailment in list(node.record.ailments) if storage else ():
                    cluster._reads(node, storage[0], ailment)
        case "forget-files", []:
            for node in cluster.nodes.values():
                node.held.clear()
        case "damage-checkpoint", [job]:
            checkpoint = cluster.facts().jobs[job].checkpoint
            assert checkpoint is not None
            cluster.damaged |= {checkpoint.url, *(checkpoint.earlier if options.get("every") else ())}
        case _:
            raise ValueError(f"unknown: {what} {' '.join(told)}")


def _value(told: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(told)
    return told


def _decided(key: str, value: bytes | None) -> str:
    """What a change of a record says of a decision; empty, if the leader did not write it."""
    job, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
    if value is None:
        return ""
    if key.startswith(Keys.FAILURES):
        return f"node {key.split('/')[-2]} is charged: {decode(value, NodeFailureRecord).text}"
    match leaf if key.startswith(Keys.JOBS) else "":
        case "phase":
            phase = decode(value, PhaseRecord)
            failures = f" [failed {phase.failures.num_deaths}×]" if phase.failures.num_deaths else ""
            return f"{job} {phase.phase}{failures}: {phase.reason}" if phase.reason != "submitted" else ""
        case "next":
            return f"{job} next: {_plan(decode(value, PlanRecord))}"
        case "stop":
            stop = decode(value, StopRecord)
            return f"{job} stop: {stop.save}" + (f" before batch {stop.boundary}" if stop.boundary is not None else "")
        case "checkpoint":
            checkpoint = decode(value, CheckpointRecord)
            kept = [int(url.rpartition("-")[2]) for url in checkpoint.earlier]
            return f"{job} checkpoint: batch {checkpoint.boundary} of timeline {checkpoint.timeline}, earlier {kept}"
    return ""


def _plan(plan: PlanRecord) -> str:
    parts = [f"{part.node}/{part.device_index} {len(part.layers)} layers" for part in plan.workers]
    past = f" after {list(plan.ancestry)}" if plan.ancestry else ""
    source = f"{plan.source} {plan.boundary} of timeline {plan.source_timeline}"
    return f"{plan.generation}: {', '.join(parts)}; from {source}, timeline {plan.timeline}{past}"
