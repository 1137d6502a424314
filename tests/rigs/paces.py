"""Sets the time of layers by a faults file, for stragglers and emulated devices. Benches use it too."""

import json
from pathlib import Path
from typing import Any

from headway.daemon.base.fault_points import ENVIRONMENT, LAYER_PLACE, PACE


def paced_layers(folder: Path, forward_s: float, **more_s: float) -> dict[str, str]:
    """Write a faults file with these paces alone. Returns the environment of the processes that keep them."""
    path = folder / "paces"
    path.write_text("".join(json.dumps(fault) + "\n" for fault in pace_faults(forward_s, **more_s)))
    return {ENVIRONMENT: str(path)}


def pace_faults(forward_s: float, **more_s: float) -> list[dict[str, Any]]:
    """Faults that set the time of layers, for stragglers and emulated devices.

    forward_s: least seconds of each layer's forward; its backward takes twice as long. 0: as long as it takes. more_s:
    seconds on top, on the node of that name, with `_` for `-`.
    """
    nodes = [({}, forward_s), *(({"node": name.replace("_", "-")}, seconds) for name, seconds in more_s.items())]
    return [
        {
            "id": f"{PACE}-{number}-{op}",
            "at": LAYER_PLACE,
            "when": {"op": op, **node},
            "do": PACE,
            "seconds": s,
            "times": 0,
        }
        for number, (node, forward) in enumerate(nodes)
        for op, s in (("forward", forward), ("backward", 2 * forward))
        if forward
    ]
