"""The environment variables of Shoal. One table gives each its value, default and effect; ``read`` parses them all.

``init()`` calls :func:`read` once and keeps the result in the agent. A command of the command line calls it where it
needs a variable. ``shoal doctor`` prints the variables that are set, and ``tools/environment_page.py`` writes
docs/environment.md from the table.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

RAISE, CONTINUE = "raise", "continue"
STOP = "stop"
INCARNATION = "SHOAL_INCARNATION"
BEGIN_WITH = "SHOAL_BEGIN_WITH"
WATCH = "SHOAL_WATCH"
LAUNCHER = "SHOAL_LAUNCHER"
EXIT_NOTES = "SHOAL_EXIT_NOTES"
NATIVE = "SHOAL_NATIVE"
BUILD_NATIVE = "SHOAL_BUILD_NATIVE"  # read by the installation only (hatch_build.py)

TIME, FAILURES, ADDRESSES, TENSORS, SECURITY, TRACES, LAUNCHERS = (
    "Time limits",
    "Failures",
    "Addresses and ports",
    "Transports and tensors",
    "Security",
    "Traces and logs",
    "Variables that launchers set",
)


@dataclass(frozen=True)
class Variable:
    """A row of the table.

    Attributes:
        name: The name of the variable.
        section: The section of the page that lists it.
        values: The texts that it may have, in Markdown.
        default: The effect of an unset variable, in Markdown; empty for a variable that launchers set.
        effect: Its effect, in Markdown with links relative to ``docs``.
        parse: Turns a text that is not empty into the value; raises ValueError with the permitted values.
    """

    name: str
    section: str
    values: str
    default: str
    effect: str
    parse: Callable[[str], Any]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError("it must be a positive number of seconds")
    return seconds


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _is_on(text: str) -> bool:
    if text not in ("off", "on"):
        raise ValueError("it must be on or off")
    return text == "on"


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("it must be a positive integer")
    return int(text)


def _entries(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("it must be a number of entries, or 0 for no cache")
    return int(text)


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"it must be {' or '.join(map(repr, values))}")
        return text

    return parse


def _variable(
    name: str, section: str, values: str, default_text: str, effect: str, parse: Callable[[str], Any], default: Any
) -> Any:
    row = Variable(name, section, values, default_text, effect, parse)
    # Agents and their errors may be printed, and the secret must not be.
    return field(default=default, metadata={"variable": row}, repr=name != "SHOAL_SECRET")


@dataclass(frozen=True)
class Config:
    """The values of the variables, each with its default where the variable is unset or empty."""

    timeout: float = _variable(
        "SHOAL_TIMEOUT",
        TIME,
        "seconds",
        "300",
        "The deadline of every wait. A call may set its own by `timeout=`.",
        _seconds,
        300.0,
    )
    drop_after: float = _variable(
        "SHOAL_DROP_AFTER",
        TIME,
        "seconds",
        "unset",
        "A waiting agent probes its peers. A peer that does not answer for this time counts as lost. Unset: others "
        "wait for it until their deadlines ([stopped processes](howto/hang.md)).",
        _seconds,
        float("inf"),
    )
    stall_seconds: float = _variable(
        "SHOAL_STALL_SECONDS",
        TIME,
        "seconds, or `inf`",
        "30",
        "A call that has waited for this time is reported in the log, with the state of the peers it waits for.",
        _seconds,
        30.0,
    )
    entry_timeout: float = _variable(
        "SHOAL_ENTRY_TIMEOUT",
        TIME,
        "seconds",
        "3600",
        "The time that a restarted or joining agent waits to be admitted by the others.",
        _seconds,
        3600.0,
    )
    on_loss: str = _variable(
        "SHOAL_ON_LOSS",
        FAILURES,
        "`raise` or `continue`",
        "`raise`",
        "With `continue` the other agents continue after an agent is lost, where that is possible "
        "([fault tolerance](survival.md)). The argument `on_loss=` of `init` takes precedence.",
        _one_of(RAISE, CONTINUE),
        RAISE,
    )
    on_partition: str = _variable(
        "SHOAL_ON_PARTITION",
        FAILURES,
        "`continue` or `stop`",
        "`continue`",
        "The policy of the smaller part of a [network partition](survival.md#network-partitions).",
        _one_of(CONTINUE, STOP),
        CONTINUE,
    )
    check_finite: bool = _variable(
        "SHOAL_CHECK_FINITE",
        FAILURES,
        "`0` or `1`",
        "`0`",
        "With `1` an agent raises [`NotFinite`](troubleshooting.md#notfinite) and sends nothing if its tensor has NaN "
        "or infinity in it.",
        _flag,
        False,
    )
    rendezvous: str = _variable(
        "SHOAL_RENDEZVOUS",
        ADDRESSES,
        "`host:port`",
        "from the launcher",
        "The address where agents find each other ([rendezvous](rendezvous.md#rendezvous-address)).",
        str,
        "",
    )
    ports: str = _variable(
        "SHOAL_PORTS",
        ADDRESSES,
        "a port, or `FIRST-LAST`",
        "any free port",
        "The data ports on which agents listen between machines. Each agent takes the first free one "
        "([ports and firewalls](howto/machines.md#ports-and-firewalls)).",
        str,
        "",
    )
    interface: str = _variable(
        "SHOAL_INTERFACE",
        ADDRESSES,
        "the name of an interface, or an address",
        "the interface towards the rendezvous",
        "The interface on which agents and launchers listen.",
        str,
        "",
    )
    agents_per_machine: int | None = _variable(
        "SHOAL_AGENTS_PER_MACHINE",
        ADDRESSES,
        "a positive integer",
        "the real machines",
        "Ranks are grouped into machines of this size, for hierarchical operations and tests.",
        _positive,
        None,
    )
    transport: str = _variable(
        "SHOAL_TRANSPORT",
        TENSORS,
        "`threads`, `shared_memory`, `network` or `process-group`",
        "the fastest for each pair of agents",
        "The transport between all agents.",
        str,
        "",
    )
    process_group: str = _variable(
        "SHOAL_PROCESS_GROUP",
        TENSORS,
        "a backend of `torch.distributed`",
        "`gloo`",
        "The backend for `SHOAL_TRANSPORT=process-group` ([operation ordering](coordination.md)).",
        str,
        "gloo",
    )
    cache_capacity: int = _variable(
        "SHOAL_CACHE_CAPACITY",
        TENSORS,
        "a number of entries; 0 for none",
        "1024",
        "The size of the response cache of `process-group`.",
        _entries,
        1024,
    )
    device_memory: bool = _variable(
        "SHOAL_DEVICE_MEMORY",
        TENSORS,
        "`0` or `1`",
        "`0`",
        "With `1` agents of a machine read CUDA tensors on their devices ([devices](devices.md)).",
        _flag,
        False,
    )
    compress_locally: bool = _variable(
        "SHOAL_COMPRESS_LOCALLY",
        TENSORS,
        "`0` or `1`",
        "`0`",
        "With `1` compressed messages are also encoded within a machine. Otherwise tensors are read in place there, "
        "with the same result.",
        _flag,
        False,
    )
    native: bool = _variable(
        NATIVE,
        TENSORS,
        "`0` or `1`",
        "`1`",
        "With `0` torch is used instead of the [compiled kernels](kernels.md), with the same results.",
        _flag,
        True,
    )
    secret: str = _variable(
        "SHOAL_SECRET",
        SECURITY,
        "any text, the same for all agents",
        "generated",
        "The secret by which agents authenticate each other. Set it for several machines "
        "([threat model](security.md)).",
        str,
        "",
    )
    tls: bool = _variable("SHOAL_TLS", SECURITY, "`on` or `off`", "`off`", "TLS between machines.", _is_on, False)
    certificates: str = _variable(
        "SHOAL_CERTIFICATES",
        SECURITY,
        "a folder",
        "unset",
        "The certificates for `SHOAL_TLS=on`, made by `shoal certificates`.",
        str,
        "",
    )
    timeline: str = _variable(
        "SHOAL_TIMELINE",
        TRACES,
        "a folder",
        "unset",
        "Each agent writes a Chrome trace there ([timeline](timeline.md)). `shoal run --timeline` sets it.",
        str,
        "",
    )
    record: str = _variable(
        "SHOAL_RECORD",
        TRACES,
        "a folder",
        "unset",
        "Each agent writes a membership log there. `shoal run --record` sets it.",
        str,
        "",
    )
    incarnation: str = _variable(
        INCARNATION,
        LAUNCHERS,
        "a number",
        "",
        "How many times this agent was restarted while the others continued. Above 0 the agent asks to rejoin.",
        str,
        "",
    )
    begin_with: str = _variable(
        BEGIN_WITH,
        LAUNCHERS,
        "a number",
        "",
        "The initial number of agents of an elastic job. The other ranks may join later.",
        str,
        "",
    )
    launcher: str = _variable(
        LAUNCHER,
        LAUNCHERS,
        "a name",
        "",
        "Identifies the launcher of this machine. A replacement has another name.",
        str,
        "",
    )
    watch: str = _variable(
        WATCH, LAUNCHERS, "a path", "", "The socket to which agents send their status for `--watch`.", str, ""
    )
    exit_notes: str = _variable(
        EXIT_NOTES,
        LAUNCHERS,
        "a path",
        "",
        "The memory file in which an agent notes why its script failed.",
        str,
        "",
    )


VARIABLES: tuple[Variable, ...] = tuple(entry.metadata["variable"] for entry in fields(Config))
NAMES = tuple(sorted(variable.name for variable in VARIABLES))


def read(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the variables. An empty variable counts as unset.

    Args:
        environ: The variables; those of this process by default.

    Raises:
        ValueError: A variable is invalid; the message has its name, its value, and the permitted values.
    """
    values = {}
    for entry in fields(Config):
        variable: Variable = entry.metadata["variable"]
        text = environ.get(variable.name, "")
        if text:
            try:
                values[entry.name] = variable.parse(text)
            except ValueError as error:
                raise ValueError(f"{variable.name}={text!r}: {error}") from None
    return Config(**values)


def misspelled(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The names in ``environ`` that Shoal does not read, each with the variable that it resembles."""
    unread = (name for name in environ if name.startswith("SHOAL_") and name not in (*NAMES, BUILD_NATIVE))
    nearest = {name: difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8) for name in sorted(unread)}
    return {name: found[0] for name, found in nearest.items() if found}
