"""The cluster's rules for every submission and checkpoint from any source."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.records import CheckpointRecord, SpecRecord
from headway.daemon.decide.admission import harmless, why_no_checkpoint, why_refused
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec, PluginsSpec
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import ModelSpec
from headway.stages.state.file_digest import FileDigest

GOOD = SpecRecord(spec=JobSpec(job=JobSection(name="demo")), uid="0123456789abcdef")

OWN = replace(GOOD.spec, model=ModelSpec(block="unittest:main"))
WHEEL = PluginsSpec(wheel="w.whl", sha256="1" * 64, data=DataSpec(source="/w", sha256="2" * 64))


def _of(spec: JobSpec) -> SpecRecord:
    return replace(GOOD, spec=spec)


def test_what_keeps_the_rules_goes_in_as_it_is() -> None:
    """Nothing to say."""
    assert why_refused(GOOD, "demo") == ""


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            _of(replace(GOOD.spec, model=ModelSpec(num_attention_heads=0))),
            "model.num_attention_heads: must be at least 1",
        ),
        (_of(replace(GOOD.spec, model=ModelSpec(num_hidden_layers=50_000_000))), "model.num_hidden_layers: must be at"),
        (_of(replace(GOOD.spec, fault=FaultSpec(checkpoint_dir="../x"))), "fault.checkpoint_dir: '../x' leads out"),
        (_of(JobSpec(job=JobSection(name=".."))), "job.name: '..' is not 1 to 63"),
        (_of(JobSpec(job=JobSection(name="a\x1b[2J"))), "job.name: 'a\\x1b[2J' is not 1 to 63"),
        (_of(JobSpec(job=JobSection(name="other"))), "job.name: 'other' lies under the name 'demo'"),
        (_of(replace(OWN, plugins=PluginsSpec(wheel="w.whl"))), "plugins: the wheel has no hash"),
        (_of(replace(OWN, plugins=WHEEL)), "plugins: the block's parameters were not counted"),
        (
            _of(replace(OWN, plugins=WHEEL, model=replace(OWN.model, block_shapes=(("w", (0, 2**40)),)))),
            "plugins: a parameter has an impossible shape",
        ),
        (_of(replace(OWN, plugins=WHEEL, data=DataSpec(source="m:f"))), "plugins: the source of data has not run"),
        (
            _of(replace(GOOD.spec, plugins=WHEEL, optim=OptimSpec(rest=GroupSpec(name="m:Own")))),
            "plugins: its state for a parameter of shape",
        ),
        (replace(GOOD, uid="../../x"), "uid: '../../x' cannot be a folder's name"),
        (replace(GOOD, submitted_by="a" * 10_000), "submitted_by: has more than 512 characters"),
        (replace(GOOD, submitted_by="a\x1b[2J@host"), "submitted_by: 'a\\x1b[2J@host' has a character that cannot be"),
        (replace(GOOD, parent="b" * 10_000), "parent: has more than 512 characters"),
    ],
)
def test_what_breaks_a_rule_comes_back_harmless(record: SpecRecord, why: str) -> None:
    """The sentence names the key; the record has a job of default sizes and no path that leads elsewhere."""
    told, found = harmless(record, "demo"), why_refused(record, "demo")
    assert found.startswith(why)
    assert found.isprintable()
    assert told.spec == JobSpec(job=JobSection(name="demo"))
    assert why_refused(told, "demo") == ""


FILES = {"embed": FileDigest(size_bytes=1, checksum="ab"), "journal": FileDigest(size_bytes=1, checksum="ab")}
CHECKPOINT = CheckpointRecord(timeline=1, boundary=40, url="u", files=FILES, ancestry=((1, 2),))


def test_a_checkpoint_of_the_jobs_layers_serves() -> None:
    """Nothing to say."""
    assert why_no_checkpoint(CHECKPOINT, GOOD.spec, job="demo", generation=3) == ""


@pytest.mark.parametrize(
    ("checkpoint", "job", "generation", "why"),
    [
        (CHECKPOINT, "..", 3, "its job's name"),
        (CHECKPOINT, "demo", 2**63, "its generation is out of range"),
        (replace(CHECKPOINT, boundary=-1), "demo", 3, "its boundary is out of range"),
        (replace(CHECKPOINT, files={"../../etc/passwd": FILES["embed"]}), "demo", 3, "it names '../../etc/passwd'"),
        (replace(CHECKPOINT, files={"embed": FileDigest(size_bytes=-1, checksum="a")}), "demo", 3, "the entry of"),
        (replace(CHECKPOINT, ancestry=((-1, 2),)), "demo", 3, "its ancestry is out of range"),
    ],
)
def test_a_crafted_manifest_is_refused(checkpoint: CheckpointRecord, job: str, generation: int, why: str) -> None:
    """A name that leads elsewhere, a number that no key can have."""
    assert why_no_checkpoint(checkpoint, GOOD.spec, job=job, generation=generation).startswith(why)
