"""``python -m shoal.cli.self_test``: move tensors over every transport, and report the results. For ``shoal doctor``.

The doctor runs this in processes of its own, because a check that hangs can only be ended from outside. Each check is a
line of JSON on stdout, written as soon as it is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

import shoal
from shoal.cli.core_wait import core_wait, is_starved
from shoal.coordination.attach import PROCESS_GROUP
from shoal.runtime.agent import current
from shoal.transport.process_group import available

FLEET_CHECKS = ("threads", "shared_memory", "network", *([PROCESS_GROUP] if "gloo" in available() else []))
PAIR_CHECK = "two processes"
_SIZES = (1, 1 << 18)
"""Elements: of a tensor that is sent inside a message, and of one that is published or streamed."""


def check_fleet(seconds: float) -> None:
    """Two agents in this process, over one transport after another; each wait in a check may take so long."""
    for transport in FLEET_CHECKS:
        fleet = shoal.Fleet(2, transport=transport, timeout=seconds)
        _report(transport, partial(fleet.run, average))


def check_pair() -> None:
    """This process's part of two that ``init`` brings together, as their variables say."""
    is_first = os.environ["RANK"] == "0"
    _report(PAIR_CHECK, _average_as_process, reports=is_first)


def _average_as_process() -> None:
    shoal.init()
    average()
    shoal.shutdown()


def average() -> None:
    """Average with the other agent and check the result, at two sizes."""
    for elements in _SIZES:
        found = shoal.neighbor_allreduce(torch.full((elements,), float(shoal.rank())))
        if not torch.equal(found, torch.full((elements,), 0.5)):
            kind = current().engine.transport_to(1 - shoal.rank())
            raise RuntimeError(f"the average of 0 and 1 is 0.5, and over {kind} it came to {found[:4].tolist()}")


def _report(check: str, run: Callable[[], object], reports: bool = True) -> None:
    start, waited = time.perf_counter(), core_wait()
    error, late = "", False
    try:
        run()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        late = isinstance(problem, TimeoutError | ConnectionError)  # what else went wrong does not depend on time
    if reports:
        seconds = time.perf_counter() - start
        starved = late and is_starved(core_wait() - waited, seconds)
        print(json.dumps({"check": check, "error": error, "seconds": seconds, "starved": starved}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_pair() if sys.argv[1] == "pair" else check_fleet(float(sys.argv[2]))
    # An agent that hangs, as a thread, must not keep the process.
    sys.stdout.flush()
    os._exit(0)
