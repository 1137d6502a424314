"""Beginning a job with a checkpoint, and listing what there is; the cluster is only a view."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headway.daemon.base.errors import ConfigError, DamagedCopyError
from headway.daemon.blobs.checkpoint import copy_part, copy_to_checkpoint, set_aside, write_manifest
from headway.daemon.blobs.checkpoint import read_manifest as read_stored
from headway.daemon.blobs.checkpoint_names import part_name, parts_url
from headway.daemon.client.checkpoint_folder import (
    begin_with,
    changes_of,
    check_files,
    check_fits,
    list_checkpoints,
    read_checkpoint,
)
from headway.daemon.client.submission import read_draft
from headway.daemon.cluster.format import encode, to_builtins
from headway.daemon.cluster.lineage import sealed
from headway.daemon.cluster.records import CheckpointRecord
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.jobs.changed_keys import Changes, changes
from headway.daemon.jobs.data_choices import continued_schedule, with_schedule
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.optim.spec import AfterEnd, GroupSpec
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.state_file import StateHeader, write_state
from tests.rigs.mortal_work import dies_at

SPEC = JobSpec(job=JobSection(name="demo"))
RECORD = CheckpointRecord(
    timeline=1, boundary=40, url="checkpoints/old", files={"embed": FileDigest(size_bytes=10, checksum="y")}
)


def write(folder: Path, boundary: int, *, timeline: int = 1, job: str = "demo", at: float = 0.0, **more: Any) -> Path:
    """A checkpoint of one small file, with its manifest; relative, as a local cluster writes it."""
    place = folder / f"{timeline:08d}-{boundary:010d}"
    place.mkdir(parents=True)
    (place / "embed.safetensors").write_bytes(b"x" * 10)
    files = {"embed": FileDigest(size_bytes=10, checksum="y")}
    record = CheckpointRecord(timeline=timeline, boundary=boundary, url="checkpoints/old", files=files, **more)
    told = {"format": 1, "job": job, "generation": 7, "spec": to_builtins(SPEC), **to_builtins(record)}
    (place / "manifest.json").write_bytes(encode(told))
    if at:
        os.utime(place / "manifest.json", (at, at))
    return place


def test_the_newest_manifest_is_taken_wherever_it_lies(tmp_path: Path) -> None:
    """A job's folder with two submissions gives the last one written; a boundary's folder gives its own."""
    write(tmp_path / "demo" / "first", 90, at=100.0)
    newest = write(tmp_path / "demo" / "second", 40, timeline=3, at=200.0)
    for place in (tmp_path, tmp_path / "demo", newest):
        found = read_checkpoint(str(place))
        assert (found.checkpoint.boundary, found.checkpoint.url, found.generation) == (40, str(newest), 7)
        assert found.spec == SPEC


@pytest.mark.parametrize(
    ("text", "matrices", "rest"),
    [
        ("", ("adamw", 1e-4), ("lion", 2e-4)),
        ("[optim.rest]\nname = 'lion'\nlr = 5e-4\n", ("adamw", 1e-4), ("lion", 5e-4)),
    ],
)
def test_a_job_that_says_nothing_of_an_optimizer_goes_on_with_the_checkpoints(
    text: str, matrices: tuple[str, float], rest: tuple[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is that of the checkpoint, as are the betas; one of which the file names a key is the file's."""
    groups = GroupSpec(name="adamw", lr=1e-4), GroupSpec(name="lion", lr=2e-4)
    optim = replace(SPEC.optim, matrices=groups[0], rest=groups[1], error_feedback=0.0)
    monkeypatch.setattr(sys.modules[__name__], "SPEC", replace(SPEC, optim=optim))
    write(tmp_path / "demo" / "first", 90)
    job = tmp_path / "next.toml"
    job.write_text(f"[job]\nname = 'next'\n[train]\nbatches = 300\n{text}")
    found = read_draft(job, checkpoint=str(tmp_path / "demo"), are_changes_meant=True).spec.optim
    assert [(group.name, group.lr) for group in (found.matrices, found.rest)] == [matrices, rest]
    assert found.error_feedback == 0


def test_a_checkpoint_without_a_manifest_is_incomplete(tmp_path: Path) -> None:
    """The listing says so, and a folder with only such checkpoints is refused in one line."""
    place = write(tmp_path / "demo", 40)
    (place / "manifest.json").unlink()
    (found,) = list_checkpoints(str(tmp_path))
    assert (found.boundary, found.timeline, found.is_complete, found.size_bytes) == (40, 1, False, 10)
    with pytest.raises(ConfigError, match="found no checkpoint"):
        read_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="the folder does not exist"):
        read_checkpoint(str(tmp_path / "nowhere"))


def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Torn JSON, and JSON that is something else."""
    place = write(tmp_path / "demo", 40)
    for text in ('{"job": "de', '{"job": "demo"}', "[]"):
        (place / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a checkpoint's manifest") as refused:
            read_checkpoint(str(tmp_path))
        assert "\n" not in str(refused.value)


def test_a_job_that_breaks_a_rule_is_refused_with_its_checkpoint(tmp_path: Path, headway: Any) -> None:
    """`submit --from` alone: the checkpoint's own job is checked as a file's is; a name that draws is no escape."""
    for number, (spec, line) in enumerate(
        (
            (replace(SPEC, model=replace(SPEC.model, num_attention_heads=0)), "model.num_attention_heads: must be"),
            (replace(SPEC, job=JobSection(name="a\x1b[2J")), "job.name: 'a\\x1b[2J' is not"),
        )
    ):
        place = write(tmp_path / str(number), 4)
        told = {"job": spec.job.name, "generation": 1, "spec": to_builtins(spec), **to_builtins(RECORD)}
        (place / "manifest.json").write_bytes(encode(told))
        code, out, err = headway("submit", "--from", str(place))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert line in err
        assert "\x1b" not in err


def test_a_manifest_with_one_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    """Any bit of any byte: neither `submit --from` nor a daemon takes it. One of an earlier release has no digest."""
    place = write(tmp_path / "demo", 40)
    assert not read_checkpoint(str(place)).is_sealed
    path = place / "manifest.json"
    told = {"job": "demo", "generation": 7, "spec": to_builtins(SPEC), **to_builtins(RECORD)}
    raw = sealed(told)
    path.write_bytes(raw)
    assert read_checkpoint(str(place)).is_sealed
    assert read_stored(str(place)).boundary == 40
    rate = raw.index(b'"lr":0.003') + len('"lr":0.00')
    for position in {*range(0, len(raw), 97), rate, len(raw) - 1, *range(len(raw) - 80, len(raw), 7), 3, 20}:
        altered = bytearray(raw)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        with pytest.raises(ConfigError, match=r"manifest\.json: is not a checkpoint's manifest"):
            read_checkpoint(str(place))
        with pytest.raises(DamagedCopyError, match=r"manifest\.json: is not a checkpoint's manifest"):
            read_stored(str(place))


def test_a_manifest_of_a_later_format_is_refused_by_name(tmp_path: Path) -> None:
    """A release that this one would misread wrote it, whole and sealed: both readers say so."""
    place = write(tmp_path / "demo", 40)
    told = {"job": "demo", "generation": 7, "spec": to_builtins(SPEC), **to_builtins(RECORD)}
    body = sealed(told).replace(b'{"format":1,', b'{"format":2,').rpartition(b',"digest":')[0]
    (place / "manifest.json").write_bytes(body + b',"digest":"' + sha256(body + b"}").hexdigest().encode() + b'"}')
    later = "is not a checkpoint's manifest: a newer release wrote it, in format 2; this one reads up to 1"
    with pytest.raises(ConfigError, match=later):
        read_checkpoint(str(place))
    with pytest.raises(DamagedCopyError, match=later):
        read_stored(str(place))


def test_every_file_is_read_before_a_job_begins_with_it(tmp_path: Path) -> None:
    """One flipped bit, a cut, a missing file: one line with the file, and the checkpoint before."""
    older = write(tmp_path / "demo", 20)
    place = write(tmp_path / "demo", 40)
    layer = place / "embed.safetensors"
    header = StateHeader(job="demo", layer="embed", timeline=1, boundary=40, dtype="float32")
    layer.unlink()
    digest = write_state(layer, {"weight": torch.arange(500, dtype=torch.float32)}, header).digest
    sound = layer.read_bytes()
    manifest = read_checkpoint(str(place))
    manifest = replace(manifest, checkpoint=replace(manifest.checkpoint, files={"embed": digest}))
    check_files(manifest)
    flipped = bytearray(sound)
    flipped[-100] ^= 4
    for content in (bytes(flipped), sound[:-8], None):
        layer.unlink()
        if content is not None:
            layer.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"embed\.safetensors: .*; the one before is {older}$"):
            check_files(manifest)
        layer.touch()


def test_a_kill_at_any_change_of_the_disk_leaves_the_newest_whole_checkpoint_named(tmp_path: Path) -> None:
    """Layers, a part of the journal and the manifest are written; the one before counts until the manifest is there.

    Then the checkpoint is set aside: it never counts again, and another try ends what a kill has cut off.
    """
    layer = tmp_path / "embed"
    header = StateHeader(job="demo", layer="embed", timeline=1, boundary=40, dtype="float32")
    digest = write_state(layer, {"weight": torch.arange(500, dtype=torch.float32)}, header).digest
    record = replace(RECORD, files={"embed": digest, JOURNAL: digest})
    manifest = sealed({"job": "demo", "generation": 7, "spec": to_builtins(SPEC), **to_builtins(record)})

    def write_newest(place: Path) -> None:
        for name in record.files:
            copy_to_checkpoint(layer, str(place), name)
        part = f"{parts_url(str(place))}/{part_name(1, 40)}"
        copy_part(f"{place}/{JOURNAL}.safetensors", part, is_inherited=False)
        write_manifest(str(place), manifest)

    def set_newest_aside(place: Path) -> None:
        set_aside(str(place), "a bit has flipped")

    def named(change: Callable[[Path], None], *before: Callable[[Path], None]) -> Iterator[int]:
        """Yield the boundary that is named after a kill at each change of the disk."""
        for number in count():
            folder = tmp_path / f"{change.__name__}-{number}"
            place = write(folder / "uid", 20, at=100.0).parent / "00000001-0000000040"
            for done in before:
                done(place)
            is_cut_off = dies_at(number, partial(change, place))
            found = read_checkpoint(str(folder))
            if found.checkpoint.boundary == 40:
                check_files(found)
            yield found.checkpoint.boundary
            change(place)
            if change is set_newest_aside:
                set_aside(str(place), "its manifest is gone")
                assert (place / "set-aside.txt").read_text() == "a bit has flipped\n"
                assert [path.name for path in place.glob("*manifest*")] == ["manifest.set-aside.json"]
            if not is_cut_off:
                return

    written, aside = list(named(write_newest)), list(named(set_newest_aside, write_newest))
    assert written == sorted(written)
    assert (written.count(20), written[-1]) == (19, 40)
    assert aside == sorted(aside, reverse=True)
    assert aside[-2:] == [20, 20], "between the file that says why and the new name, it does not count"


def test_a_folder_of_several_jobs_is_ambiguous(tmp_path: Path) -> None:
    """The error names the jobs, so that a person can choose one."""
    write(tmp_path / "demo", 40)
    write(tmp_path / "other", 80, job="other")
    with pytest.raises(ConfigError, match="several jobs: demo, other"):
        read_checkpoint(str(tmp_path))


def test_memory_urls_serve_as_folders_do() -> None:
    """Any fsspec file system: here one in memory."""
    import fsspec

    file_system = fsspec.filesystem("memory")
    record = CheckpointRecord(timeline=1, boundary=40, url="u")
    told = {"job": "demo", "generation": 2, "spec": to_builtins(SPEC), **to_builtins(record)}
    file_system.pipe_file("/bucket/demo/uid/00000001-0000000040/manifest.json", encode(told))
    found = read_checkpoint("memory://bucket/demo")
    assert found.checkpoint.url == "memory://bucket/demo/uid/00000001-0000000040"


def test_another_jobs_checkpoint_names_its_parent_and_takes_over_no_folder(tmp_path: Path) -> None:
    """The job that wrote it is named, so that its folder is not deleted as the new job's own, even by a namesake."""
    write(tmp_path / "demo", 40, earlier=("checkpoints/older",), dropped=("checkpoints/oldest",))
    first = begin_with(read_checkpoint(str(tmp_path)))
    assert (first.origin_job, first.earlier, first.dropped) == ("demo", (), ())


def test_a_job_that_does_not_fit_is_refused_with_the_key(tmp_path: Path) -> None:
    """Another model, optimizer or number format is refused; another rate, seed or name is not."""
    write(tmp_path / "demo", 40)
    manifest = read_checkpoint(str(tmp_path))
    rate = replace(SPEC.optim, rest=replace(SPEC.optim.rest, lr=1.0), warmup_batches=3)
    check_fits(replace(SPEC, job=JobSection(name="child", seed=9), optim=rate), manifest, "job.toml")
    wide = replace(SPEC, model=replace(SPEC.model, hidden_size=512))
    with pytest.raises(ConfigError, match=r"job\.toml:model\.hidden_size: is 512, but the checkpoint of demo has 256"):
        check_fits(wide, manifest, "job.toml")
    with pytest.raises(ConfigError, match=r"train\.dtype"):
        check_fits(replace(SPEC, train=replace(SPEC.train, dtype="bfloat16")), manifest, "job.toml")
    with pytest.raises(ConfigError, match=r"train\.sync_batches: is 50, but the checkpoint of demo has 0"):
        check_fits(replace(SPEC, train=replace(SPEC.train, sync_batches=50)), manifest, "job.toml")
    with pytest.raises(ConfigError, match=r"job\.toml:placement\.split_blocks: is True, but the checkpoint of"):
        check_fits(SPEC.with_values({"placement.split_blocks": True}), manifest, "job.toml")
    with pytest.raises(ConfigError, match=r"optim\.error_feedback: is 0, but the checkpoint of demo was made with 1"):
        check_fits(replace(SPEC, optim=replace(SPEC.optim, error_feedback=0.0)), manifest, "job.toml")
    with pytest.raises(ConfigError, match=r"train\.batches: 40 batches are done at boundary 40"):
        changes_of(replace(SPEC, train=replace(SPEC.train, batches=40)), manifest, "job.toml", are_meant=True)


def test_what_changes_the_recurrence_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    """A rate, a decay, a seed, the data's hash, the order, a length: each is named, old → new. Places are only listed.

    More batches give other rates from the boundary on, and the first of them is told.
    """
    write(tmp_path / "demo", 40)
    manifest = read_checkpoint(str(tmp_path))
    optim, train = SPEC.optim, SPEC.train
    changed = {
        "optim.rest.lr 0.003 → 0.001": replace(SPEC, optim=replace(optim, rest=replace(optim.rest, lr=1e-3))),
        "optim.matrices.weight_decay 0.1 → 0.0": replace(
            SPEC, optim=replace(optim, matrices=replace(optim.matrices, weight_decay=0.0))
        ),
        "job.seed 0 → 9": replace(SPEC, job=replace(SPEC.job, seed=9)),
        "data.sha256  → abc": replace(SPEC, data=replace(SPEC.data, sha256="abc")),
        "train.data_order 'sample' → 'epochs'": replace(SPEC, train=replace(train, data_order="epochs")),
        "train.sequence_length 128 → 64": replace(SPEC, train=replace(train, sequence_length=64)),
        "train.batches 150 → 300; so the rates' factor in batch 40 0.9427 → 0.9875": replace(
            SPEC, train=replace(train, batches=300)
        ),
    }
    for text, spec in changed.items():
        with pytest.raises(ConfigError, match=f"{re.escape(text)}.*add --change"):
            changes_of(spec, manifest, "job.toml", are_meant=False)
        assert changes_of(spec, manifest, "job.toml", are_meant=True).of_recurrence == tuple(text.split("; "))
    elsewhere = replace(
        SPEC,
        job=JobSection(name="child"),
        data=replace(SPEC.data, source="/elsewhere"),
        fault=replace(SPEC.fault, copies=3),
        train=replace(train, eval_every=5),
    )
    found = changes_of(elsewhere, manifest, "job.toml", are_meant=False)
    assert found == Changes(others=("train.eval_every 0 → 5", "fault.copies 2 → 3"))
    constant = replace(SPEC, optim=replace(optim, lr_schedule="constant"))
    longer = replace(constant, train=replace(train, batches=300))
    assert changes(longer, constant, 40).of_recurrence == (), "its rates have no end"


def test_a_schedule_past_its_end_asks_what_follows() -> None:
    """A finished cosine and more batches: refused, naming both ways. Each way begins at the checkpoint's end.

    A third job follows the second: the floor goes on, and another warm-up begins where the last schedule ended.
    """
    longer = replace(SPEC, train=replace(SPEC.train, batches=300))
    with pytest.raises(ConfigError, match=r'job.toml:optim.after_end: the cosine schedule of demo.*"floor".*"warm_up'):
        continued_schedule(longer, SPEC, 150, "job.toml")
    assert continued_schedule(longer, SPEC, 149, "job.toml") == longer, "--change tells this"
    ends: dict[AfterEnd, int] = {"floor": 150, "warm_up_again": 300}
    for after_end, third_end in ends.items():
        named = replace(longer, optim=replace(SPEC.optim, after_end=after_end, lr_floor=0.1))
        second = continued_schedule(named, SPEC, 150, "job.toml")
        assert second.optim.schedule_batches == 150
        with_floor = replace(SPEC, optim=replace(SPEC.optim, lr_floor=0.1))
        assert changes(second, with_floor, 150).of_recurrence == (), "the key says what is meant"
        longest = replace(named, train=replace(SPEC.train, batches=450))
        third = continued_schedule(longest, second, 300, "job.toml")
        assert third.optim.schedule_batches == third_end


@pytest.mark.parametrize(
    ("optim", "why"),
    [
        ({"warmup_batches": 150}, r"warmup_batches: 150 batches of warm-up are all 150 of the job.*leave it out"),
        ({"warmup_batches": 1500}, r"1500 batches of warm-up are all 150 of the job"),
        ({"after_end": "floor"}, r"after_end: needs schedule_batches"),
        ({"schedule_batches": 100}, r"schedule_batches: what follows batch 100"),
        ({"schedule_batches": 200, "after_end": "floor"}, r"ends after the job of 150"),
        ({"schedule_batches": 100, "after_end": "floor"}, r"the rate would be 0.*set optim.lr_floor"),
        ({"schedule_batches": 140, "after_end": "warm_up_again"}, r"20 batches of warm-up are all 10 that are left"),
        ({"schedule_batches": 100, "after_end": "floor", "lr_schedule": "constant"}, r"a constant rate has no end"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(optim: dict[str, Any], why: str) -> None:
    """A warm-up without an end, an end that is followed by nothing or lies beyond the job: by name, with the remedy."""
    spec = replace(SPEC, optim=replace(SPEC.optim, **optim))
    with pytest.raises(ConfigError, match=why):
        with_schedule(spec, "job.toml", named={f"optim.{key}" for key in optim})


def test_more_batches_without_delay_than_there_are_is_refused() -> None:
    """All of a job's batches may have none; one more is told with the number that fits."""
    every, more = (replace(SPEC, train=replace(SPEC.train, sync_batches=k)) for k in (150, 151))
    assert with_schedule(every, "job.toml") == every
    fix = r"set it to 150 or less, or train\.batches to 151 or more"
    with pytest.raises(ConfigError, match=r"train\.sync_batches: 151 batches without delay .* " + fix):
        with_schedule(more, "job.toml")


@pytest.mark.parametrize(
    ("train", "named", "sync"),
    [
        ({}, (), 15),
        ({"batches": 4}, (), 0),
        ({"sync_share": 0.5}, (), 75),
        ({"sync_batches": 0}, ("train.sync_batches",), 0),
        ({"schedule": "1f1b"}, (), 0),
        ({"schedule": "auto"}, (), 15),
    ],
)
def test_a_job_that_leaves_them_out_begins_with_a_tenth_of_its_batches_without_delay(
    train: dict[str, Any], named: tuple[str, ...], sync: int
) -> None:
    """Or with another share, and with none under a schedule that has no delay. A record leaves nothing open."""
    spec = replace(SPEC, train=replace(SPEC.train, **train))
    assert with_schedule(spec, "job.toml", named=named).train.sync_batches == sync
    assert with_schedule(spec, "job.toml") == spec


@pytest.mark.parametrize(
    ("matrices", "rest", "named", "betas"),
    [
        ("muon", "adamw", (), (0.98, 0.98)),
        ("lionmuon", "adamw", (), (0.98, 0.98)),
        ("muon", "adamw", ("optim.rest.betas",), (0.9, 0.95)),
        ("muon", "lion", (), (0.9, 0.95)),
        ("adamw", "adamw", (), (0.9, 0.95)),
    ],
)
def test_the_betas_of_adamw_beside_muon(
    matrices: str, rest: str, named: tuple[str, ...], betas: tuple[float, float]
) -> None:
    """Where a file leaves them out, and nowhere else."""
    optim = replace(SPEC.optim, matrices=GroupSpec(name=matrices), rest=GroupSpec(name=rest))
    spec = replace(SPEC, optim=optim)
    found = with_schedule(spec, "job.toml", named=named).optim
    assert (found.matrices, found.rest) == (spec.optim.matrices, replace(spec.optim.rest, betas=betas))


@pytest.mark.parametrize(
    ("batches", "optim", "warmup"), [(10, {}, 1), (1000, {}, 100), (4, {}, 0), (150, {"warmup_share": 0.0}, 0)]
)
def test_a_job_that_leaves_the_warm_up_out_has_a_tenth_of_its_schedule(
    batches: int, optim: dict[str, Any], warmup: int
) -> None:
    """Of its length, or of the schedule's if that is shorter; another share if the file names one."""
    spec = replace(SPEC, train=replace(SPEC.train, batches=batches), optim=replace(SPEC.optim, **optim))
    assert with_schedule(spec, "job.toml", named=()).optim.warmup_batches == warmup
    assert with_schedule(spec, "job.toml") == spec, "a record leaves nothing open"
    short = replace(spec.optim, schedule_batches=batches // 2, after_end="floor", lr_floor=0.1)
    assert with_schedule(replace(spec, optim=short), "job.toml", named=()).optim.warmup_batches == round(warmup / 2)


def test_the_command_lists_checkpoints(tmp_path: Path, headway: Any) -> None:
    """`checkpoints JOB --in DIR` asks no cluster: oldest first, the unfinished too."""
    write(tmp_path / "demo" / "uid", 40, at=100.0)
    (write(tmp_path / "demo" / "uid", 80, at=200.0) / "manifest.json").unlink()
    code, out, _ = headway("checkpoints", "demo", "--in", str(tmp_path), "--json")
    assert code == 0
    assert {(entry["boundary"], entry["is_complete"]) for entry in json.loads(out)} == {(40, True), (80, False)}
    code, out, _ = headway("checkpoints", "demo", "--in", str(tmp_path))
    assert out.count("incomplete") == 1
    assert headway("checkpoints", "nobody", "--in", str(tmp_path))[0] == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("config.json", "; config.json belongs to a model: `headway submit JOB.toml --model"),
        ("adapter_config.json", "; adapter_config.json belongs to a model: `headway submit JOB.toml --model"),
        ("shards.json", '; shards.json belongs to prepared data: [data] source = "'),
        ("notes.txt", "; shard-00000.bin is no safetensors; take the model as safetensors: `hf download"),
    ],
)
def test_a_folder_of_another_kind_is_no_checkpoint(headway: Any, tmp_path: Path, name: str, hint: str) -> None:
    """A model, an adapter, data: the line says how such a folder is named."""
    (tmp_path / name).touch()
    (tmp_path / "shard-00000.bin").touch()
    code, out, err = headway("submit", "--from", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}: found no checkpoint: no folder has a manifest.json{hint}" in err


def test_what_is_no_folder_is_no_checkpoint(headway: Any, tmp_path: Path) -> None:
    """A file, links in a circle, nothing: one line each."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, line in (("file", "is a file; name"), ("loop", "is no path: Symlink loop"), ("none", "does not exist")):
        code, out, err = headway("submit", "--from", str(tmp_path / name))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert line in err


def test_changes_are_meant_of_a_checkpoints_job(headway: Any) -> None:
    """--change without --from would do nothing."""
    code, out, err = headway("submit", "job.toml", "--change")
    assert (code, out) == (2, "")
    assert err == "headway: --change: needs --from: only the job of a checkpoint has keys to change\n"


def test_checkpoints_of_a_namesake_in_the_same_folder_are_told_apart(
    tmp_path: Path, headway: Any, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster has a job of this name and writes there too: all are listed, and a line says which are ours."""
    mine, others = tmp_path / "demo/mine", tmp_path / "demo/others"
    fault = replace(fake_cluster.SPEC.fault, checkpoint_dir=str(tmp_path))
    monkeypatch.setattr(fake_cluster, "SPEC", replace(fake_cluster.SPEC, fault=fault))
    monkeypatch.setattr(fake_cluster, "SpecRecord", partial(fake_cluster.SpecRecord, uid="mine"))
    write(mine, 20)
    assert headway("checkpoints", "demo")[2] == ""
    write(others, 40)
    code, out, err = headway("checkpoints", "demo")
    told = "headway: other submissions of the name demo write there too; those of this job are below"
    assert (code, len(out.splitlines()), err) == (0, 2, f"{told} {mine}\n")


def test_submit_wants_a_job_or_a_checkpoint(headway: Any) -> None:
    """Neither is a usage error of one line."""
    code, _, err = headway("submit")
    assert (code, err) == (2, "headway: submit: name a job file, or a checkpoint with --from\n")
