"""Interpreters that tests start import torch without collecting garbage, and collect it as usual afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

from support.limits import scaled

COUNT = """
import gc, json
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
import torch
meanwhile, collections[:] = len(collections), []
for _ in range(10_000):
    knot = []
    knot.append(knot)
print(json.dumps([meanwhile, len(collections), torch.__name__, gc.isenabled()]))
"""


def test_torch_is_imported_without_the_garbage_collector_which_is_enabled_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, timeout=scaled(50))
    during, afterwards, name, enabled = json.loads(done.stdout)
    assert during < 30, "it collected all the while: some 400 times"
    assert afterwards > 10 and enabled
    assert name == "torch"
