"""Scenarios of an agent: what is there, line by line, and what its node does next.

A scenario begins with `## title`. Each line changes what is there. The lines with `>` are the steps that are due then;
`> nothing` is none. Parts are letters: e embed, 0 and 1 the blocks, h head, j journal, c what an export carries over.
`1@5` is boundary 5 of timeline 1. `python -m tests.rigs.agent_scenarios FILE` writes the `>` lines anew.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import Delete, Fetch, GiveUp, OpenData, ProveLink, Register, SetGoal, Step, Upload
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Failure,
    Phase,
    PhaseRecord,
    PlanRecord,
    Save,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerPart,
    WorkerPort,
    WorkerRecord,
    WorkerState,
    seen_key,
)
from headway.daemon.cluster.state_key import CARRIED_PART, JOURNAL, ORIGIN_PLACE, StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec, OriginPart, OriginSpec, SourceSpec
from headway.daemon.worker.goal import (
    Action,
    Actual,
    Goal,
    JobGeneration,
    Spacing,
    Start,
    WorkerStatus,
    next_action,
)
from headway.stages.spec import AdapterSpec, ModelSpec, TrainSpec
from headway.stages.state.file_digest import FileDigest
from tests.rigs.agent_views import node_record

PARTS = {"e": "embed", "0": "block.0", "1": "block.1", "h": "head", "j": JOURNAL, "c": CARRIED_PART}
LETTERS = {part: letter for letter, part in PARTS.items()}


def parts(letters: str) -> tuple[str, ...]:
    return tuple(PARTS[letter] for letter in letters)


def short(names: Iterable[str]) -> str:
    return "".join(sorted((LETTERS[name] for name in names), key="".join(PARTS).index))


def place_of(text: str) -> tuple[int, int]:
    timeline, _, boundary = text.partition("@")
    return ORIGIN_PLACE if text == "folder" else (int(timeline), int(boundary))


def told_place(timeline: int, boundary: int) -> str:
    return "folder" if (timeline, boundary) == ORIGIN_PLACE else f"{timeline}@{boundary}"


class Scene:
    """Nodes a, b and c, and a job of four layers on timeline 1; our node is a, its data is open, its worker idle."""

    def __init__(self) -> None:
        self.me = "a"
        self.nodes = {name: node_record(name) for name in "abc"}
        self.job: JobView | None = JobView(name="j", submission=SpecRecord(spec=JobSpec(
            job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=2), data=DataSpec(sha256="sha"),
            train=TrainSpec(reduction_groups=4, microbatches=8),
        )))  # fmt: skip
        self.lineage: PlanRecord | None = None
        self.statuses: dict[int, WorkerStatus] = {}
        self.held: dict[StateKey, StoredFile] = {}
        self.known: dict[str, object] = {"data_paths": {"sha": "/data"}}
        self.steady_since: float | None = -1000.0
        self.do_worker()

    # --- What is there: a method for the first word of a line --------------------------------------------------------

    def do_node(self, name: str, *more: str) -> None:
        """Our node; or `node b gone`, `node d new`, `node c port=w-c`, `node a down`."""
        match more:
            case ():
                self.me, self.statuses = name, {}
                self.do_worker()
            case ("gone",):
                del self.nodes[name]
            case ("new",):
                self.nodes[name] = node_record(name)
            case ("down" | "up" as state,):
                self.nodes[name] = replace(self.nodes[name], down_devices=(0,) * (state == "down"))
            case (port,):
                listening = WorkerPort(device_index=0, address=f"{name}:7", incarnation=port.removeprefix("port="))
                self.nodes[name] = replace(self.nodes[name], workers=(listening,))

    def do_plan(self, generation: str, *words: str, leaf: str = "plan") -> None:
        """`plan 2 a:e0 b:1h source=nodes at=5`, also `a.1:e0/01` with a device and groups; `plan none`."""
        options = dict(word.split("=") for word in words if "=" in word)
        workers = []
        for word in words:
            if "=" not in word:
                place, _, what = word.partition(":")
                layers, _, groups = what.partition("/")
                name, _, device = place.partition(".")
                workers.append(WorkerPart(
                    node=name, node_incarnation=f"{name}-{options.get('life', 1)}", device_index=int(device or 0),
                    layers=parts(layers), depth=2, groups=tuple(map(int, groups)),
                ))  # fmt: skip
        assert self.job is not None
        if generation == "none":
            setattr(self.job, leaf, None)
            return
        self.lineage = PlanRecord(
            generation=int(generation),
            timeline=int(options.get("timeline", 1)),
            boundary=int(options.get("at", 0)),
            source=options.get("source", "initial"),
            source_timeline=int(options.get("of", 1)),
            ancestry=tuple(place_of(word) for word in options.get("after", "").split(",") if word),
            workers=tuple(workers),
        )
        setattr(self.job, leaf, self.lineage)

    def do_next(self, *words: str) -> None:
        self.do_plan(*words, leaf="next")

    def do_told(self, which: str, state: str, *words: str) -> None:
        """etcd's record of a worker, `told 2.0 ready`, or of all of a plan: `told 2 ready`."""
        assert self.job is not None
        options = dict(word.split("=") for word in words)
        number, _, position = which.partition(".")
        [plan] = {p.generation: p for p in (self.job.plan, self.job.next) if p and p.generation == int(number)}.values()
        for at in [int(position)] if position else range(len(plan.workers)):
            key = (plan.generation, at)
            self.job.workers.pop(key, None)
            if state != "none":
                self.job.workers[key] = self._record(
                    plan.workers[at].node, state, boundary=options.get("at"), lost_peer=options.get("lost_peer", "-1")
                )

    def do_worker(self, *words: str) -> None:
        """Our worker is up and says this of itself; `worker obeys` takes its goal, `worker died`, `worker replaced`."""
        index = int(words[0]) if words and words[0].isdecimal() else 0
        words = words[1:] if words and words[0].isdecimal() else words
        status = self.statuses.get(index, WorkerStatus(device_index=index))
        match words:
            case ("obeys",):
                goals = {s.device_index: s.goal for s in next_steps(self.view, self.node) if isinstance(s, SetGoal)}
                assert index in goals, "no goal is due"
                status = replace(status, goal=goals[index])
            case ("died",):
                status = status.died(Failure("killed"))
            case ("down",):
                status = WorkerStatus(device_index=index)
            case ("replaced",):
                status = status.attached("w-spare", pid=8, address="a:2")
            case _:
                told = dict(word.split("=") for word in words)
                numbers = {
                    {"started": "generation", "at": "boundary", "damaged": "num_damaged"}.get(key, key): int(value)
                    for key, value in told.items()
                    if key not in ("job", "layers", "journal", "written", "spacing")
                }
                actual = Actual(
                    job=told.get("job", "j" if told else ""),
                    layers=parts(told.get("layers", "")),
                    has_journal="h" in told.get("layers", "") and "journal" not in told,
                    written=tuple(sorted(parts(told.get("written", "")))),
                    spacing=Spacing(*map(int, told["spacing"].split("@"))) if "spacing" in told else Spacing(),
                )
                actual = msgspec.structs.replace(actual, **numbers)
                if actual.chosen is not None:
                    actual = msgspec.structs.replace(actual, stop_at=actual.chosen)
                address, incarnation = f"{self.me}:1", f"w-{self.me}"
                status = replace(status, incarnation=incarnation, pid=7, address=address, actual=actual, has_died=False)
        self.statuses[index] = status

    def do_stop(self, generation: str, save: str, *at: str) -> None:
        assert self.job is not None
        self.job.stop = StopRecord(
            generation=int(generation), save=Save(save), boundary=int(at[0].removeprefix("at=")) if at else None
        )

    def do_files(self, where: str, letters: str, *uid: str) -> None:
        """Files in our store, in place of others of this boundary: `files 1@5 e0`; `none` of them."""
        timeline, boundary = place_of(where)
        self.held = {key: file for key, file in self.held.items() if (key.timeline, key.boundary) != place_of(where)}
        for part in () if letters == "none" else parts(letters):
            self.held[StateKey("j", timeline, boundary, part)] = StoredFile(
                path=Path(f"/s/{part}"), size_bytes=10, checksum=f"sha-{part}", uid="".join(uid)
            )

    def do_state(self, where: str, name: str, letters: str, *words: str) -> None:
        """etcd's record of a node's files: `state 1@5 b hj`, perhaps `lacks` access or of an earlier `life`."""
        assert self.job is not None
        records = dict(self.job.state.get(place_of(where), {}))
        records.pop(name, None)
        if letters != "none":
            files = {part: StateFile(size_bytes=10, checksum=f"sha-{part}") for part in sorted(parts(letters))}
            told = StateRecord(incarnation=f"{name}-{0 if 'life' in words else 1}", generation=0, files=files)
            records[name] = replace(told, lacks_access="lacks" in words)
        self.job.state[place_of(where)] = records

    def do_phase(self, phase: str, *lineage: str) -> None:
        assert self.job is not None
        self.job.phase = PhaseRecord(phase=Phase(phase))
        if lineage and self.lineage is not None:
            self.job.phase = replace(self.job.phase, lineage=self.lineage.lineage)

    def do_checkpoint(self, where: str, letters: str, *origin: str) -> None:
        assert self.job is not None
        timeline, boundary = place_of(where)
        files = {part: FileDigest(size_bytes=10, checksum=f"sha-{part}") for part in parts(letters)}
        self.job.checkpoint = CheckpointRecord(
            timeline=timeline, boundary=boundary, url=f"c/{where}", files=files, origin_job="".join(origin)
        )

    def do_job(self, *words: str) -> None:
        """`job gone`, `job checkpoint_every=40`, `job folder` from a model's folder, `job adapter` beside one."""
        if words == ("gone",):
            self.job = None
            return
        assert self.job is not None
        assert self.job.submission is not None
        spec = self.job.submission.spec
        for word in words:
            key, _, value = word.partition("=")
            match key:
                case "checkpoint_every":
                    spec = replace(spec, fault=FaultSpec(checkpoint_every=int(value)))
                case "folder":
                    found = tuple(
                        OriginPart(name=part, size_bytes=10, checksum=f"sha-{part}") for part in parts("e01hc")
                    )
                    spec = replace(spec, origin=OriginSpec(url="/models/m", job="j", parts=found))
                case "adapter":
                    spec = replace(spec, model=replace(spec.model, adapter=AdapterSpec(rank=2)))
                case "data":
                    sources = tuple(SourceSpec(source=each, sha256=each) for each in value.split(","))
                    spec = replace(spec, data=DataSpec(sha256=value, sources=sources if len(sources) > 1 else ()))
        self.job.submission = replace(self.job.submission, spec=spec)

    def do_data(self, *which: str) -> None:
        self.known["data_paths"] = {} if which == ("none",) else {each: f"/{each}" for each in which}

    def do_steady(self, since: str) -> None:
        """Since when etcd is in sight. It is 100 now."""
        self.steady_since, self.known["now"] = None if since == "none" else float(since), 100.0

    def do_durable(self, where: str, letters: str) -> None:
        self.known["durable"] = {StateKey("j", *place_of(where), part) for part in parts(letters)}

    def do_trouble(self, where: str, letter: str, *words: str) -> None:
        self.known["troubles"] = {StateKey("j", *place_of(where), PARTS[letter]): " ".join(words)}

    def do_proven(self, generation: str, position: str, *processes: str) -> None:
        run_key = JobGeneration("j", int(generation))
        links = (process.split("=") for process in processes)
        self.known["proven"] = {(run_key, int(position), int(other), process) for other, process in links}

    def do_missed(self, generation: str, *boundaries: str) -> None:
        self.known["missed"] = {JobGeneration("j", int(generation)): tuple(map(int, boundaries))}

    def do_saw(self, generation: str, *uid: str) -> None:
        self.known["in_force"] = {seen_key("j", "".join(uid)): int(generation)}

    def do_lacks(self) -> None:
        """Our node has no access to the job's checkpoint folder."""
        self.known["no_access"] = {"j"}

    def _record(self, name: str, state: str, *, boundary: str | None, lost_peer: str) -> WorkerRecord:
        return WorkerRecord(
            node=name, incarnation=f"w-{name}", address=f"{name}:1", pid=7, state=WorkerState(state),
            boundary=int(boundary) if boundary else None, failure=Failure(lost_peer=int(lost_peer)),
        )  # fmt: skip

    # --- What is due --------------------------------------------------------------------------------------------------

    @property
    def view(self) -> ClusterView:
        """The cluster as the node sees it, as a value of its own."""
        job = self.job
        jobs = {} if job is None else {"j": replace(job, state=dict(job.state), workers=dict(job.workers))}
        return ClusterView(jobs=jobs, nodes=dict(self.nodes), steady_since=self.steady_since)

    @property
    def node(self) -> NodeState:
        workers = tuple(self.statuses[index] for index in sorted(self.statuses))
        return NodeState(name=self.me, incarnation=f"{self.me}-1", workers=workers, held=dict(self.held), **self.known)  # type: ignore[arg-type]

    def due(self) -> list[str]:
        """What the node does next, a line for each step; of a goal, what its worker does next by it."""
        found = [self._told(step) for step in next_steps(self.view, self.node)]
        return [f"> {line}" for line in found if line] or ["> nothing"]

    def _told(self, step: Step) -> str:
        match step:
            case OpenData():
                return "open data"
            case SetGoal(index, goal):
                told = _goal(goal, self.statuses[index].actual)
                return f"worker {index}: {told}" if index and told else told
            case ProveLink():
                return f"prove the link to {step.other}: {step.target.worker} at {step.target.address}"
            case Fetch():
                what = "copy" if step.device_index is None else "fetch"
                where = told_place(step.key.timeline, step.key.boundary)
                assert step.expected == FileDigest(size_bytes=10, checksum=f"sha-{step.key.layer}")
                return f"{what} {LETTERS[step.key.layer]} {where} from {','.join(step.holders) or step.checkpoint_url}"
            case Upload():
                return f"upload {LETTERS[step.key.layer]} {told_place(step.key.timeline, step.key.boundary)}"
            case Delete():
                return f"delete {told_place(step.timeline, step.boundary)} {short(step.layers)}"
            case GiveUp():
                return f"give up {step.run_key.generation}: {step.reason}"
            case Register():
                leaves = "+".join(step.rests_on) + ("" if step.is_leased else ", not leased")
                return f"{_record(step)} (by {leaves})"


def _goal(goal: Goal, actual: Actual) -> str:
    match next_action(goal, actual):
        case Action.PREPARE if goal.prepare is not None:
            given = f" with {','.join(goal.prepare.data_paths)}" if goal.prepare.data_paths else ""
            return f"prepare {goal.prepare.plan.generation} as {goal.prepare.position}{given}"
        case Action.START if goal.start is not None:
            return f"start {goal.start.plan.generation} as {goal.start.position}: {'; '.join(_start(goal.start))}"
        case Action.STOP_AT:
            return f"stop at {goal.stop_at}"
        case Action.WRITE:
            return f"write {short(goal.write)}"
        case Action.SPACE_SNAPSHOTS:
            return f"write every {goal.spacing.factor}. snapshot from {goal.spacing.boundary}"
        case None:
            return ""
        case action:
            return action.name.lower().replace("_", " ")


def _start(start: Start) -> Iterator[str]:
    for kind, sources in groupby(start.sources, key=lambda source: source.kind):
        yield f"{kind.name.lower()} {short(source.layer for source in sources)}"
    for side in ("upstream", "downstream", "siblings", "tied"):
        if around := getattr(start.neighbours, side):
            yield f"{side} {','.join(f'{one.position}={one.incarnation}' for one in around)}"
    if start.num_damaged:
        yield f"attempt {start.num_damaged}"
    if not start.takes_snapshots:
        yield "no snapshots"


def _record(step: Register) -> str:
    leaf, *rest = step.key.removeprefix("/headway/jobs/j/").split("/")
    match step.record:
        case None:
            return f"unregister {told_place(*map(int, rest[:2]))}"
        case StateRecord(files=files) as record:
            durable = short(part for part, file in files.items() if file.is_durable)
            more = f", durable {durable}" * bool(durable) + f", trouble {record.trouble}" * bool(record.trouble)
            more += ", lacks access" * record.lacks_access
            return f"register {told_place(*map(int, rest[:2]))} {short(files)}{more}"
        case WorkerRecord() as record:
            at = f" at {record.boundary}" if record.boundary is not None else ""
            proven = f", proven {','.join(record.proven.values())}" * bool(record.proven)
            why = f", {record.failure.text}" * bool(record.failure.text)
            return f"register worker {int(rest[0])}.{int(rest[1])} {record.state}{at}{proven}{why}"
        case StopRecord() as record:
            return f"register {leaf} at {record.boundary}"
        case other:
            raise AssertionError(other)


def scenarios(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield title and lines of each scenario."""
    for block in text.split("\n## ")[1:]:
        title, *lines = block.rstrip().split("\n")
        yield title, lines


def played(lines: list[str]) -> list[str]:
    """Return a scenario's lines with the steps that are due now."""
    scene, found = Scene(), list[str]()
    for number, line in enumerate(lines):
        if not line.startswith(">"):
            found.append(line)
            if line and not line.startswith("#"):
                word, *words = line.split()
                getattr(scene, f"do_{word}")(*words)
        elif not lines[number - 1].startswith(">"):
            found += scene.due()
    return found


def main(path: Path) -> None:
    """Write the steps of a file anew."""
    text = path.read_text()
    blocks = ["\n".join([title, *played(lines)]) for title, lines in scenarios(text)]
    path.write_text("\n\n## ".join([text.split("\n## ")[0].rstrip(), *blocks]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
