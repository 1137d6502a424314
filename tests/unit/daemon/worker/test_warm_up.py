"""What a worker imports before it attaches: enough to go on at once, and no compiler."""

import subprocess
import sys

CODE = """
import sys
import torch
from headway.daemon.worker.stage_worker import StageWorker
from headway.daemon.worker.device import warm_up
from headway.optim.inner_optimizer import inner_optimizer
from headway.optim.spec import GroupSpec

warm_up()
for name in ("muon", "adamw", "lion", "sgd"):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    inner_optimizer(GroupSpec(name=name, lr=0.1), [weight]).step()
    assert not torch.equal(weight, torch.ones(2, 2)), name
assert torch.are_deterministic_algorithms_enabled()
print(*sorted(sys.modules.keys() & {"torch._dynamo", "torch._inductor", "sympy"}))
"""


def test_no_compiler_is_imported_by_a_job_that_is_not_compiled() -> None:
    """One batch, then a step of every optimizer: torch's compiler, a second of every worker's start, stays away."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ""
