"""BlueFog paper, section IV-C: asynchronous push-sum with delays finds the mean, equations 18 to 21 and listing 3.

    python reproduce/bluefog_push_sum.py

Simulated agents are active at random, the fastest ten times as often as the slowest, and every message takes its own
number of ticks. Push-sum adds up pushed shares of x and of p, and x / p is to become the mean; plain asynchronous
averaging mixes the latest values that have arrived. Then real agents, threads of a shoal.Fleet, run listing 3 through
windows, each at its own pace (Ying et al. 2021, arXiv:2111.04287).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx
import torch
from torch import Tensor

import shoal
import shoal.bluefog as bf
from _common import Claim, Interval, Report, arguments, below, powers_of_ten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, COLUMNS = 16, 10
DELAYS = (1, 4, 16, 64)
SLOWEST = 0.1
"""Share of the ticks in which the slowest agent is active; the fastest is in all."""
EXACT = 1e-9
SMALLEST = 1e-17
REAL_AGENTS = 6


def irregular(size: int) -> nx.DiGraph:
    """A one-way ring with chords: out-degrees 1 to 3, and other in-degrees."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((i, (i + hop) % size) for i in range(size) for hop in range(1, 2 + i % 3))
    return graph


@dataclass(frozen=True)
class Run:
    """One simulated run.

    Attributes:
        error: Largest relative distance of an agent's x / p from the mean, every 10 ticks.
        plain: The same of plain averaging, after the last tick.
        spread: Largest relative distance of plain averaging's agents from each other, after the last tick.
        drift: Largest change of the total of x and of p, with the messages on their way.
    """

    error: list[float]
    plain: float
    spread: float
    drift: float


def simulate(seed: int, longest: int, ticks: int) -> Run:
    """Delays are drawn from 1 to ``longest`` ticks for every message.

    Args:
        seed: Of the values, the activity and the delays.
        longest: The longest delay, in ticks.
        ticks: How many.
    """
    chance = torch.Generator().manual_seed(seed)
    graph = irregular(AGENTS)
    source, destination = torch.tensor(sorted(graph.edges)).unbind(1)
    out_degree = torch.tensor([graph.out_degree(i) for i in range(AGENTS)])
    in_degree = torch.tensor([graph.in_degree(i) for i in range(AGENTS)])
    share = 1.0 / (out_degree + 1).to(torch.float64).unsqueeze(1)  # columns of W sum to 1
    start = torch.randn(AGENTS, COLUMNS, dtype=torch.float64, generator=chance)
    mean = start.mean(0)
    active_share = SLOWEST ** (torch.arange(AGENTS) / (AGENTS - 1))

    x = torch.cat([start, torch.ones(AGENTS, 1, dtype=torch.float64)], 1)  # x and p
    coming = torch.zeros(longest + 1, AGENTS, COLUMNS + 1, dtype=torch.float64)  # by tick of arrival
    window = torch.zeros_like(x)
    total, drift, error = x.sum(0), 0.0, []
    plain = start.clone()
    latest = start[source].clone()  # of each edge, what has arrived last
    sent_at = torch.full((len(source),), -1)
    pending: list[list[tuple[Tensor, Tensor, Tensor, int]]] = [[] for _ in range(longest + 1)]
    for tick in range(ticks):
        now = tick % (longest + 1)
        window += coming[now]
        coming[now] = 0
        for edges, some, values, sent in pending[now]:
            newer = sent_at[edges] < sent  # a message may overtake another
            latest[edges[newer]], sent_at[edges[newer]] = values[some][newer], sent
        pending[now] = []

        active = torch.rand(AGENTS, generator=chance) < active_share
        pushes = active[source].nonzero().view(-1)
        delay = torch.randint(1, longest + 1, (len(pushes),), generator=chance)
        slots = (tick + delay) % (longest + 1)
        coming.index_put_((slots, destination[pushes]), (share * x)[source[pushes]], accumulate=True)
        x = torch.where(active.unsqueeze(1), share * x + window, x)
        window[active] = 0

        # Plain averaging, by rows that sum to 1, of the latest values; the same activity and delays.
        for slot in slots.unique().tolist():
            edges = pushes[slots == slot]
            pending[slot].append((edges, source[edges], plain, tick))
        heard = torch.zeros_like(plain).index_add_(0, destination, latest)
        plain = torch.where(active.unsqueeze(1), (plain + heard) / (in_degree + 1).unsqueeze(1), plain)

        if tick % 10 == 9:
            drift = max(drift, float((x.sum(0) + window.sum(0) + coming.sum((0, 1)) - total).abs().max()))
            error.append(_error(x[:, :-1] / x[:, -1:], mean))
    return Run(error, _error(plain, mean), _error(plain, plain.mean(0)), drift)


def _error(x: Tensor, mean: Tensor) -> float:
    return max(float((x - mean).norm(dim=1).max() / mean.norm()), SMALLEST)


def listing_3(x: Tensor, interval: float, counts: list[int], steps: int) -> Tensor:
    """The program of one agent, which takes a step every ``interval`` seconds until all have taken ``steps``.

    The agents are threads of one process: ``counts`` has the steps of all of them, by rank.
    """
    bf.set_topology(irregular(bf.size()))
    x_ext = torch.cat([x, torch.ones(1, dtype=x.dtype)])
    bf.win_create(x_ext, name="x_ext", zero_init=True)
    outdegree = len(bf.out_neighbor_ranks())
    dst_weights = dict.fromkeys(bf.out_neighbor_ranks(), 1.0 / (outdegree + 1))
    self_weight = 1 / (1 + outdegree)
    following = time.monotonic()
    while min(counts) < steps:
        bf.win_accumulate(x_ext, name="x_ext", self_weight=self_weight, dst_weights=dst_weights, require_mutex=True)
        bf.win_update_then_collect(name="x_ext")
        counts[bf.rank()] += 1
        following = max(following + interval, time.monotonic())
        time.sleep(max(0.0, following - time.monotonic()))
    bf.barrier()  # agents end at different times
    bf.win_update_then_collect(name="x_ext")
    bf.win_free(name="x_ext")
    return x_ext


@dataclass(frozen=True)
class RealRun:
    """Errors of real agents as in :class:`Run`, and the steps of each, the fastest first."""

    error: float
    drift: float
    steps: list[int]


def real(seed: int, steps: int, fastest: float) -> RealRun:
    """Real agents; the slowest makes ``steps``, at ten times the ``fastest`` agent's seconds for a step."""
    chance = torch.Generator().manual_seed(seed)
    start = torch.randn(REAL_AGENTS, COLUMNS, dtype=torch.float64, generator=chance)
    counts = [0] * REAL_AGENTS

    def agent() -> Tensor:
        interval = fastest * (1 / SLOWEST) ** (bf.rank() / (REAL_AGENTS - 1))
        return listing_3(start[bf.rank()], interval, counts, steps)

    x = torch.stack(shoal.Fleet(REAL_AGENTS).run(agent))
    totals = torch.cat([start.sum(0), torch.tensor([REAL_AGENTS], dtype=torch.float64)])
    drift = float((x.sum(0) - totals).abs().max())
    return RealRun(_error(x[:, :-1] / x[:, -1:], start.mean(0)), drift, counts)


def claims(simulated: dict[int, Sequence[Run]], runs: Sequence[RealRun]) -> list[Claim]:
    """The paper's statements against simulated runs, by the longest delay, and runs of real agents."""
    plain = [run.plain for several in simulated.values() for run in several]
    spread = [run.spread for several in simulated.values() for run in several]
    drift = max(run.drift for several in (*simulated.values(), runs) for run in several)
    ahead = Interval.of(run.steps[0] / run.steps[-1] for run in runs)
    return [
        *(
            below(f"Push-sum finds the unbiased mean with delays of 1 to {longest} ticks (section IV-C)", errors, EXACT)
            for longest, errors in ((one, [run.error[-1] for run in several]) for one, several in simulated.items())
        ),
        Claim(
            "Plain asynchronous averaging is biased at every agent (section IV-C)",
            f"agents agree to {max(spread):.1g}, and are at least {min(plain):.2g} from the mean",
            min(plain) > 0.01 and max(spread) < 0.01 * min(plain),
        ),
        Claim(
            "The sum of x and of p over all agents and windows keeps its value (remark on listing 3)",
            f"largest change {drift:.1g}, limit 1e-10",
            drift < 1e-10,
        ),
        below("Listing 3 finds the mean with real agents at different paces", [run.error for run in runs], EXACT),
        Claim(
            "A fast agent does not wait for slow ones (section IV-C)",
            f"the fastest takes {ahead:.2g} times the steps of the slowest, limit 2",
            min(run.steps[0] / run.steps[-1] for run in runs) > 2,
        ),
    ]


def draw(figure: Figure, simulated: dict[int, Sequence[Run]]) -> None:
    axes = figure.subplots()
    for longest, runs in simulated.items():
        log = torch.tensor([run.error for run in runs]).log10()
        ticks = 10 * torch.arange(1, log.shape[1] + 1)
        (line,) = axes.plot(ticks, 10 ** log.mean(0), label=f"push-sum, delays of 1 to {longest} ticks", linewidth=1.6)
        axes.fill_between(ticks, 10 ** log.amin(0), 10 ** log.amax(0), alpha=0.2, color=line.get_color())
    plain = [run.plain for runs in simulated.values() for run in runs]
    axes.axhspan(min(plain), max(plain), color="#9aa5b1", alpha=0.5, label="plain averaging, at the end", linewidth=0)
    axes.set(xlabel="ticks", ylabel="relative distance from the mean", yscale="log", ylim=(1e-17, 1e4))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, seeds=5, quick_seeds=2).parse_args(argv)
    torch.set_num_threads(1)  # agents are threads, or small tensors
    report = Report(__file__, "BlueFog: asynchronous push-sum with delays (equations 18 to 21)", args)
    simulated: dict[int, list[Run]] = {}
    for longest in DELAYS[:2] if args.quick else DELAYS:
        ticks = 2500 if args.quick else 3000 + 200 * longest
        simulated[longest] = [simulate(seed, longest, ticks) for seed in range(args.seeds)]
        errors = powers_of_ten(run.error[-1] for run in simulated[longest])
        report.say(f"simulated, delays of 1 to {longest} ticks: error {errors}")
    runs = [real(seed, 60 if args.quick else 150, 1e-3 if args.quick else 3e-3) for seed in range(args.seeds)]
    report.say(f"real agents: error {powers_of_ten(run.error for run in runs)}, steps {runs[0].steps}")
    report.table(
        f"{AGENTS} simulated agents: largest relative distance of an agent from the mean, at the end",
        ["longest delay", "push-sum, x / p", "plain averaging", "ticks of push-sum to 1e-6"],
        [
            [
                f"{longest} ticks",
                powers_of_ten(run.error[-1] for run in several),
                powers_of_ten(run.plain for run in several),
                f"{Interval.of(_ticks_to(run) for run in several):.0f}",
            ]
            for longest, several in simulated.items()
        ],
    )
    report.table(
        f"{REAL_AGENTS} real agents: listing 3 through windows",
        ["seed", "error", "change of the sums", "steps of each agent"],
        [
            [seed, f"{run.error:.1g}", f"{run.drift:.1g}", ", ".join(map(str, run.steps))]
            for seed, run in enumerate(runs)
        ],
    )
    report.claim(claims(simulated, runs))
    report.figure(lambda figure: draw(figure, simulated), (8, 4.2))
    return report.finish()


def _ticks_to(run: Run) -> float:
    """Ticks until the error is below 1e-6; infinite if it never is."""
    return next((10.0 * number for number, error in enumerate(run.error, 1) if error < 1e-6), float("inf"))


if __name__ == "__main__":
    sys.exit(main())
