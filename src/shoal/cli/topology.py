"""``shoal topology``: lists, analyses, draws and recommends topologies.

Everything is computed from the catalog on the spot; no agents are started, except for ``recommend --measure``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..netmodel.network import format_seconds, parse_rate, parse_seconds
from ..topology.analysis.overview import DEFAULT_BANDWIDTH, DEFAULT_BYTES, DEFAULT_LATENCY, Analysis, analyse
from ..topology.families.catalog import CATALOG
from ..topology.schedule import Schedule
from . import topology_format as words
from . import topology_recommend
from .topology_format import above_zero, count, quantity, refuse_negatives_by_value

_LAYOUTS = ("auto", "circle", "grid", "hypercube", "tree")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, summary, declare, action in (
        ("list", "all topologies, each in a line", partial(_agents_argument, default=16), _list),
        ("show", "what one topology needs, costs and gives, and its rounds", _show_arguments, _show),
        ("draw", "a picture of a topology, ready for a paper", _draw_arguments, _draw),
        ("compare", "topologies side by side on a network", _compare_arguments, _compare),
        (
            "recommend",
            "which topology to take, and why",
            topology_recommend.add_arguments,
            topology_recommend.run,
        ),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        declare(command)
        refuse_negatives_by_value(command)
        command.set_defaults(action=action)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    The exit status is 2 for a request that cannot be met, 1 where something is missing or a measurement fails, and 130
    after Ctrl-C.
    """
    action: Callable[[argparse.Namespace], int] = args.action
    try:
        return action(args)
    except (ValueError, TypeError) as error:
        problem, status = str(error), 2
    except (ImportError, OSError, RuntimeError) as error:
        problem, status = str(error), 1
    except KeyboardInterrupt:
        print(f"shoal topology {args.command}: interrupted", file=sys.stderr)
        return 130
    print(f"shoal topology {args.command}: error: {problem}", file=sys.stderr)
    return status


def _list(args: argparse.Namespace) -> int:
    table = Table(box=box.SIMPLE_HEAD, title=f"topologies for {args.agents} agents", title_justify="left")
    for heading in ("topology", "what it is", "weights", "period"):
        table.add_column(heading, overflow="fold")
    for heading in ("exact after", "messages a round"):
        table.add_column(heading, justify="right")
    for topology in CATALOG.values():
        first = [topology.name, topology.summary, "symmetric" if topology.symmetric else "directed"]
        try:
            schedule, _ = words.build(topology, args.agents, None, {})
        except ValueError as refused:
            table.add_row(*first[:2], Text(_reason(refused), style="dim"), "", "", "")
            continue
        found = analyse(schedule)
        messages = words.format_figure(found.traffic.busiest_messages)
        table.add_row(*first, words.repeats(schedule.period), words.exact(found), messages)
    words.console().print(table)
    print("messages a round: of the busiest agent, each of the size of the model. shoal topology show NAME tells more.")
    return 0


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _topology_arguments(parser)
    _network_arguments(parser)
    parser.add_argument("--rounds", type=count, metavar="R", help="rounds to print (all of a short period, else 4)")


def _show(args: argparse.Namespace) -> int:
    topology = words.lookup(args.topology)
    schedule, agents_per_machine = words.build(topology, args.agents, args.per_machine, _options(args))
    found = _analyse(schedule, agents_per_machine, args)
    print(f"{topology.name}: {topology.summary}")
    print(f"{schedule.describe()}; {topology.source}")
    seconds = [
        ("one round", format_seconds(found.round_seconds)),
        ("time to that error", format_seconds(found.consensus_seconds)),
    ]
    period = "static" if schedule.period == 1 else words.repeats(schedule.period)
    promises = [("weights", words.preserves(topology)), ("period", period)]
    defaults = ", ".join(f"{name}={value}" for name, value in words.options_of(topology).items())
    wanted = [("agents", words.needs(topology)), *([("options", defaults)] if defaults else [])]
    for title, rows in (
        ("needs", wanted),
        ("costs", [*words.costs(found), *seconds]),
        ("gives", [*promises, *words.gives(found)]),
    ):
        print(f"\n{title}")
        for label, value in rows:
            if value:
                print(f"  {label:42}{value}")
    for note in found.notes:
        print(f"\nnote: {note}")
    _print_rounds(schedule, args.rounds)
    return 0


def _print_rounds(schedule: Schedule, asked: int | None) -> None:
    period = schedule.period
    shown = (period if period is not None and period <= 8 else 4) if asked is None else asked
    print("\nrounds (0>1: agent 0 sends to 1; 0-1: both ways)")
    for t in range(shown):
        print(f"  {t}: {words.round_text(schedule, t)}")
    if schedule.size > words.LARGEST_MATRIX:
        return
    for t in range(shown):
        print(f"\nW of round {t}" if period != 1 else "\nW")
        for line in words.matrix_text(schedule.matrix(t)):
            print(f"  {line}")


def _draw_arguments(parser: argparse.ArgumentParser) -> None:
    _topology_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .png, .svg or .pdf (out/TOPOLOGY-AGENTS.png)"
    )
    parser.add_argument("--rounds", type=count, metavar="R", help="panels (a short period, or the first few)")
    parser.add_argument(
        "--width", type=above_zero, metavar="INCHES", help="width of the picture (3.3; 6.9 for many panels)"
    )
    parser.add_argument("--layout", choices=_LAYOUTS, default="auto", help="places of the agents (auto: by the shape)")


def _draw(args: argparse.Namespace) -> int:
    from ..topology.drawing import draw_schedule, save

    topology = words.lookup(args.topology)
    schedule, agents_per_machine = words.build(topology, args.agents, args.per_machine, _options(args))
    output = args.output or Path("out") / f"{topology.name}-{args.agents}.png"
    figure = draw_schedule(
        schedule, rounds=args.rounds, width=args.width, agents_per_machine=agents_per_machine, layout=args.layout
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    save(figure, output)
    print(f"{schedule.describe()}: {output}")
    return 0


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topology", nargs="*", help="names of topologies (all)")
    _agents_argument(parser, 16)
    _machines_argument(parser)
    _network_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print all results as JSON instead")


def _compare(args: argparse.Namespace) -> int:
    if args.per_machine and args.agents % args.per_machine:
        raise ValueError(f"{args.agents} agents do not fill machines of {args.per_machine}. Choose a divisor of them.")
    chosen = [words.lookup(name) for name in args.topology] or list(CATALOG.values())
    found: dict[str, Analysis] = {}
    refused: dict[str, str] = {}
    for topology in dict.fromkeys(chosen):
        try:
            schedule, _ = words.build(topology, args.agents, args.per_machine, {})
        except ValueError as error:
            refused[topology.name] = _reason(error)
            continue
        found[topology.name] = _analyse(schedule, args.per_machine or 1, args)
    if args.json:
        print(json.dumps({"topologies": _plain(found), "refused": refused}, indent=1))
        return 0
    ranked = dict(sorted(found.items(), key=lambda item: item[1].consensus_seconds))
    words.console().print(_comparison(ranked, args))
    for name, reason in refused.items():
        print(f"{name}: {reason}")
    print(f"shoal topology show NAME -n {args.agents} describes one topology.")
    return 0


def _comparison(found: dict[str, Analysis], args: argparse.Namespace) -> Table:
    machines = f", {args.per_machine} on a machine" if args.per_machine else ""
    title = f"{args.agents} agents{machines}: averaging to a consensus error of {args.error:g}, fastest first"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("topology", no_wrap=True)
    for heading in (
        "degree",
        "gap a round",
        "rounds",
        "average age",
        "busiest agent",
        "NIC shared by",
        "round",
        "time",
    ):
        table.add_column(heading, justify="right")
    for name, overview in found.items():
        table.add_row(
            name,
            str(overview.traffic.most_messages),
            _gap(overview),
            str(overview.rounds),
            str(overview.age),
            f"{words.format_figure(overview.traffic.busiest_bytes / 1e6)} MB",
            str(overview.traffic.most_senders_on_a_nic),
            format_seconds(overview.round_seconds),
            format_seconds(overview.consensus_seconds),
        )
    return table


def _gap(found: Analysis) -> str:
    return str(found.gap) if found.gap_rounds == 1 else f"{found.gap_per_round:.3g}"


def _topology_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topology", help="its name, as shoal topology list has it")
    _agents_argument(parser, 8)
    _machines_argument(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the topology, such as base=3"
    )


def _agents_argument(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "-n", "--agents", type=count, default=default, metavar="N", help=f"number of agents ({default})"
    )


def _machines_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--per-machine", type=count, metavar="K", help="agents on each machine, which share its NIC")


def _network_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--latency",
        type=quantity(parse_seconds),
        default=DEFAULT_LATENCY,
        metavar="TIME",
        help="latency between machines, such as 5ms (50us)",
    )
    parser.add_argument(
        "--bandwidth",
        type=quantity(parse_rate),
        default=DEFAULT_BANDWIDTH,
        metavar="RATE",
        help="bandwidth of a machine's NIC, such as 1gbit (10gbit)",
    )
    megabytes = DEFAULT_BYTES / 1e6
    parser.add_argument(
        "--model-mb", type=above_zero, default=megabytes, metavar="MB", help=f"size of a message ({megabytes:g})"
    )
    parser.add_argument("--error", type=above_zero, default=1e-6, help="the consensus error to reach (1e-6)")


def _options(args: argparse.Namespace) -> dict[str, words.Option]:
    given: dict[str, words.Option] = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--set {text!r} is not OPTION=VALUE, such as base=3.")
        given[name.replace("-", "_")] = _number(value)
    return given


def _number(text: str) -> words.Option:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _analyse(schedule: Schedule, agents_per_machine: int, args: argparse.Namespace) -> Analysis:
    return analyse(
        schedule,
        agents_per_machine=agents_per_machine,
        nbytes=args.model_mb * 1e6,
        latency=args.latency,
        bandwidth=args.bandwidth,
        error=args.error,
    )


def _reason(refused: ValueError) -> str:
    """The reason why a topology refuses this number of agents, without the begin of the message."""
    return str(refused).partition(" agents: ")[2] or str(refused)


def _plain(found: dict[str, Analysis]) -> object:
    return words.without_infinity(
        {
            name: {**asdict(overview), "consensus_seconds": overview.consensus_seconds}
            for name, overview in found.items()
        }
    )
