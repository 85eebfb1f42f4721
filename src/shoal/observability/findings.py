"""Findings in a breakdown: slow agents, slow links, long waits, and advice.

Each finding is a sentence with its figures, and a sentence of advice that follows from it. Causes of less than a few
percent of a step are not reported, because removing them gains little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles

from .breakdown import COMPUTING, COORDINATION, DATA, KINDS, OTHERS, SUMS, TRANSFER, Share
from .traces import Flow, Trace, names_of

SLOWER = 1.15
"""An agent that computes so many times as long as the others is reported."""
RARE = 2.0
"""A step of an agent that takes so many times its usual time is reported, if such steps are few."""
SLOW_LINK = 0.6
"""An edge with less than this part of the others' rate is reported."""
WORTH = 0.03
"""A smaller part of a step is not reported."""
MUCH = 0.15
"""More of a step than that is much."""
LARGE_BYTES = 1 << 16
"""The size of a message from which its rate is used."""
SMALL_BYTES = 1 << 14
"""The size up to which a message costs its overhead, and not its bytes."""
LEAST_MESSAGES = 3
"""The number of messages from which a rate is computed."""


@dataclass(frozen=True)
class Typical:
    """The average step of one agent.

    Attributes:
        rank, host: The agent.
        name: The rank, and whether the agent had been restarted.
        steps: The number of steps in the average.
        length: Seconds.
        into: Seconds, by kind.
        blamed: Seconds of waiting for others, by agent.
        usual: Seconds that it works in a step, computing and summing: the median.
    """

    rank: int
    host: str
    name: str
    steps: int
    length: float
    into: dict[str, float]
    blamed: dict[int, float]
    usual: float


@dataclass(frozen=True)
class EdgeStatistics:
    """An edge of the network, and its throughput.

    Attributes:
        source, destination: Ranks.
        hosts: Their machines.
        rate: Bytes per second of large messages: of the fastest tenth of them.
        messages: The number of messages.
    """

    source: int
    destination: int
    hosts: tuple[str, str]
    rate: float
    messages: int


@dataclass(frozen=True)
class Finding:
    """A finding with its advice, and the part of a step that the advice may gain."""

    what: str
    advice: str
    gain: float


def without_the_first(shares: Sequence[Share]) -> list[Share]:
    """The steps of each agent but its first, in which agents meet and memory is made; all, where there are few."""
    counts = Counter(share.trace for share in shares)
    first = {number: min(share.start for share in shares if share.trace == number) for number in counts}
    return [share for share in shares if counts[share.trace] < 4 or share.start > first[share.trace]]


def typical(traces: Sequence[Trace], shares: Sequence[Share]) -> list[Typical]:
    """A step of each agent, on the average."""
    by: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        by[share.trace].append(share)
    found, names = [], names_of(traces)
    for number, of in sorted(by.items()):
        steps = len(of)
        into = {kind: sum(share.into[kind] for share in of) / steps / 1e9 for kind in KINDS}
        blamed: Counter[int] = sum((share.blamed for share in of), Counter())
        usual = median(share.into[COMPUTING] + share.into[SUMS] for share in of) / 1e9
        found.append(
            Typical(
                traces[number].rank,
                traces[number].host,
                names[number],
                steps,
                mean(share.length for share in of) / 1e9,
                into,
                {rank: nanoseconds / steps / 1e9 for rank, nanoseconds in blamed.items()},
                usual,
            )
        )
    return found


def links(traces: Sequence[Trace], flows: Iterable[Flow]) -> list[EdgeStatistics]:
    """The edges over which large messages come in pieces, as they do between machines."""
    rates: dict[tuple[int, int], list[float]] = defaultdict(list)
    for flow in flows:
        took = flow.received.arrived - flow.sent.at
        if flow.received.arrived and took > 0 and flow.sent.nbytes >= LARGE_BYTES:
            rates[flow.source, flow.destination].append(flow.sent.nbytes / took * 1e9)
    found = []
    for (source, destination), of in sorted(rates.items()):
        if len(of) >= LEAST_MESSAGES:
            ends = traces[source], traces[destination]
            rate = quantiles(of, n=10, method="inclusive")[-1]
            found.append(EdgeStatistics(ends[0].rank, ends[1].rank, (ends[0].host, ends[1].host), rate, len(of)))
    return found


def sizes(flows: Iterable[Flow]) -> dict[int, tuple[int, int]]:
    """How many messages of tensors there were and how many bytes in them, by size: below 4, 16, 64 bytes and so on."""
    found: dict[int, tuple[int, int]] = {}
    for flow in flows:
        nbytes = flow.sent.nbytes
        if flow.sent.coordinates:
            continue
        limit = 4 ** ((nbytes.bit_length() + 1) // 2)
        count, total = found.get(limit, (0, 0))
        found[limit] = count + 1, total + nbytes
    return dict(sorted(found.items()))


def size_of(limit: int) -> str:
    """One of these sizes, for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if limit >= unit:
            return f"{limit // unit} {name}"
    return f"{limit} B"


def findings(
    traces: Sequence[Trace], shares: Sequence[Share], typicals: Sequence[Typical], edges: Sequence[EdgeStatistics]
) -> list[Finding]:
    """All findings, the most expensive first."""
    if not typicals:
        return []
    found = [*_stragglers(typicals), *_rare(traces, shares, typicals), *_slow_links(typicals, edges)]
    in_order = any(call.moves for trace in traces for call in trace.calls)
    found += _waits(typicals, bool(edges), in_order, any(finding.gain >= WORTH for finding in found))
    found.sort(key=lambda finding: -finding.gain)
    found = found or [_all_is_well(typicals)]
    return found if any(share.number for share in shares) else [_of_the_run(share) for share in found]


def _of_the_run(finding: Finding) -> Finding:
    """The finding with the whole run instead of a step, for runs without known steps."""
    what = finding.what
    for of_a_step in ("of a step", "of each step", "in a step"):
        what = what.replace(of_a_step, of_a_step[:3] + "the run")
    return replace(finding, what=what)


def _mean(typicals: Iterable[Typical], kind: str) -> float:
    """The part of a step that goes into something, over all agents."""
    return mean([agent.into[kind] / agent.length for agent in typicals if agent.length] or [0.0])


def _stragglers(typicals: Sequence[Typical]) -> list[Finding]:
    found = []
    for agent in typicals:
        others = [other for other in typicals if other is not agent]
        if not others:
            break
        theirs = median(other.usual for other in others)
        waits = mean(other.blamed.get(agent.rank, 0.0) for other in others)
        part = waits / agent.length if agent.length else 0.0
        if theirs and agent.usual > SLOWER * theirs and part > WORTH:
            found.append(
                Finding(
                    f"rank {agent.rank} ({agent.host}) computes {agent.usual / theirs - 1:.0%} longer than the others: "
                    f"{_time(agent.usual)} in a step, where they take {_time(theirs)}. They wait for it "
                    f"{_time(waits)} of each step, {part:.0%}",
                    f"give rank {agent.rank} less to do (a batch of {theirs / agent.usual:.0%} of the others'), look "
                    f"what else runs on {agent.host}, or let nobody wait for it: DistributedADPSGDOptimizer, or the "
                    "window optimizers, go on at each agent's own pace",
                    part,
                )
            )
    return found


def _rare(traces: Sequence[Trace], shares: Sequence[Share], typicals: Sequence[Typical]) -> list[Finding]:
    """Agents that are slow now and then."""
    found = []
    by: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        by[share.trace].append(share)
    length = mean(agent.length for agent in typicals)
    for (number, of), usual in zip(sorted(by.items()), typicals, strict=True):
        long = [share for share in of if share.into[COMPUTING] / 1e9 > RARE * usual.usual]
        extra = sum(share.into[COMPUTING] / 1e9 - usual.usual for share in long) / len(of)
        if len(of) >= 10 and 0 < len(long) <= len(of) / 4 and extra > WORTH * length:
            numbers = ", ".join(str(share.number) for share in long[:5]) + (" and more" if len(long) > 5 else "")
            trace = traces[number]
            found.append(
                Finding(
                    f"rank {trace.rank} ({trace.host}) computes more than {RARE:g} times as long as usual in "
                    f"{len(long)} of {len(of)} steps (steps {numbers}): {_time(extra)} of each step, on the average",
                    "look what the script does there that it does not do in every step: evaluating, saving, loading "
                    "data, the garbage collector; let all agents do it in the same step, or another thread do it",
                    extra / length if length else 0.0,
                )
            )
    return found


_LESS = "; compression= sends less over it, and overlap='backward' sends while the backward pass goes on"


def _slow_links(typicals: Sequence[Typical], edges: Sequence[EdgeStatistics]) -> list[Finding]:
    slow = [
        edge for edge in edges if edge.rate < SLOW_LINK * _fast([other.rate for other in edges if other is not edge])
    ]
    if not slow:
        return []
    usual = median(edge.rate for edge in edges if edge not in slow)
    waits = {agent.rank: (agent.into[DATA] + agent.into[TRANSFER]) / agent.length for agent in typicals if agent.length}
    who = _common_end(slow, edges)
    if who:
        rate, most = median(edge.rate for edge in slow), max(waits.values(), default=0.0)
        what = (
            f"all that {who} is slow: {_rate(rate)}, where other links carry {_rate(usual)}. Agents wait for data "
            f"{most:.0%} of a step, where it is worst"
        )
        advice = "look at its NIC and its cable; until then give it one neighbour at a time (one peer)"
        return [Finding(what, advice + _LESS, most)]
    found = []
    for link in sorted(slow, key=lambda edge: edge.rate):
        part = waits.get(link.destination, 0.0)
        edge = f"{link.source} -> {link.destination}"
        what = (
            f"the link {edge} ({link.hosts[0]} to {link.hosts[1]}) carries {_rate(link.rate)}, where others carry "
            f"{_rate(usual)}. Rank {link.destination} waits for data {part:.0%} of a step"
        )
        advice = f"take a topology without the edge {edge} (a star, say), or look at what lies between the two"
        found.append(Finding(what, advice + _LESS, part))
    return found


def _fast(rates: Sequence[float]) -> float:
    """The rate of a fast edge: more than three quarters of the edges are slower."""
    return quantiles(rates, n=4, method="inclusive")[-1] if len(rates) > 1 else max(rates, default=0.0)


def _common_end(slow: Sequence[EdgeStatistics], edges: Sequence[EdgeStatistics]) -> str:
    """The machine, or else the agent, whose outgoing, incoming or all edges are exactly the slow edges.

    Returns its name and which of the three; empty if there is none.
    """
    by_host = [edge.hosts for edge in edges]
    by_rank = [
        (f"rank {edge.source} ({edge.hosts[0]})", f"rank {edge.destination} ({edge.hosts[1]})") for edge in edges
    ]
    for ends in (by_host, by_rank):
        for name in dict.fromkeys(name for pair in ends for name in pair):
            away = {
                edge for edge, (source, destination) in zip(edges, ends, strict=True) if source == name != destination
            }
            to = {
                edge for edge, (source, destination) in zip(edges, ends, strict=True) if source != name == destination
            }
            for its, what in ((away | to, "sends or receives"), (away, "sends"), (to, "receives")):
                if len(its) > 1 and its == set(slow):
                    return f"{name} {what}"
    return ""


def _waits(typicals: Sequence[Typical], network: bool, in_order: bool, explained: bool) -> list[Finding]:
    """The causes of waits, without regard to the blamed agents."""
    found = []
    parts = {kind: _mean(typicals, kind) for kind in KINDS}
    data = parts[DATA] + parts[TRANSFER]
    if data > MUCH:
        halves = "half as many bytes, and half of this" if network else "fewer neighbours, and less of this"
        found.append(
            Finding(
                f"{data:.0%} of a step is waiting for data that are under way",
                "overlap (overlap='backward', or adapt with combine), compression=, a sparser topology (one peer at a "
                f"time: topology.OnePeerExponential), or an exchange every few steps: {halves}",
                data,
            )
        )
    if parts[OTHERS] > MUCH and not explained:
        found.append(
            Finding(
                f"{parts[OTHERS]:.0%} of a step is waiting for others, and nobody is slower than the rest as a rule: "
                "each waits for who happens to be last",
                "exchange with fewer at a time (one peer), every few steps (num_steps_per_communication), or at each "
                "agent's own pace (DistributedADPSGDOptimizer, the window optimizers); and see that no more agents "
                "than cores are on a machine",
                parts[OTHERS],
            )
        )
    if parts[SUMS] > MUCH:
        found.append(
            Finding(
                f"{parts[SUMS]:.0%} of a step is summing and copying",
                "a topology with fewer neighbours sums less (one peer at a time: one tensor instead of one for each)",
                parts[SUMS],
            )
        )
    if parts[COORDINATION] > MUCH and (in_order or not explained):
        what, advice = _IN_ORDER if in_order else _WITHOUT_ORDER
        found.append(
            Finding(f"{parts[COORDINATION]:.0%} of a step is coordination: {what}", advice, parts[COORDINATION])
        )
    return found


_WITHOUT_ORDER = (
    "announcing senders and receivers, or waiting until others have read",
    "give a schedule (topology=), of which all agents know every round; in pure push and pull, enable_topo_check=False "
    "where edges stay within the static topology",
)
_IN_ORDER = (
    "agreeing on one order of operations, which a process group needs",
    "ask for fewer operations at a time (larger bucket_bytes, the grouped_ operations), or leave SHOAL_TRANSPORT out: "
    "Shoal's own transports need no order",
)


def _all_is_well(typicals: Sequence[Typical]) -> Finding:
    computing = _mean(typicals, COMPUTING)
    return Finding(
        f"{computing:.0%} of a step is computing, and nobody is slow",
        "there is little to be gained from the exchange: a faster step is a faster model",
        0.0,
    )


def small_messages(flows: Sequence[Flow], steps: int) -> str:
    """A report on many small messages; empty if there are few."""
    small = sum(flow.sent.nbytes < SMALL_BYTES and not flow.sent.coordinates for flow in flows)
    agents = len({flow.source for flow in flows}) or 1
    each = small / agents / max(1, steps)
    if each < 20:
        return ""
    return (
        f"each agent sends {each:.0f} messages of less than {SMALL_BYTES // 1024} KiB in a step: join them (larger "
        "bucket_bytes, grouped_neighbor_allreduce), or submit them nonblocking before waiting for the first, and they "
        "travel together"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
