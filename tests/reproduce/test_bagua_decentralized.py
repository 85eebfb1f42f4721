"""BAGUA's decentralized algorithms: the whole command, small, and its verdict."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "reproduce"))

import bagua_decentralized as experiment
from _common import verdict

SEEDS = (0.0, 0.1, 0.2)
NBYTES = 1e6


def costs() -> experiment.Costs:
    return {way: dict(values) for way, values in experiment.modelled(NBYTES).items()}


@pytest.mark.slow
def test_the_command_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick", "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "are the network model's" in printed
    assert printed.count("Table of complexities") == 3
    assert re.search("agrees: all|differs in|not separated in", printed)


def test_an_algorithm_that_learns_less_is_reported() -> None:
    fine = {way: [90.0 + seed for seed in SEEDS] for way in experiment.SIMULATED}
    assert verdict(experiment.accuracy_claims(fine)) == "agrees: all 6 claims hold"
    worse = fine | {experiment.LOW: [88.0 + seed for seed in SEEDS]}
    assert verdict(experiment.accuracy_claims(worse)).startswith("differs in 1 of 6 claims: Accuracy, low precision:")


def test_other_costs_than_the_papers_are_reported() -> None:
    found = {way: {name: one * 3 for name, one in values.items()} for way, values in costs().items()}
    assert verdict(experiment.cost_claims(found, NBYTES)) == "agrees: all 6 claims hold"
    slow = found | {experiment.SHIFT_ONE: {"seconds": [1.0, 1.1, 1.2], "bytes": [2e6] * 3}}
    assert verdict(experiment.cost_claims(slow, NBYTES)).startswith(
        "differs in 2 of 6 claims: Bytes, shift_one: a machine sends 1 times"
    )


def test_a_table_with_another_growth_is_reported() -> None:
    tables = {size: experiment.busiest_node_table(size, 2, nbytes=NBYTES) for size in (8, 64)}
    assert verdict(experiment.complexity_claims(tables)) == "agrees: all 3 claims hold"
    wrong = {size: [replace(row, bandwidth="O(1)") for row in rows] for size, rows in tables.items()}
    assert verdict(experiment.complexity_claims(wrong)).startswith(
        "differs in 1 of 3 claims: Table of complexities: Par"
    )


def test_every_simulated_algorithm_trains() -> None:
    for way in experiment.SIMULATED:
        assert experiment.accuracy(way, 0, 2) > 30, way
