"""Command lines whose errors suggest the option that was meant, also where it is another launcher's."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

_UNKNOWN = "unrecognized arguments: "
OF_OTHERS = {
    "--np": "-n N",
    "--nproc": "-n N",
    "--num-processes": "-n N",
    "--hosts": "--nnodes K --node-rank I --rendezvous HOST:PORT on each machine",
    "--hostfile": "--nnodes K --node-rank I --rendezvous HOST:PORT on each machine",
    "--master-addr": "--rendezvous HOST:PORT",
    "--master-port": "--rendezvous HOST:PORT",
    "--rdzv-endpoint": "--rendezvous HOST:PORT",
    "--rdzv-backend": "--rendezvous HOST:PORT",
    "--rdzv-id": "SHOAL_SECRET, the same on each machine",
    "--log-dir": "a redirection: each line begins with its rank",
    "-x": "--env NAME=VALUE",
    "-genv": "--env NAME=VALUE",
    "--module": "-m",
    "--timeline-filename": "--timeline DIR",
}
"""Options of torchrun, mpirun, accelerate and horovodrun, and what ``shoal run`` has for them."""


class SuggestingParser(argparse.ArgumentParser):
    """Says which option was probably meant."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            option = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            message += self._suggestion(option)
        super().error(message)

    def _suggestion(self, option: str) -> str:
        dashed = option[:2] + option[2:].replace("_", "-")
        own = [name for action in self._actions for name in action.option_strings]
        if dashed in own and dashed != option:
            return f". Did you mean {dashed}?"
        if "--on-failure" in own and dashed == "--standalone":
            return f". Leave {option} out: it is the default"
        if "--on-failure" in own and dashed in OF_OTHERS:
            return f". Instead of {option} use {OF_OTHERS[dashed]}"
        near = difflib.get_close_matches(dashed, [name for name in own if name.startswith("--")], n=1)
        return f". Did you mean {near[0]}?" if near else ""
