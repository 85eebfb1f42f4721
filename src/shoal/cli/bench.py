"""``shoal bench``: the speed of Shoal's averages on this machine, compared with other libraries, as a table with limits
and verdicts.

It starts the agents itself, one job after another, and waits for them. The progress display redraws only when an agent
reports progress, and agents report it between timed sections.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench.measurement import Figures, Load, LoadWatch, MachineInfo, here, missing_tool, run_agents, run_over_wire
from ..bench.measurement import Progress as Tell
from ..bench.results import draw_scaling, rows_of, scaling_table, speed_markdown, speed_table

AGENTS = 4
LARGEST_SCALE = 8
# In this order: figures of memory should not depend on leftovers of large tensors.
_LOCAL = ("memory", "small", "windows", "large")
_WIDTH_IN_FILE = 132


@dataclass(frozen=True)
class BenchJob:
    """A measurement with agents of its own. ``run`` takes the receiver of its progress."""

    name: str
    run: Callable[[Tell], list[Figures]]


@dataclass(frozen=True)
class Measurement:
    """The results, the machine, and how idle it was."""

    machine: MachineInfo
    load: Load
    figures: list[Figures]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.epilog = "The limits are for a quiet machine of two cores; docs/benchmarks.md says how figures are taken."
    parser.add_argument("--only", nargs="+", choices=[*_LOCAL, "network"], help="measure these parts")
    parser.add_argument(
        "--network", action="store_true", help="also between two network namespaces at 1 Gbit/s (as root, with tc)"
    )
    parser.add_argument(
        "--scaling", action="store_true", help=f"instead: draw the time of a call for 2 to {LARGEST_SCALE} agents"
    )
    picture = Path("out/scaling.png")
    parser.add_argument(
        "--picture", type=Path, default=picture, metavar="FILE", help=f"where --scaling draws ({picture})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures of every repetition")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; without the limits")


def run(args: argparse.Namespace) -> int:
    """Measure and print. The exit status is 0 if everything was measured, whatever the verdicts."""
    try:
        parts = _checked(args)
    except ValueError as error:
        print(f"shoal bench: error: {error}", file=sys.stderr)
        return 2
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        if args.scaling:
            _measure_scaling(args)
        else:
            _measure_speed(args, parts)
    except (RuntimeError, OSError) as error:
        print(f"shoal bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shoal bench: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _leave(signum: int, frame: object) -> NoReturn:
    """Exit, which ends the agents as well."""
    sys.exit(128 + signum)


def _checked(args: argparse.Namespace) -> list[str]:
    """The parts to measure. What cannot work is refused before anything has been measured."""
    parts = [*(args.only or _LOCAL), *(["network"] if args.network else [])]
    if args.scaling:
        if args.only or args.network or args.markdown:
            raise ValueError("--scaling is a measurement of its own: leave out --only, --network and --markdown")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("--scaling needs matplotlib, which is not installed: pip install 'shoal[demo]'") from None
        from matplotlib.backend_bases import FigureCanvasBase

        written = [f".{kind}" for kind in sorted(FigureCanvasBase.get_supported_filetypes())]
        if args.picture.suffix and args.picture.suffix.lower() not in written:
            kinds = ", ".join(written)
            raise ValueError(f"--picture {args.picture}: matplotlib writes no {args.picture.suffix} files, but {kinds}")
        _check_writable("--picture", args.picture)
    elif "network" in parts:
        if os.geteuid() != 0:
            raise ValueError("the network is measured between network namespaces, and making them needs root")
        if missing_tool():
            raise ValueError(f"there is no program {missing_tool()!r} (Debian: iproute2 and util-linux)")
    if args.json is not None:
        _check_writable("--json", args.json)
    return parts


def _check_writable(option: str, path: Path) -> None:
    """ValueError if the file cannot be written. Its folder is made now, the file once everything is measured."""
    problem = "it is a directory" if path.is_dir() else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            problem = problem or "permission denied"
    except OSError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{option} {path} cannot be written: {problem}. Give another file")


def _measure_speed(args: argparse.Namespace, parts: Sequence[str]) -> None:
    jobs = []
    local = [part for part in _LOCAL if part in parts]
    if local:
        jobs.append(_job(local, AGENTS, args.quick))
    if "small" in local:
        jobs.append(_job(["small"], 2, args.quick))
    if "network" in parts:
        jobs.append(BenchJob("a wire of 1 Gbit/s", lambda tell: run_over_wire(args.quick, tell)))
    measured = _measure(jobs)
    rows = rows_of(measured.figures, judged=not args.quick)
    out = _console()
    if args.markdown:
        print(speed_markdown(rows))
    else:
        out.print(speed_table(rows))
    _print_circumstances(out, measured)
    _write(args.json, measured, rows=[asdict(row) for row in rows])


def _measure_scaling(args: argparse.Namespace) -> None:
    most = 3 if args.quick else LARGEST_SCALE
    measured = _measure([_job(["scaling"], agents, args.quick) for agents in range(2, most + 1)])
    out = _console()
    out.print(scaling_table(measured.figures))
    print("dynamic exponential: the inner-outer exponential-2 graph; on one machine local_size is all agents")
    _print_circumstances(out, measured)
    draw_scaling(measured.figures, args.picture, str(measured.machine))
    print(f"picture: {args.picture}")
    _write(args.json, measured)


def _job(parts: Sequence[str], agents: int, quick: bool) -> BenchJob:
    return BenchJob(f"{agents} agents", lambda tell: run_agents(parts, agents, quick, tell))


def _measure(jobs: Sequence[BenchJob]) -> Measurement:
    watch = LoadWatch()
    figures = []
    for number, job in enumerate(jobs, start=1):
        with _progress(f"{number}/{len(jobs)} {job.name}") as tell:
            figures += job.run(tell)
    return Measurement(here(), watch.load(), figures)


@contextmanager
def _progress(name: str) -> Iterator[Tell]:
    """A display on stderr; in a file, one line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"measuring: {name}", highlight=False)
        yield lambda doing, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # No automatic refresh: it would take a share of the cores from the timed code.
    with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False, transient=True) as display:
        task = display.add_task(f"{name}: starting", total=None)
        display.refresh()

        def tell(doing: str, done: int, total: int) -> None:
            display.update(task, description=f"{name}: {doing}", completed=done, total=total)
            display.refresh()

        yield tell


def _console() -> Console:
    # A file has no width, and rich would take it for 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_FILE)


def _print_circumstances(out: Console, measured: Measurement) -> None:
    out.print(str(measured.machine), highlight=False)
    out.print(str(measured.load), highlight=False)
    if not measured.load.quiet:
        out.print("The machine was not quiet: measure again when nothing else runs on it.", style="bold yellow")


def _write(path: Path | None, measured: Measurement, **more: Any) -> None:
    if path is None:
        return
    content = asdict(measured) | more
    content["load"]["quiet"] = measured.load.quiet
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"figures: {path}")
