"""Jobs that begin with checkpoints of others: real clusters, driven by the command line alone."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Delete
from tests.rigs.file_server import serving

HEAD = """\
[model]
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{data}"
"""
FAULT = """\
[fault]
snapshot_every = 5
checkpoint_every = 10
checkpoints_kept = 100
checkpoint_dir = "{kept}"
"""
TRAIN = "[train]\nepochs = {epochs}\nmicrobatches = 4\nmicrobatch_size = 2\nsequence_length = 16\n"
OPTIM = "[optim]\nwarmup_batches = 2\nlr_floor = 0.1\n"
IN_EPOCH_2 = (40, 50)
"""An epoch has 32 batches."""


@pytest.mark.slow
def test_a_job_continued_in_its_second_epoch_and_beyond_its_schedule_has_the_reference_bits(
    program: Any, data: Path
) -> None:
    """Three epochs; twice another job begins in the middle of epoch 2, the second time in a new cluster.

    A fourth epoch is asked for: `submit` asks what follows the cosine's end, and then goes on at the floor. All weights
    are those of one plain loop over four epochs.
    """
    head = HEAD.format(data=data) + FAULT.format(kept=program.folder / "kept")

    def job(name: str, epochs: int = 3, optim: str = "", train: str = "") -> str:
        path: Path = program.folder / f"{name}.toml"
        path.write_text(f'[job]\nname = "{name}"\nseed = 3\n{head}{TRAIN.format(epochs=epochs)}{train}{OPTIM}{optim}')
        return str(path)

    def finished(name: str, *arguments: str) -> str:
        """Submit a job, wait for its end, and return the folder of its checkpoints."""
        code, _, err = program.run("submit", job(name), *arguments)
        assert code == 0, err
        assert program.run("watch", name, "--json")[0] == 0
        found = json.loads(program.run("checkpoints", name, "--json")[1])
        return str(Path(found[-1]["url"]).parent)

    def place(folder: str, boundary: int) -> str:
        (found,) = Path(folder).glob(f"*-{boundary:010d}")
        return str(found)

    up = program.up("--nodes", "2")
    first = finished("first")
    second = finished("second", "--from", place(first, IN_EPOCH_2[0]))
    up.kill()
    up.communicate(timeout=30)
    shutil.rmtree(program.folder / ".headway")
    program.up("--nodes", "1")
    third = finished("third", "--from", place(second, IN_EPOCH_2[1]))
    code, _, err = program.run("submit", job("fourth", epochs=4), "--from", third)
    assert code == 2
    assert 'optim.after_end: the cosine schedule of third has ended at batch 96; what follows? Set it: "floor"' in err
    fourth = job("fourth", epochs=4, optim='after_end = "floor"\n')
    code, out, err = program.run("submit", fourth, "--from", third)
    assert code == 0, err
    assert "train.batches 96 → 128" in out
    assert program.run("watch", "fourth", "--json")[0] == 0
    assert program.run("export", "fourth", "--out", "piped")[0] == 0
    first_ones = "sync_batches = 10\n"  # a tenth of three epochs, which each job took over from the one before
    plain = job("plain", epochs=4, optim='after_end = "floor"\nschedule_batches = 96\n', train=first_ones)
    code, _, err = program.run("reference", plain, "--out", "plain")
    assert code == 0, err
    assert_same_weights(program.folder)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own call
def test_adapters_at_a_url_are_continued_through_a_kill_and_from_a_checkpoint(
    program: Any, data: Path, wait_until: Callable[..., None]
) -> None:
    """PEFT's adapters beside a base in 4 bits. A worker dies; another job begins with a checkpoint of the first.

    Both end with the bytes of `headway reference` on the same job file.
    """
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from tests.rigs.tiny_models import write_tiny_model

    base = write_tiny_model(program.folder / "model", model_type="qwen3", head_dim=16)
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(str(program.folder / "given"))
    kept = program.folder / "kept"
    fault = FAULT.format(kept=kept)
    with serving(program.folder) as server:

        def job(name: str) -> str:
            path: Path = program.folder / f"{name}.toml"
            begun = f'[model]\nfrom = "{server.url}/given"\n[adapter]\nquantize = "nf4"\n[data]\nsource = "{data}"\n'
            train = TRAIN.format(epochs=2) + OPTIM
            path.write_text(f'[job]\nname = "{name}"\nseed = 3\n{begun}{fault}{train}[placement]\nmin_nodes = 2\n')
            return str(path)

        def finish(name: str) -> None:
            assert program.run("watch", name, "--json")[0] == 0
            code, _, err = program.run("export", name, "--out", name)
            assert code == 0, err

        code, _, err = program.run("reference", job("plain"), "--out", "plain")
        assert code == 0, err
        program.up("--nodes", "2")
        code, _, err = program.run("submit", job("killed"))
        assert code == 0, err
        wait_until(lambda: any(kept.glob("killed/*/*-0000000010/manifest.json")), "a checkpoint")
        os.kill(min(program.workers()), signal.SIGKILL)
        assert not any(kept.glob("killed/*/*-0000000060/manifest.json")), "the kill came too late"
        finish("killed")
        (place,) = kept.glob("killed/*/*-0000000040")
        code, _, err = program.run("submit", job("taken"), "--from", str(place))
        assert code == 0, err
        finish("taken")
    plain = (program.folder / "plain/model/adapter_model.safetensors").read_bytes()
    for name in ("killed", "taken"):
        assert (program.folder / name / "adapter_model.safetensors").read_bytes() == plain, name


@pytest.mark.slow
def test_damaged_checkpoints_are_set_aside_and_the_one_before_gives_the_reference_bits(
    program: Any, wait_until: Callable[..., None]
) -> None:
    """The whole cluster is killed; a bit flips in a layer of the newest checkpoints, and in the journal before them.

    The next `up` sets both aside by name, says what that costs, and ends with the weights of the reference.
    """
    kept = program.folder / "kept"
    fault = f'[fault]\nsnapshot_every = 10\ncheckpoint_every = 10\ncheckpoints_kept = 9\ncheckpoint_dir = "{kept}"\n'
    job = program.job(batches=500, more=fault)
    up = program.up("--nodes", "2")
    assert program.run("submit", str(job))[0] == 0

    wait_until(lambda: len(list(kept.glob("tiny/*/*/manifest.json"))) >= 5, "five checkpoints")
    up.kill()
    up.communicate(timeout=30)
    # The last manifest may be there before the job's record names it, so all from the third one on are damaged.
    _, _, before, newest, *later = sorted(path.parent for path in kept.glob("tiny/*/*/manifest.json"))
    flip_a_bit(before / "journal.safetensors")
    for folder in (newest, *later):
        flip_a_bit(folder / "block.1.safetensors")
    program.up("--nodes", "2")
    assert program.run("watch", "tiny", "--json")[0] == 0
    events = program.run("events", "tiny")[1]
    for folder, file in ((newest, "block.1"), (before, "journal")):
        assert f"{folder / file}.safetensors: is damaged" in (folder / "set-aside.txt").read_text()
        assert not (folder / "manifest.json").exists()
        assert f"The checkpoint before batch {int(folder.name[-10:])} is damaged" in events
    assert "is set aside; the one before batch" in events
    assert "batches again" in events
    assert program.run("export", "tiny", "--out", "piped")[0] == 0
    assert program.run("reference", str(job), "--out", "plain")[0] == 0
    assert_same_weights(program.folder)
    plain = map(json.loads, (program.folder / "plain" / "metrics.jsonl").read_text().splitlines())
    told = map(json.loads, program.run("history", "tiny", "--json")[1].splitlines()[:-1])
    every_digit = itemgetter("batch", "loss", "learning_rate")
    assert list(map(every_digit, told)) == list(map(every_digit, plain))


@pytest.mark.slow
def test_a_job_that_etcd_has_lost_is_told_with_the_command_that_brings_it_back(
    program: Any, wait_until: Callable[..., None]
) -> None:
    """All keys of jobs are deleted while one trains: `jobs`, `nodes` and `events` say what is lost, and the command.

    The command continues it. A job that a person removed is not told of, and `up` ends with 0.
    """
    kept = program.folder / "kept"
    fault = f'[fault]\nsnapshot_every = 10\ncheckpoint_every = 10\ncheckpoint_dir = "{kept}"\n'
    up = program.up("--nodes", "2")
    assert program.run("submit", str(program.job(name="over", batches=3)))[0] == 0
    assert program.run("watch", "over", "--json")[0] == 0
    assert program.run("jobs", "rm", "over")[0] == 0
    assert program.run("submit", str(program.job(batches=100_000, more=fault)))[0] == 0
    wait_until(lambda: any(int(path.name[-10:]) >= 200 for path in kept.glob("tiny/*/*")), "a later checkpoint")
    asyncio.run(delete_jobs(program.folder / ".headway"))
    wait_until(lambda: "job tiny: etcd has lost it" in program.run("jobs")[2], "the node that misses it")
    assert "lost job tiny: etcd has lost it" in program.run("nodes")[1]
    code, out, err = program.run("events", "tiny")
    assert (code, out) == (2, "")
    assert "over" not in program.run("jobs")[2]
    command = err.split("`")[1]
    assert command.startswith(f"headway submit --from {kept}/tiny/")
    code, out, err = program.run(*command.split()[1:])
    assert code == 0, err
    assert "tiny: submitted from batch" in out
    wait_until(lambda: "etcd has lost it" not in program.run("jobs")[2], "its return")
    up.send_signal(signal.SIGINT)
    assert program.ended(up)[0] == 0


async def delete_jobs(cluster: Path) -> None:
    """Delete all keys below `jobs/`, as a slip of etcdctl does."""
    async with ClusterSession(find_cluster(etcd=None, certs=None, cluster=cluster)) as session:
        await session.client.transaction([], [Delete(Keys.JOBS, is_prefix=True)])


def flip_a_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def assert_same_weights(folder: Path) -> None:
    """The exported model has the files of the plain loop, byte by byte."""
    shards = sorted((folder / "plain" / "model").glob("*.safetensors"))
    assert shards
    for shard in shards:
        assert shard.read_bytes() == (folder / "piped" / shard.name).read_bytes(), shard.name
