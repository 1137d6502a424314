"""`headway demo` on this machine's devices: its exit status, its seconds, and whether its model is there."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from gpu.probe import Parts


def measure(device: str) -> Parts:
    """Run the command in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="headway-demo-") as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "headway.daemon.cli.main", "demo", "--out", str(out)]
        began = perf_counter()
        done = subprocess.run(command, env={**os.environ, "HEADWAY_DEVICES": device}, stdout=sys.stderr, check=False)
        yield {
            "exit_status": done.returncode,
            "seconds": round(perf_counter() - began, 1),
            "num_model_files": len(list((out / "model").glob("*.safetensors"))),
        }
