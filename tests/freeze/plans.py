"""Plans of 500 seeded jobs on seeded clusters, with their predicted seconds.

A new planner may find other plans. `python -m tests.freeze.plans old.json` evaluates the recorded plans by the present
cost model: the present plan fits whenever the recorded one did, and takes at most 1.01 times as long.
"""

import json
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from headway.daemon.cluster.records import Device, NodeRecord, WorkerPart
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.planner import PlanRefused, make_plan
from headway.daemon.plan.predicted_time import predict
from headway.stages.spec import ModelSpec, TrainSpec

NUM_QUESTIONS = 500
WORSE = 1.01


def question(seed: int) -> tuple[JobSpec, tuple[NodeRecord, ...]]:
    """A job and a cluster; every third cluster has little memory, every tenth has many nodes."""
    chance = random.Random(seed)
    hidden = chance.choice((256, 512, 1024, 2048))
    model = ModelSpec(
        num_hidden_layers=chance.choice((3, 6, 8, 12, 20, 30)),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        vocab_size=chance.choice((512, 8192, 32000)),
        tie_word_embeddings=chance.random() < 0.1,
    )
    train = TrainSpec(
        schedule=chance.choice(("2bw", "2bw", "2bw", "1f1b", "gpipe")),
        microbatches=(m := chance.choice((4, 8, 16, 32, 64))),
        microbatch_size=chance.choice((1, 4)),
        sequence_length=chance.choice((128, 512, 1024)),
        dtype=chance.choice(("float32", "bfloat16")),
        recompute=chance.choice(("none", "auto", "auto", "block")),
        reduction_groups=chance.choice((1, 1, 2, min(m, 8))),
        attention_backend="math",
        wire=chance.choice(("none", "none", "bf16")),
    )
    num_nodes = chance.choice((16, 24, 48)) if seed % 10 == 0 else chance.choice((1, 2, 3, 3, 4, 5, 6, 8))
    num_sites = chance.choice((1, 1, 2, 3))
    blocks = model.num_hidden_layers * 5 * hidden * hidden * 4
    whole = 22 * (blocks // 2 + 2 * model.vocab_size * hidden) * chance.uniform(1.5, 6.0)
    tight = round(whole / max(1, num_nodes)) if seed % 3 == 0 else 0
    kinds = [(chance.uniform(0.5, 8.0), chance.choice((0.7, 1.0, 1.5))) for _ in range(chance.choice((1, 2, 4)))]
    nodes = []
    for index in range(num_nodes):
        speed, room = chance.choice(kinds)
        name, kind = f"n{index}", "cuda" if chance.random() < 0.1 else "cpu"
        device = Device(kind=kind, speed=speed, memory_bytes=round(tight * room))
        count = chance.choice((1, 1, 1, 2))
        nodes.append(
            NodeRecord(
                name=name,
                incarnation=f"{name}-1",
                address="",
                host=name,
                site=f"site-{chance.randrange(num_sites)}",
                devices=tuple(replace(device, index=number) for number in range(count)),
                memory_bytes=0,
                arithmetic_class=kind,
            )
        )
    placement = PlacementSpec(min_nodes=chance.choice((1, 1, 1, 2)), max_nodes=chance.choice((0, 0, 0, 4)))
    return JobSpec(job=JobSection(name="frozen"), model=model, train=train, placement=placement), tuple(nodes)


def answered(seed: int) -> dict[str, object]:
    """The plan of a question: its workers and seconds, or why there is none."""
    spec, nodes = question(seed)
    plan = make_plan(spec, nodes)
    if isinstance(plan, PlanRefused):
        return {"refused": plan.reason}
    return {"seconds": plan.predicted_batch_seconds, "stages": [asdict(stage) for stage in plan.workers]}


def record() -> dict[str, str]:
    """Question to the JSON of its plan."""
    return {str(seed): json.dumps(answered(seed)) for seed in range(NUM_QUESTIONS)}


def main(path: str) -> int:
    """Print how the present plans compare with recorded ones; 1 where one is worse, or missing."""
    old = json.loads(Path(path).read_text())
    worse, factors, took = [], [], []
    for seed in range(NUM_QUESTIONS):
        before = json.loads(old[f"plans/{seed}"])
        spec, nodes = question(seed)
        began = time.perf_counter()
        plan = make_plan(spec, nodes)
        took.append(time.perf_counter() - began)
        if "stages" not in before:
            continue
        if isinstance(plan, PlanRefused):
            worse.append(f"{seed}: refused now: {plan.reason}")
            continue
        stages = [
            WorkerPart(**{**stage, "layers": tuple(stage["layers"]), "groups": tuple(stage["groups"])})
            for stage in before["stages"]
        ]
        present = predict(spec, plan.workers, nodes)
        past = predict(spec, stages, nodes)
        assert present is not None
        assert past is not None
        factors.append(present / past)
        if present > past * WORSE:
            worse.append(f"{seed}: {present / past:.4f} of before, {len(nodes)} nodes, {spec.train.schedule}")
    mean = sum(factors) / len(factors)
    sys.stdout.write("\n".join([*worse, f"{len(factors)} plans, {len(worse)} worse, mean factor {mean:.4f}", ""]))
    sys.stdout.write(f"seconds a plan: mean {sum(took) / len(took):.3f}, most {max(took):.2f}\n")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
