"""What a process loaded at its start is no longer looked at by collections; garbage from later still is."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
import headway.daemon.node.lifecycle
from headway.daemon.base.own_process import keep_what_stays

class Node:
    pass

def ring():
    one, other = Node(), Node()
    one.next, other.next = other, one
    return weakref.ref(one)

before, early = len(gc.get_objects()), ring()
keep_what_stays()
late = ring()
gc.collect()
print(before > 50_000, len(gc.get_objects()) < 1_000, early() is None, late() is None)
"""


def test_collections_look_at_what_came_later() -> None:
    """The modules of a daemon, and rings of objects from before and after."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60.0, check=True)
    assert told.stdout.split() == ["True"] * 4
