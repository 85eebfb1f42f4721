"""The launcher's side of joining a running job: claims ranks in its store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from ..rendezvous.elastic_join import JOIN_SECONDS, Invitation

# A process of its own, like the store's, because the launcher imports no torch.
CLAIM = (
    "import os, sys; os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR'); "
    "from shoal.rendezvous.elastic_join import main; main(sys.argv[1:])"
)
START_SECONDS = 60.0
"""How long that process may take besides."""


@dataclass(frozen=True)
class ClaimedRanks:
    """Ranks of a run, from ``first`` on."""

    room: Invitation
    secret: str
    first: int


def claim(host: str, port: int, agents: int) -> ClaimedRanks:
    """Claim so many ranks of the run whose store is there.

    Raises:
        ValueError: The job has no ranks to give; the message has the reason.
    """
    command = [sys.executable, "-c", CLAIM, host, str(port), str(agents)]
    try:
        done = subprocess.run(
            command,
            env=os.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=JOIN_SECONDS + START_SECONDS,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the store there did not answer within {JOIN_SECONDS + START_SECONDS:g} s") from None
    except json.JSONDecodeError:
        raise ValueError(f"asking the store there failed:\n{done.stderr}") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return ClaimedRanks(Invitation(**answer["room"]), answer["secret"], int(answer["first"]))
