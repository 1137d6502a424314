"""`headway demo` on this machine's devices: its exit status, its seconds, and whether its model is there."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter


def measure(device: str, *, job: Path | None = None) -> dict[str, object]:
    """Run the command in a folder of its own. job: a job file instead of the demo's own."""
    with tempfile.TemporaryDirectory(prefix="headway-demo-") as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "headway.daemon.cli.main", "demo", "--out", str(out)]
        command += ["--job", str(job)] if job is not None else []
        began = perf_counter()
        done = subprocess.run(command, env={**os.environ, "HEADWAY_DEVICES": device}, stdout=sys.stderr, check=False)
        return {
            "exit_status": done.returncode,
            "seconds": round(perf_counter() - began, 1),
            "num_model_files": len(list((out / "model").glob("*.safetensors"))),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--job", type=Path, default=None, help="a job file instead of the demo's own")
    options = parser.parse_args()
    figures = measure(options.device, job=options.job)
    print(json.dumps(figures), flush=True)
    return 0 if figures["exit_status"] == 0 and figures["num_model_files"] else 1


if __name__ == "__main__":
    sys.exit(main())
