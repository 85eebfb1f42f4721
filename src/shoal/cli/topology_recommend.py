"""``shoal topology recommend``: recommends a topology for a number of agents on a given network, with the reason. The
network is described on the command line, or measured (``--measure``) by agents: by the agents of the job if the command
itself is run by ``shoal run`` or another launcher, else by agents that it starts on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from ..netmodel.messages import MOST_EDGES
from ..netmodel.network import (
    ACCURACY,
    COMPRESSION,
    DIFFERENCE,
    Link,
    Network,
    format_rate,
    format_seconds,
    parse_rate,
    parse_seconds,
)
from ..progress_bar import shown
from ..rendezvous.launch import detect
from ..topology.analysis.overview import DEFAULT_BANDWIDTH, DEFAULT_BYTES, DEFAULT_LATENCY
from . import topology_format as words
from .topology_format import above_zero, count, quantity, zero_or_more

if TYPE_CHECKING:
    from ..compression import Compressor
    from ..netmodel.recommendation import Recommendation

SHOWN = 12
DEFAULT_AGENTS = 16
DEFAULT_ERROR = 1e-3
_MOST_MEASURING = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.epilog = "docs/network-model.md says what is predicted, how, and how well."
    parser.add_argument(
        "-n", "--agents", type=count, metavar="N", help=f"number of agents ({DEFAULT_AGENTS}, or those that measure)"
    )
    parser.add_argument("--per-machine", type=count, metavar="K", help="agents on each machine, sharing its NIC (1)")
    parser.add_argument(
        "--latency", type=quantity(parse_seconds), metavar="TIME", help="latency between machines, such as 5ms (50us)"
    )
    parser.add_argument(
        "--bandwidth",
        type=quantity(parse_rate),
        metavar="RATE",
        help="bandwidth of a machine's NIC, such as 1gbit (10gbit)",
    )
    parser.add_argument(
        "--upload",
        type=quantity(parse_rate),
        metavar="RATE",
        help="bandwidth out of the machine, if it differs from --bandwidth",
    )
    parser.add_argument(
        "--download", type=quantity(parse_rate), metavar="RATE", help="bandwidth into the machine, likewise"
    )
    parser.add_argument(
        "--overhead",
        type=quantity(parse_seconds),
        metavar="TIME",
        help="time that each message occupies a NIC besides its bytes (0)",
    )
    parser.add_argument(
        "--inside-bandwidth",
        type=quantity(parse_rate),
        metavar="RATE",
        help="bandwidth of an agent inside its machine (no limit)",
    )
    parser.add_argument(
        "--model-mb",
        type=above_zero,
        default=DEFAULT_BYTES / 1e6,
        metavar="MB",
        help="size of the model in 10^6 bytes (100)",
    )
    parser.add_argument(
        "--error", type=above_zero, default=DEFAULT_ERROR, help=f"the consensus error to reach ({DEFAULT_ERROR:g})"
    )
    parser.add_argument(
        "--difference",
        type=zero_or_more,
        default=DIFFERENCE,
        metavar="SHARE",
        help="training: difference of the agents' gradients at the start, relative to the norm of their mean; "
        f"shoal.netmodel.probe.measure_difference() measures it; 0 for equal data ({DIFFERENCE:g}, shuffled data)",
    )
    parser.add_argument(
        "--accuracy",
        type=above_zero,
        default=ACCURACY,
        metavar="SHARE",
        help=f"training: norm of the mean gradient at the end, relative to the start, at most 1 ({ACCURACY:g})",
    )
    parser.add_argument(
        "--local-steps", type=count, default=1, metavar="H", help="training: steps for each exchange (1)"
    )
    parser.add_argument(
        "--compute",
        type=quantity(parse_seconds),
        default=0.0,
        metavar="TIME",
        help="training: time to compute a step (0)",
    )
    parser.add_argument(
        "--compression",
        type=quantity(_compression),
        default=1.0,
        metavar="SHARE|NAME",
        help=f"training: size of a message relative to the model: {COMPRESSION} (1)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the network: with the agents of this job, or with some started on this machine",
    )
    parser.add_argument("--all", action="store_true", help=f"show all of them, not the {SHOWN} fastest")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def _compression(text: str) -> float | Compressor:
    from ..netmodel.training import parse_compression

    return parse_compression(text)


def run(args: argparse.Namespace) -> int:
    """Rank and print; under a launcher, rank 0 prints.

    Raises:
        ValueError: the request is invalid; the message has the remedy.
    """
    from ..netmodel.recommendation import recommend
    from ..netmodel.training import Training

    if args.error >= 1:
        raise ValueError(f"--error {args.error:g}: agents begin with an error of 1. Pass a number below it.")
    network = _measured(args) if args.measure else _described(args)
    if network is None:
        return 0
    if network.size > MOST_EDGES:
        raise ValueError(f"-n {network.size}: so many agents cannot be timed. The limit is {MOST_EDGES:,}.")
    training = Training(args.difference, args.local_steps, args.compute, args.compression, args.accuracy)
    found = recommend(
        network, args.model_mb * 1e6, args.error, training=training, watched=lambda ways: shown(ways, "timing")
    )
    if args.json:
        print(json.dumps(_plain(found), indent=1))
    else:
        _show(found, None if args.all else SHOWN)
    return 0


def _described(args: argparse.Namespace) -> Network:
    inside = Link(bandwidth=args.inside_bandwidth or math.inf)
    return Network(args.agents or DEFAULT_AGENTS, _nic(args), args.per_machine or 1, inside)


def _nic(args: argparse.Namespace) -> Link:
    if args.bandwidth and args.upload and args.download:
        raise ValueError("--bandwidth has no effect beside --upload and --download. Leave it out.")
    latency = DEFAULT_LATENCY if args.latency is None else args.latency
    usual = args.bandwidth or DEFAULT_BANDWIDTH
    out, into = args.upload or usual, args.download or usual
    return Link(latency, out, args.overhead or 0.0, None if into == out else into)


def _measured(args: argparse.Namespace) -> Network | None:
    """The measured network, with the command line's values put in; None on agents other than rank 0."""
    from ..netmodel.probe import MeasuredNetwork, measure, measure_this_machine

    if args.inside_bandwidth is not None:
        raise ValueError("--inside-bandwidth and --measure give the same value. Leave out one of the two.")
    has_link = any(
        value is not None for value in (args.latency, args.bandwidth, args.upload, args.download, args.overhead)
    )
    launch = detect()
    found: MeasuredNetwork
    if launch.launcher == "none" or launch.size == 1:
        print("measuring with agents on this machine", file=sys.stderr)
        found = measure_this_machine(max(2, min(args.agents or DEFAULT_AGENTS, _MOST_MEASURING)))
    else:
        import shoal

        shoal.init()
        found = measure()
        shoal.shutdown()
        if launch.rank:
            return None
    agents = args.agents or (found.agents if launch.size > 1 else DEFAULT_AGENTS)
    if found.between is None and not has_link:
        if args.per_machine is not None and args.per_machine < agents:
            raise ValueError(
                f"--per-machine {args.per_machine} puts {agents} agents on several machines, but one was measured. "
                "Give --latency and --bandwidth of the network between machines, or run this with shoal run --nnodes."
            )
        return Network(agents, Link(), agents, found.inside or Link())
    between = _nic(args) if found.between is None or has_link else found.between
    return Network(agents, between, args.per_machine or found.agents_per_machine, found.inside or Link())


def _show(found: Recommendation, most: int | None) -> None:
    console = words.console()
    console.print(_in_words(found.network, found.nbytes))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way to average", no_wrap=True)
    table.add_column(f"to {found.error:g}", justify="right", no_wrap=True)
    table.add_column("a round", justify="right", no_wrap=True)
    table.add_column("to train", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    groups = found.ties()
    for first, *others in groups[:most]:
        same = f"; the same: {', '.join(other.name for other in others)}" if others else ""
        train = "refused" if first.refused else format_seconds(first.training_seconds)
        times = format_seconds(first.seconds), format_seconds(first.seconds_per_round), train
        table.add_row(first.name, *times, first.why + same)
    console.print(table)
    if most is not None and len(groups) > most:
        slower = sum(len(group) for group in groups[most:])
        console.print(f"and {slower} slower ones: --all", style="dim")
    for name, why in found.passed_over.items() if most is None else ():
        console.print(f"{name}: {why}", style="dim")
    for candidate in found.candidates if most is None else ():
        if candidate.refused:
            console.print(f"to train, {candidate.name}: {candidate.refused}", style="dim")
    console.print("to train: a step, times how many more steps it takes than with all agents together", style="dim")
    console.print()
    for sentence in found.advice():
        console.print(sentence)


def _in_words(network: Network, nbytes: float) -> str:
    inside, between = network.inside, network.between
    parts = [f"{network.size} agents on {network.machines} machine{'' if network.machines == 1 else 's'}"]
    if network.machines > 1:
        parts.append(f"a NIC {_link_in_words(between)}")
    if inside != Link():
        parts.append(f"a port inside {_link_in_words(inside)}")
    return f"{', '.join(parts)}; {nbytes / 1e6:g} MB to average"


def _link_in_words(link: Link) -> str:
    rates = [format_rate(link.bandwidth)]
    if link.download is not None:
        rates = [f"{rates[0]} out and {format_rate(link.download)} in"]
    parts = [*rates, f"{format_seconds(link.latency)} latency"]
    if link.overhead:
        parts.append(f"{format_seconds(link.overhead)} a message")
    return " and ".join([", ".join(parts[:-1]), parts[-1]])


def _plain(found: Recommendation) -> object:
    network = found.network
    links = {name: asdict(getattr(network, name)) for name in ("between", "inside")}
    return words.without_infinity(
        {
            "network": {"agents": network.size, "agents_per_machine": network.agents_per_machine, **links},
            "nbytes": found.nbytes,
            "error": found.error,
            "training": {**vars(found.training), "compression": str(found.training.compression)},
            "candidates": [
                {**vars(candidate), "schedule": candidate.schedule and candidate.schedule.describe()}
                for candidate in found.candidates
            ],
            "to_train": [candidate.name for candidate in found.to_train],
            "passed_over": found.passed_over,
            "advice": found.advice(),
        }
    )
