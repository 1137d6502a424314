"""`headway demo`: what goes wrong on its way, and that it says so."""

import re
from typing import Any

import pytest

SHORT = """\
[job]
name = "short"
[model]
num_hidden_layers = 6
hidden_size = 176
intermediate_size = 480
[train]
batches = 60
microbatches = 4
microbatch_size = 4
sequence_length = 128
[optim]
warmup_batches = 10
[fault]
snapshot_every = 5
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_loses_a_worker_and_a_machine_and_no_bit(program: Any) -> None:
    """A link is cut, a worker killed, a machine lost, a node joins: each is told, and the bits are the plain ones."""
    job = program.folder / "short.toml"
    job.write_text(SHORT)
    process = program.start("demo", "--out", "demo", "--job", str(job))
    out, err = process.communicate(timeout=380)
    assert process.returncode == 0, out + err
    assert re.search(r"The links? between stage .* cut", out), out
    assert "killed by SIGKILL" in out
    assert "lease expired" in out
    assert "joined" in out
    assert "difference to the plain loop: 0 in all 60 batches" in out
    assert "the same bits" in out
    page = (program.folder / "demo" / "report.html").read_text()
    assert re.search(r"The links? between stage [^<]*? (was|were) cut for", page)
    assert "0 in all 60 batches" in page
    assert program.leftovers() == []
