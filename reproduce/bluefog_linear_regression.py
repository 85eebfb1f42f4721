"""BlueFog paper, listings 1, 6 and 7: decentralized linear regression over static and time-varying graphs.

    python reproduce/bluefog_linear_regression.py

Agent i has A_i and b_i, and all agents minimise the sum of |A_i x - b_i|^2 / 2 (equation 15 of Ying et al. 2021,
arXiv:2111.04287). Their data differ, so each agent alone would find another x. The error is the mean over agents of the
relative distance from the least-squares solution of all data. Simulated agents take all rounds; real agents, threads of
a shoal.Fleet, run the programs of the three listings for some rounds, and must have the same iterates.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import shoal
import shoal.bluefog as bf
from _common import Claim, Report, arguments, below, exceeds, powers_of_ten
from shoal import topology_util
from shoal.algorithms import Algorithm, ExactDiffusion, GradientDescent, GradientTracking, PushDIGing
from shoal.algorithms.runs.run import Run
from shoal.sim import StackedFleet
from shoal.topology import ExponentialTwoGraph, OnePeerExponential, OnePeerGrid, RingGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, ROWS, COLUMNS = 16, 20, 10
GAMMA = 0.1
"""The step of all ways but those over the grid."""
GAMMA_GRID = 0.03
"""A smaller one: an agent that receives little in a round has a small push-sum weight, and moves further."""
EXACT = 1e-9
SMALLEST = 1e-16

DGD, DGD_ONE_PEER = "DGD, exponential (listing 1)", "DGD, one-peer exponential"
DIFFUSION = "exact diffusion, ring (listing 6)"
TRACKING, TRACKING_ONE_PEER = "gradient tracking, exponential", "gradient tracking, one-peer exponential"
PUSH_DIGING = "push-DIGing, one-peer grid"
PUSH_SUM = "push-sum gradient tracking, one-peer grid (listing 7)"
WAYS: dict[str, Callable[[], tuple[Algorithm, Any]]] = {
    DGD: lambda: (GradientDescent(GAMMA), ExponentialTwoGraph(AGENTS)),
    DIFFUSION: lambda: (ExactDiffusion(GAMMA), RingGraph(AGENTS)),
    TRACKING: lambda: (GradientTracking(GAMMA), ExponentialTwoGraph(AGENTS)),
    DGD_ONE_PEER: lambda: (GradientDescent(GAMMA), OnePeerExponential(AGENTS)),
    TRACKING_ONE_PEER: lambda: (GradientTracking(GAMMA), OnePeerExponential(AGENTS)),
    PUSH_SUM: lambda: (PushDIGing(GAMMA_GRID), OnePeerGrid(AGENTS)),
    PUSH_DIGING: lambda: (PushDIGing(GAMMA_GRID, atc=False), OnePeerGrid(AGENTS)),
}
STATIC = (DGD, DIFFUSION, TRACKING)
EXACT_WAYS = (DIFFUSION, TRACKING, TRACKING_ONE_PEER, PUSH_DIGING, PUSH_SUM)


class Problem:
    """The data of all agents, float64: A [agents, rows, columns] and b [agents, rows], and the solution [columns]."""

    def __init__(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=chance)

        self.A = draw(AGENTS, ROWS, COLUMNS) / ROWS**0.5
        own = draw(COLUMNS) + draw(AGENTS, COLUMNS)  # where each agent's own data have their least
        self.b = (self.A @ own.unsqueeze(-1)).squeeze(-1) + 0.1 * draw(AGENTS, ROWS)
        normal = (self.A.mT @ self.A).sum(0)
        self.solution: Tensor = torch.linalg.solve(normal, (self.A.mT @ self.b.unsqueeze(-1)).sum((0, 2)))

    def gradient(self, x: Tensor) -> Tensor:
        """Of each agent at its own x, [agents, columns]."""
        return (self.A.mT @ (self.A @ x.unsqueeze(-1) - self.b.unsqueeze(-1))).squeeze(-1)

    def error(self, x: Tensor) -> float:
        """The mean relative distance from the solution, at least 1e-16."""
        distance = (x - self.solution).norm(dim=-1).mean() / self.solution.norm()
        return max(float(distance), SMALLEST)


def simulate(problem: Problem, way: str, steps: int, every: int = 10) -> Run:
    """A run of a way; its records have the column ``error``."""
    algorithm, topology = WAYS[way]()
    with warnings.catch_warnings():
        # An even ring with weights of a third: at the eigenvalue -1/3, where full gradients of a strongly convex sum
        # suffice. Shoal warns of it.
        warnings.filterwarnings("ignore", message=".*eigenvalues of W to be above -1/3.*")
        return StackedFleet(topology).run(
            algorithm,
            torch.zeros(AGENTS, COLUMNS, dtype=torch.float64),
            problem.gradient,
            steps,
            measure=lambda x: {"error": problem.error(x)},
            every=every,
        )


# The listings, each the program of one agent: x is [columns, 1].


def listing_1(A: Tensor, b: Tensor, maxite: int) -> Tensor:
    bf.set_topology(bf.ExponentialTwoGraph(bf.size()))
    x = A.new_zeros(COLUMNS, 1)
    for _ in range(maxite):
        grad_local = A.t().mm(A.mm(x) - b)
        x = bf.neighbor_allreduce(x - GAMMA * grad_local)
    return x


def listing_6(A: Tensor, b: Tensor, maxite: int) -> Tensor:
    bf.set_topology(topology_util.RingGraph(bf.size()))
    x = A.new_zeros(COLUMNS, 1)
    pre_psi = x
    for _ in range(maxite):
        psi = x - GAMMA * A.t().mm(A.mm(x) - b)
        x = bf.neighbor_allreduce(psi + x - pre_psi)
        pre_psi = psi
    return x


def listing_7(A: Tensor, b: Tensor, maxite: int) -> Tensor:
    bf.set_topology(topology_util.MeshGrid2DGraph(bf.size()), is_weighted=True)
    neighbours = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    x = A.new_zeros(COLUMNS, 1)
    u, v, grad = x, torch.ones_like(x), A.t().mm(A.mm(x) - b)
    y = grad
    for _ in range(maxite):
        destinations, sources = next(neighbours)
        own = 1 / (len(destinations) + 1)
        weights = own, dict.fromkeys(sources, 1), dict.fromkeys(destinations, own)
        u = bf.neighbor_allreduce(u - GAMMA_GRID * y, *weights)
        v = bf.neighbor_allreduce(v, *weights)
        x = u / v
        new = A.t().mm(A.mm(x) - b)
        y = bf.neighbor_allreduce(y + new - grad, *weights)
        grad = new
    return x


LISTINGS = {DGD: listing_1, DIFFUSION: listing_6, PUSH_SUM: listing_7}


def difference_of_real_agents(problem: Problem, rounds: int) -> dict[str, float]:
    """The largest difference between the x of real agents after the rounds and that of simulated ones, by way."""
    found = {}
    for way, listing in LISTINGS.items():

        def agent(listing: Callable[[Tensor, Tensor, int], Tensor] = listing) -> Tensor:
            rank = bf.rank()
            return listing(problem.A[rank], problem.b[rank].unsqueeze(-1), rounds)

        real = torch.stack(shoal.Fleet(AGENTS).run(agent)).squeeze(-1)
        found[way] = float((real - simulate(problem, way, rounds).estimate).abs().max())
    return found


def claims(errors: dict[str, Sequence[float]], differences: dict[str, float]) -> list[Claim]:
    """The paper's statements against the last errors of each way, one for each seed, and real agents' differences."""
    log = {way: torch.tensor(values).log10().tolist() for way, values in errors.items()}
    worst = max(differences.values())
    return [
        exceeds(
            "Exact diffusion corrects the bias of DGD (appendix A)", log[DGD], log[DIFFUSION], by=3, unit=" (log10)"
        ),
        *(
            below(f"{way}: reaches the solution (section IV-A, appendices A, B)", errors[way], EXACT)
            for way in EXACT_WAYS
        ),
        Claim(
            "The programs of listings 1, 6 and 7 are the equations 16-17, 24-26 and 27-31",
            f"largest difference between real and simulated agents {worst:.1g}, limit 1e-9",
            worst < 1e-9,
        ),
    ]


def draw(figure: Figure, curves: dict[str, Tensor], rounds: dict[str, Tensor]) -> None:
    """Errors against exchanges; the lines are geometric means over seeds, the bands the range of the seeds."""
    for axes, title, ways in zip(
        figure.subplots(1, 2, sharey=True),
        ("static graphs", "graphs that change in every round"),
        (STATIC, [way for way in WAYS if way not in STATIC]),
        strict=True,
    ):
        for way in ways:
            log = curves[way].log10()
            style = "--" if way == PUSH_DIGING else "-"  # it lies on the line of push-sum gradient tracking
            (line,) = axes.plot(rounds[way], 10 ** log.mean(0), style, label=way, linewidth=1.6)
            axes.fill_between(rounds[way], 10 ** log.amin(0), 10 ** log.amax(0), alpha=0.2, color=line.get_color())
        axes.set(title=title, xlabel="exchanges", yscale="log", ylim=(1e-16, 1e4))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.axes[0].set_ylabel("relative distance from the solution")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, seeds=10).parse_args(argv)
    torch.set_num_threads(1)  # agents are threads, or small tensors
    report = Report(__file__, "BlueFog: linear regression (listings 1, 6, 7)", args)
    steps = 1500 if args.quick else 3000
    curves: dict[str, Tensor] = {}
    rounds: dict[str, Tensor] = {}
    for way in WAYS:
        runs = [simulate(Problem(seed), way, steps) for seed in range(args.seeds)]
        curves[way] = torch.stack([run.column("error") for run in runs])
        rounds[way] = runs[0].column("rounds")
        report.say(f"{way}: error {powers_of_ten(curves[way][:, -1].tolist())} after {steps} steps")
    report.say("real agents run the listings")
    differences = difference_of_real_agents(Problem(0), 20 if args.quick else 100)
    report.table(
        f"Mean relative error of {AGENTS} agents after {steps} steps, and the exchanges to an error of 1e-6",
        ["algorithm and graph", "error", "exchanges to 1e-6"],
        [[way, powers_of_ten(curves[way][:, -1].tolist()), reached(curves[way], rounds[way])] for way in WAYS],
    )
    report.note(
        f"Each of {AGENTS} agents has {ROWS} x {COLUMNS} data. The step is {GAMMA}, over the grid {GAMMA_GRID}. The "
        "ring has the eigenvalue -1/3, the boundary of exact diffusion. There Shoal warns, and full gradients of a "
        "strongly convex sum converge."
    )
    report.claim(claims({way: curve[:, -1].tolist() for way, curve in curves.items()}, differences))
    report.figure(lambda figure: draw(figure, curves, rounds), (10, 4.2))
    return report.finish()


def reached(curves: Tensor, rounds: Tensor) -> str:
    """The exchanges until the geometric mean over seeds is below 1e-6; a dash if it never is."""
    under = (curves.log10().mean(0) < -6).nonzero()
    return f"{int(rounds[under[0, 0]])}" if len(under) else "-"


if __name__ == "__main__":
    sys.exit(main())
