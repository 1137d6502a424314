"""The kernel of attention is decided once, for the job's shapes and the devices that may compute it."""

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.device_defaults import attention_backend
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.local.demo import DEMO_JOB
from headway.daemon.records.records import Device
from headway.stages.spec import ModelSpec, TrainSpec

CPU = Device(kind="cpu")
T4, A100, H100 = (Device(kind="cuda", capability=capability) for capability in ("7.5", "8.0", "9.0"))
OLD_DAEMON = Device(kind="cuda")


def job(head_dim: int, backend: str = "auto", dtype: str = "float32") -> JobSpec:
    """A job of two heads of a width."""
    train = TrainSpec(attention_backend=backend, dtype=dtype)  # type: ignore[arg-type]
    model = ModelSpec(hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=1)
    return JobSpec(job=JobSection(name="j"), model=model, train=train)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "devices", "chosen"),
    [
        (22, "float32", [A100], "math"),
        (22, "float32", [T4], "efficient"),
        (22, "float32", [T4, H100], "math"),
        (24, "float32", [A100, H100, OLD_DAEMON], "efficient"),
        (24, "float32", [CPU], "flash"),
        (24, "float32", [CPU, H100], "math"),
        (24, "float32", [], "flash"),
        (64, "bfloat16", [H100, CPU], "flash"),
        (64, "bfloat16", [H100, T4], "math"),
        (512, "bfloat16", [H100], "efficient"),
        (510, "bfloat16", [H100], "math"),
    ],
)
def test_auto_is_the_fastest_kernel_that_every_device_has(
    head_dim: int, dtype: str, devices: list[Device], chosen: str
) -> None:
    """Shapes, dtype and devices decide; the plain mathematics fits everywhere."""
    assert attention_backend(job(head_dim, dtype=dtype), devices, "job.toml") == chosen


def test_the_demo_has_a_kernel_on_every_card() -> None:
    """Its heads are 22 wide, which the memory-efficient kernel refuses from Ampere on."""
    demo = parse_job(DEMO_JOB, "demo.toml")
    assert demo.model.head_width == 22
    assert attention_backend(demo, [A100, H100], "demo.toml") == "math"


def test_a_named_kernel_that_no_device_has_is_refused_by_key_and_value() -> None:
    """One line: the key, the value, the reason and what to do."""
    with pytest.raises(ConfigError) as caught:
        attention_backend(job(22, "efficient"), [A100, H100], "job.toml")
    assert str(caught.value).replace("\n", " ") == (
        'job.toml:train.attention_backend: "efficient" does not fit this job: on a card in float32 it needs heads of a '
        'multiple of 4, and these have 22; set it to "auto"'
    )


def test_a_named_kernel_that_some_device_has_stays() -> None:
    """The plan uses those devices."""
    assert attention_backend(job(24, "efficient"), [CPU, H100], "job.toml") == "efficient"
