"""What a cluster's controller tells one machine of a job: how many agents it has, which machine it is, where all meet.

torchrun takes the defaults of its options from variables that begin with ``PET_``, so Kubeflow sets these in the pods
of a PyTorchJob or a TrainJob; an indexed Job of Kubernetes, and a JobSet, say which pod this is. ``shoal run`` reads
both. What is given on the command line comes first.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..rendezvous.launch import parse_address

AGENTS, NODES, NODE_RANK = "PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK"
HOST, PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
INDEX = "JOB_COMPLETION_INDEX"


def fill_in(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set those of ``agents``, ``nnodes`` and ``node_rank`` that are None; else it is the first of one machine.

    Raises:
        ValueError: A variable is no number; the message says which option to give instead.
    """
    if args.agents is None:
        args.agents = _count(environ, AGENTS, "-n", "how many agents run on this machine")
    if args.nnodes is None:
        args.nnodes = _count(environ, NODES, "--nnodes", "how many machines there are, which does not change") or 1
    if args.node_rank is None:
        args.node_rank = _count(environ, NODE_RANK, "--node-rank", "which of the machines this is")
    if args.node_rank is None and args.nnodes > 1:  # else the index is of a sweep, whose pods do not meet
        args.node_rank = _count(environ, INDEX, "--node-rank", "which of the machines this is")
    args.node_rank = args.node_rank or 0


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where machine 0 is reached; None where no variable says it."""
    host, port = environ.get(HOST, "").strip(), environ.get(PORT, "").strip()
    if not (host and port):
        return None
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return parse_address(f"{bracketed}:{port}", f"{HOST}:{PORT}")


def _count(environ: Mapping[str, str], name: str, option: str, what: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} is no whole number: give {option}, {what}")
    return int(text)
