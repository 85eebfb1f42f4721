"""``shoal report``: a report from a run's files. From traces (SHOAL_TIMELINE): slow agents and their causes; from
membership logs (SHOAL_RECORD): the membership over time. The files in the folder decide; with both, it reports both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..observability import membership_log, traces
from . import membership_report, trace_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the folder that SHOAL_TIMELINE or SHOAL_RECORD named in the run")
    parser.add_argument("--picture", default="", metavar="FILE", help="draw it as well, such as run.png (matplotlib)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where the one trace of all agents goes (FOLDER/{trace_report.MERGED}); empty: nowhere",
    )
    parser.add_argument("--steps", action="store_true", help="also list every step of every agent")


def run(args: argparse.Namespace) -> int:
    """Tell what is there, and draw it."""
    folder = Path(args.folder)
    of_traces, of_records = traces.are_there(folder), membership_log.are_there(folder)
    try:
        if not of_traces and not of_records:
            raise FileNotFoundError(
                f"there is neither a trace nor a record of an agent in {folder}; run with SHOAL_TIMELINE={folder}, or "
                f"SHOAL_RECORD={folder}"
            )
        if of_records:
            picture = _beside(args.picture) if args.picture and of_traces else args.picture
            membership_report.tell(folder, picture)
        if of_traces:
            trace_report.tell(folder, args.picture, args.output, every_step=args.steps)
    except (OSError, ValueError) as error:
        print(f"shoal report: error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("shoal report: error: a picture needs matplotlib: pip install shoal[demo]", file=sys.stderr)
        return 2
    return 0


def _beside(picture: str) -> str:
    """Another name, for the picture of the membership, if there are two pictures."""
    path = Path(picture)
    return str(path.with_name(f"{path.stem}-members{path.suffix}"))
