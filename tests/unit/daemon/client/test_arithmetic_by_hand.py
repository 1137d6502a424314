"""The arithmetic of `headway plan --explain` for an 8B model on cards, against sums made by hand.

Nothing here comes from the product's cost model: shapes are the model's, bytes and operations are counted from what
docs/numerics.md computes. A bfloat16 job under 2bw with Muon for matrices, AdamW for the rest, and Error Feedback.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.client.preview import PlanPreview, preview
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.plan.cluster_plan import ClusterPlan, StageEstimate

EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
HIDDEN, WIDE, VOCAB, HEADS, KV = 4096, 14336, 128_256, 32, 1024
MATRICES = HIDDEN * HIDDEN + 2 * KV * HIDDEN + HIDDEN * HIDDEN + 3 * WIDE * HIDDEN
"""Parameters of q, k and v, o, and gate, up, down."""
BLOCK = MATRICES + 2 * HIDDEN
TOKENS, MICROBATCHES = 8192, 64
"""Of a microbatch; at 2k context it has four windows, at 8k one."""
CARDS = {  # memory, bfloat16 operations a second
    "h100": (80 * 10**9, 600e12),
    "rtx": (24 * 10**9, 150e12),
    "l40s": (48 * 10**9, 220e12),
}
CASES = [(job, nodes) for job in ("8b-2k", "8b-8k") for nodes in ("8xh100", "mixed-cards")]


def planned(job: str, nodes: str) -> ClusterPlan:
    return previewed(job, nodes).plan


def previewed(job: str, nodes: str, *, counts_memory: bool = False) -> PlanPreview:
    """Where every block is computed again, so that a hand has less to count. counts_memory: the cards' bandwidth."""
    spec = read_job_file(EXAMPLES / f"{job}.toml")[0]
    spec = replace(spec, train=replace(spec.train, recompute="block"))
    text = (EXAMPLES / f"{nodes}.toml").read_text()
    found = parse_nodes(text, nodes)
    records = [
        replace(
            node, devices=tuple(replace(each, memory_gb_s=counts_memory * each.memory_gb_s) for each in node.devices)
        )
        for node in found.records(spec.train)
    ]
    return preview(spec, records, links=found.link_assumptions())[0]


def layers_of(worker: StageEstimate) -> tuple[bool, int, bool]:
    """(has the embedding, number of blocks, has the head)"""
    names = worker.stage.layers
    return "embed" in names, sum(name.startswith("block.") for name in names), "head" in names


@pytest.mark.parametrize(("job", "nodes"), CASES)
def test_memory_is_what_a_hand_counts(job: str, nodes: str) -> None:
    """Parameters × bytes, depth × what a block keeps, 12 bytes a logit; the sum and the reserve fit on each card."""
    plan = planned(job, nodes)
    for worker in plan.estimates:
        has_embed, num_blocks, has_head = layers_of(worker)
        told, depth = worker.memory, worker.stage.depth
        matrices = num_blocks * MATRICES
        rest = num_blocks * 2 * HIDDEN + has_embed * VOCAB * HIDDEN + has_head * (VOCAB * HIDDEN + HIDDEN)
        parameters = matrices + rest
        assert worker.num_parameters == parameters
        assert told.weights == 4 * parameters  # fp32 masters
        assert told.versions == 2 * 2 * parameters  # two in bfloat16
        # Muon: one momentum. AdamW: two moments. Error Feedback keeps the last update of each. All fp32.
        assert told.optimizer == 4 * (matrices + 2 * rest) + 4 * parameters
        # fp32: the sum of the one reduction group, the set that waits for its update. bf16: what one backward returns,
        # without what comes only when more activations have gone, of which a block has its input alone.
        assert told.gradients == (2 * 4 + 2) * parameters - relief(has_embed, num_blocks, has_head)
        # A block keeps its input in bfloat16, and computes the rest again; the embedding keeps its output and two
        # int64 a token, the head the norm's input and output.
        kept = TOKENS * 2 * HIDDEN * (num_blocks + has_embed + 2 * has_head) + has_embed * TOKENS * 16
        assert told.activations == depth * kept
        # The log-softmax of each microbatch in flight, and the gradients of it and of one microbatch's logits, in place
        # of the gradient of the head's own weights, which is made after them.
        assert told.loss == has_head * (TOKENS * VOCAB * 4 * (depth + 2) - 2 * (VOCAB * HIDDEN + HIDDEN))
        # One block's graph: norms' inputs and outputs, q and mix (6 of the hidden width), k and v,
        # four of the MLP's width, in bfloat16; flash keeps one fp32 number a token and head. Without the input above.
        graph = TOKENS * (2 * (6 * HIDDEN + 2 * KV + 4 * WIDE) + 4 * HEADS) - TOKENS * 2 * HIDDEN
        assert told.recomputed == (0 if has_head else graph)
        assert told.feedback == told.beyond == 0
        total = told.weights + told.versions + told.optimizer + told.gradients + told.activations + told.loss
        # AdamW of the embedding: W_b beside the master, and two temporaries. The head's update is less than its loss.
        updating = 12 * VOCAB * HIDDEN if has_embed else 0
        passing = told.recomputed + (told.loss - depth * TOKENS * VOCAB * 4 if has_head else 0)
        passing -= relief(has_embed, num_blocks, has_head)
        assert told.update == max(0, updating - 2 * parameters - passing)
        assert worker.device_bytes == total + told.recomputed + told.update
        memory = CARDS[worker.stage.node][0]
        assert worker.device_reserve_bytes == 2**30 + memory // 25
        assert worker.device_bytes + worker.device_reserve_bytes <= memory
        assert worker.device_limit_bytes == memory - worker.device_reserve_bytes


@pytest.mark.parametrize("job", ["8b-2k", "8b-8k"])
def test_a_machine_keeps_what_a_hand_counts(job: str) -> None:
    """On eight H100 of one machine: three states in files and one pinned, each of fp32 masters, the older version in
    bfloat16, fp32 moments and fp32 Error Feedback. 434 GiB, where the parts of seven cards hold 1,629: one stays free.
    """
    matrices, rest = 32 * MATRICES, 32 * 2 * HIDDEN + 2 * VOCAB * HIDDEN + HIDDEN
    state = (4 + 2 + 4 + 4) * matrices + (4 + 2 + 8 + 4) * rest
    workers = planned(job, "8xh100").estimates
    assert len(workers) == 7
    for worker in workers:
        assert worker.host_bytes == (3 + 1) * state
        assert worker.host_limit_bytes == 7 * 250 * 10**9


def relief(has_embed: bool, num_blocks: int, has_head: bool) -> int:
    """Bytes of a microbatch's activations and gradients that are never there at once: what comes before the fullest
    moment and is gone, and what comes after it.
    """
    own = TOKENS * 2 * HIDDEN
    if has_head:
        # The loss is the fullest moment. The gradients of all blocks, and of the embedding, come later.
        return 2 * (num_blocks * BLOCK + has_embed * VOCAB * HIDDEN)
    # The first block is it: the inputs of the later ones are gone. The embedding's gradient comes later.
    return (num_blocks - 1) * own + has_embed * 2 * VOCAB * HIDDEN


@pytest.mark.parametrize("nodes", ["nodes", "8xh100"])
def test_the_parts_of_replicas_and_groups_make_up_the_sum(nodes: str) -> None:
    """A job with four reduction groups, on stages of one worker and of two: nothing is left over or missing."""
    plan = planned("large", nodes)
    for worker in plan.estimates:
        told = worker.memory
        parts = told.weights + told.versions + told.optimizer + told.gradients + told.activations + told.loss
        assert worker.device_bytes == parts + told.recomputed + told.update + told.shares + told.feedback
        assert told.beyond == 0
        assert told.gradients > 3 * 4 * worker.num_parameters


@pytest.mark.parametrize(("job", "nodes"), CASES)
def test_every_parameter_has_one_worker(job: str, nodes: str) -> None:
    """8,030,261,248: the model card of Llama 3 8B, whose shapes these are."""
    plan = planned(job, nodes)
    assert sum(worker.num_parameters for worker in plan.estimates) == 8_030_261_248
    assert sum(layers_of(worker)[1] for worker in plan.estimates) == 32
    assert sum(worker.memory.weights for worker in plan.estimates) == 4 * 8_030_261_248


@pytest.mark.parametrize(("job", "nodes"), CASES)
def test_seconds_are_what_a_hand_counts(job: str, nodes: str) -> None:
    """Two operations a multiply-add, backward twice forward, and a block's forward once more as it is recomputed."""
    plan = planned(job, nodes)
    context = {"8b-2k": 2048, "8b-8k": 8192}[job]
    for worker in plan.estimates:
        has_embed, num_blocks, has_head = layers_of(worker)
        told = worker.seconds
        # q kᵀ and the mix: 2 · 2 · context · hidden for each token, without regard to the mask.
        block = 4 * TOKENS * (2 * MATRICES + 4 * context * HIDDEN)
        head = 3 * TOKENS * (2 * (VOCAB * HIDDEN) + 10 * VOCAB)
        flops = num_blocks * block + has_head * head + has_embed * 3 * TOKENS * 2 * HIDDEN
        assert told.flops == pytest.approx(flops, rel=1e-4)
        rate = CARDS[worker.stage.node][1]
        assert told.flops_per_s == pytest.approx(rate)
        assert told.microbatch_s == pytest.approx(flops / rate, rel=1e-4)
        assert told.num_microbatches == MICROBATCHES
        # Newton–Schulz in bfloat16: five steps of X Xᵀ, A² and B X on the shorter side.
        shapes = [(HIDDEN, HIDDEN)] * 2 + [(KV, HIDDEN)] * 2 + [(HIDDEN, WIDE)] * 3
        products = sum(5 * (2 * 2 * short * short * long + 2 * short**3) for short, long in shapes)
        assert told.update_s >= num_blocks * products / rate
        assert worker.batch_seconds == pytest.approx(MICROBATCHES * told.microbatch_s + told.update_s)
    assert plan.predicted_batch_seconds == pytest.approx(max(worker.batch_seconds for worker in plan.estimates))
    # All cards together, at their rates, with no loss anywhere: no plan is faster, and none is twice as slow.
    rates = {"8xh100": 8 * 600e12, "mixed-cards": 2 * 600e12 + 4 * 150e12 + 2 * 220e12}[nodes]
    whole = sum(worker.seconds.flops for worker in plan.estimates)
    assert 1.0 <= plan.predicted_batch_seconds / (MICROBATCHES * whole / rates) <= 2.0


def test_seconds_of_memory_are_what_a_hand_counts() -> None:
    """What a block keeps is read or written 5.3 times, and twice more as it is recomputed. Each weight is read twice,
    each gradient written, and read and written with its fp32 sum. A logit is made fp32 and a log-softmax, forward and
    backward.
    """
    plan = previewed("8b-8k", "8xh100", counts_memory=True).plan
    for worker in plan.estimates:
        has_embed, num_blocks, has_head = layers_of(worker)
        hidden, kept = 2 * TOKENS * HIDDEN, TOKENS * (2 * (6 * HIDDEN + 2 * KV + 4 * WIDE) + 4 * HEADS)
        block = 5.3 * kept + 2 * (kept - hidden) + 16 * BLOCK
        of_logits = TOKENS * VOCAB * (2 * (8 + 6) + 8)
        head = 2 * 5.3 * hidden + of_logits + 16 * VOCAB * HIDDEN
        moved = num_blocks * block + has_head * head + has_embed * (5.3 * hidden + 16 * VOCAB * HIDDEN)
        seconds = worker.seconds.flops / CARDS["h100"][1] + moved / 2.8e12
        assert worker.seconds.microbatch_s == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(("job", "nodes"), CASES)
def test_a_stage_keeps_as_many_microbatches_as_it_has_stages_behind(job: str, nodes: str) -> None:
    """At least that many are in flight, or it would wait; the last stage has one."""
    workers = planned(job, nodes).workers
    depths = [worker.depth for worker in workers]
    assert depths[-1] == 1
    assert all(depth >= len(workers) - index for index, depth in enumerate(depths))


def test_the_tables_say_what_was_counted() -> None:
    """GiB of each part in one row for each worker, a legend, seconds in another table."""
    told = previewed("8b-8k", "8xh100")
    lines, first = told.arithmetic_for(None), told.plan.estimates[0]
    rows = [line.split() for line in lines if line.startswith("0  ")]
    assert rows[0][3] == f"{first.num_parameters / 1e9:.3f}"
    assert rows[0][5] == f"{first.memory.weights / 2**30:.2f}"
    assert rows[0][-3:] == [
        f"{number / 2**30:.2f}" for number in (first.device_bytes, first.device_limit_bytes, first.device_reserve_bytes)
    ]
    assert rows[1][3:6] == [f"{first.seconds.flops / 1e12:.4g}", "600", f"{first.seconds.microbatch_s:.4g}"]
    assert not any("feedback" in line for line in lines), "no link is coded"
    assert any(line.startswith("optimizer    momentum") for line in lines)
    assert told.tokens_per_second == pytest.approx(MICROBATCHES * TOKENS / told.plan.predicted_batch_seconds)
