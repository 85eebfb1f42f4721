"""The variables of a cluster's controller for one machine of a job: its number of agents, its index, and the
rendezvous.

torchrun takes the defaults of its options from variables that begin with ``PET_``, so Kubeflow sets these in the pods
of a PyTorchJob or a TrainJob. An indexed Job of Kubernetes, and a JobSet, set the index of the pod. ``shoal run`` reads
both. Options on the command line take precedence.
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
        ValueError: A variable is no number; the message names the option to give instead.
    """
    if args.agents is None:
        args.agents = _count(environ, AGENTS, "-n", "how many agents run on this machine")
    if args.nnodes is None:
        args.nnodes = _count(environ, NODES, "--nnodes", "how many machines there are, which does not change") or 1
    if args.node_rank is None:
        args.node_rank = _count(environ, NODE_RANK, "--node-rank", "which of the machines this is")
    if args.node_rank is None and args.nnodes > 1:  # else the index is a sweep's, whose pods do not meet
        args.node_rank = _count(environ, INDEX, "--node-rank", "which of the machines this is")
    args.node_rank = args.node_rank or 0


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The address of machine 0; None if no variable has it."""
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
