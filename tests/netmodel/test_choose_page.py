"""The rules of docs/howto/choose.md, compared with the predictions of the network model over a grid of situations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import shoal.algorithms
from shoal.netmodel import Link, Network, Training, recommend
from shoal.topology import CecaPairs

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "choose.md").read_text()
INSIDE = Link(0.0, 4e9)
NICS = {"100 Mbit/s": Link(2e-2, 1.25e7), "1 Gbit/s": Link(5e-4, 1.25e8)}
SIZES = {"0.1 MB": 1e5, "100 MB": 1e8}
DIFFERENCES = {"equal": 0.0, "shuffled": 0.01, "different": 0.3}


def rule(size: int, local: int, nbytes: float, difference: float) -> str:
    """The rules of the page, in its order, as the beginning of a candidate's name."""
    if 1 < local < size:
        return "machines-by-turns" if nbytes < 1e6 and difference < 0.1 else "one-peer-exponential of machines"
    return "all-reduce" if difference >= 0.1 else "one-peer-exponential"


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("size, local", [(4, 1), (8, 2)])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("nic", NICS.values(), ids=NICS)
def test_the_rules_are_nearly_as_good_as_the_recommendation(size: int, local: int, nbytes: float, nic: Link) -> None:
    limit = float(re.findall(r"at\s+most\s+([\d.]+)\s+times\s+that\s+of\s+the\s+best", PAGE)[0])
    result = recommend(Network(size, nic, local, INSIDE), nbytes)
    for difference in DIFFERENCES.values():
        training = Training(difference)
        times = {
            one.name: one.seconds_per_step * training.times_the_steps(one.steps_apart)
            for one in replace(result, training=training).to_train
        }
        name = rule(size, local, nbytes, difference)
        chosen = min(time for other, time in times.items() if other == name or other.startswith(f"{name} ("))
        assert chosen <= limit * min(times.values()), (name, difference, times)


def test_the_code_of_the_rules_runs() -> None:
    """Each expression of the table about topologies, on eight agents."""
    names = {"shoal": shoal, "machines": 4}
    for code in re.findall(r"`topology=([^`]*)`", PAGE):
        schedule = eval(
            code.replace("shoal.size()", "8").replace("agents_per_machine=4", "agents_per_machine=2"), names
        )
        assert schedule.size in (4, 8)
    used = set(re.findall(r"\b(?:shoal\.optim\.)?(D\w+Optimizer)\b", PAGE))
    assert len(used) >= 4 and all(hasattr(shoal.optim, name) for name in used)
    assert CecaPairs(12).period == 4
    assert shoal.optim.CommunicationType.hierarchical_neighbor_allreduce
    named = re.findall(r"\| `(\w+)(?:\([^`]*\))?` \|", PAGE)
    assert {"ExactDiffusion", "QuasiGlobalMomentum"} <= set(named) and all(
        hasattr(shoal.algorithms, name) or hasattr(shoal.optim, name) for name in named
    )
    assert all(word in " ".join(PAGE.split()) for word in (*NICS, "0.1 and 100 MB", "equal, shuffled and different"))
