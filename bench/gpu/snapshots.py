"""Snapshots of a two-stage job on a card: what they cost in tokens/s, and how long the longest batch with one takes."""

import argparse
import asyncio
import json
import sys

from rigs.snapshot_cost import measure_snapshots

from gpu.cluster_job import stage_job

SECONDS = {"cuda": 60.0, "cpu": 10.0}


def measure(device: str) -> dict[str, object]:
    """As many windows as there is time for."""
    found, beside = asyncio.run(
        measure_snapshots(
            lambda batches: stage_job("snapshots", device, batches), seconds_in_all=SECONDS[device], device=device
        )
    )
    return {"snapshot_ratio": round(found["snapshot_ratio"].median, 4), **beside}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(options.device)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
