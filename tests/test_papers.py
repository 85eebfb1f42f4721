"""The page of the papers' reports: it equals the code's output, and its statements on the figures hold."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.netmodel import Network, simulate

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from papers import clusters, page  # noqa: E402
from papers.clusters import RESNET_50, RING_STAR_MODELS, STYLES, compute_for, exposed  # noqa: E402

PAGE = ROOT / "docs" / "topologies" / "papers.md"
HOROVOD = STYLES[0].name


@pytest.fixture(scope="module")
def of_16() -> dict[str, clusters.Figure12]:
    return {one.workload.name: one for one in clusters.figure_12(16)}


@pytest.mark.soak
def test_the_page_is_the_commands_output() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "papers"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == PAGE.read_text(), "run python benchmarks/papers > docs/topologies/papers.md"


@pytest.mark.parametrize("section", [page.ring_star, page.summit, page.cost_tables])
def test_a_section_of_the_page_is_the_codes_output(section) -> None:
    assert page.text(section()) in PAGE.read_text()


@pytest.mark.soak
def test_the_rows_of_figure_12_for_few_gpus_are_those_of_the_page() -> None:
    on_page = PAGE.read_text().splitlines()
    (table,) = (part for part in page.figure_12((4, 16)) if part.startswith("| model |"))
    head, rule, *rows = table.splitlines()
    assert head in on_page and rule in on_page and len(rows) == 6
    for row in rows:
        assert row in on_page


def test_every_assumption_has_a_source_and_is_on_the_page() -> None:
    text = PAGE.read_text()
    for assumptions in (
        clusters.FIGURE_12_ASSUMPTIONS,
        clusters.RING_STAR_ASSUMPTIONS,
        clusters.SUMMIT_ASSUMPTIONS,
    ):
        for one in assumptions:
            assert one.source and f"- {one.what}" in text and f"({one.source})" in text


def test_one_machine_of_gpus_hides_all_of_its_messages() -> None:
    for one in clusters.figure_12(8):
        assert min(one.efficiency.values()) > 0.99
        assert one.speedup == pytest.approx((1.0, 1.0), abs=0.01)


def test_resnet_50_keeps_the_share_that_the_paper_reports(of_16: dict[str, clusters.Figure12]) -> None:
    one = of_16[RESNET_50.name]
    assert min(share for name, share in one.efficiency.items() if name != HOROVOD) > 0.95


def test_no_style_is_slower_than_horovod_and_some_are_faster(of_16: dict[str, clusters.Figure12]) -> None:
    for value in of_16.values():
        assert value.speedup[0] > 0.99
    assert of_16["VGG-16"].speedup[1] > 1.2
    assert of_16["BERT-large"].speedup[0] > 1.2


def test_larger_models_keep_less(of_16: dict[str, clusters.Figure12]) -> None:
    for style in STYLES:
        shares = [of_16[one.name].efficiency[style.name] for one in clusters.FIGURE_12]
        assert shares[0] >= shares[1] - 1e-9 and shares[1] >= shares[2] - 1e-9


def test_overlapping_with_all_of_the_computation_is_never_slower(of_16: dict[str, clusters.Figure12]) -> None:
    for value in of_16.values():
        assert value.efficiency["BlueFog AWC"] >= value.efficiency["BlueFog ATC"]
        assert value.efficiency["BlueFog H-AWC"] >= value.efficiency["BlueFog H-ATC"]


def test_a_machine_sends_one_model_a_step_also_with_leaders() -> None:
    """Inner-outer and hierarchical styles put as many bytes on the NIC: a model each way, in every step."""
    network = clusters.figure_12_network(32)
    for style in STYLES[1:]:
        for step in style.steps(network, 100.0, 6):
            leaving = [
                one.nbytes[(one.source // 8 != one.destination // 8) & (one.source // 8 == 0)].sum() for one in step
            ]
            assert sum(leaving) == pytest.approx(100.0)


def test_figure_12_is_bounded_by_the_bytes_that_go_through_a_nic(of_16: dict[str, clusters.Figure12]) -> None:
    """BERT-large, 1.38 GB at 25 Gbit/s: no style that sends a model a step can take less than 0.44 s."""
    seconds = clusters.BERT_LARGE.nbytes / (25 * clusters.GBIT)
    bound = clusters.BERT_LARGE.compute / seconds
    result = of_16[clusters.BERT_LARGE.name]
    # The first steps are not counted, so that a message of theirs may be missing from 32.
    assert max(result.efficiency.values()) <= bound * (1 + 1 / 32)
    assert result.efficiency["BlueFog AWC"] == pytest.approx(bound, rel=0.02)


def test_the_page_describes_ring_star_seconds_correctly() -> None:
    small, large = RING_STAR_MODELS["ResNet-20"], RING_STAR_MODELS["VGG-16 (CIFAR)"]
    for size in (32, 64):
        reduced, *others = clusters.ring_star_seconds(size, small).values()
        assert reduced > max(others)
        reduced, ring, random, star = clusters.ring_star_seconds(size, large).values()
        assert reduced < ring < star < random


def test_ring_star_seconds_of_the_ring_equal_an_explicit_calculation() -> None:
    """A node's NIC transfers a model each way to both adjacent nodes, of its first and its last worker."""
    seconds = clusters.ring_star_seconds(16, 60e6)["Ring"]
    assert seconds == pytest.approx(2 * 60e6 / 1.25e9 + 100e-6, rel=0.01)


def test_ring_star_formulas_are_those_of_the_papers_table() -> None:
    result = clusters.ring_star_formulas(64, 60e6)
    transfer = 2 * 60e6 / 1.25e9
    assert list(result.values()) == pytest.approx(
        [2 * 63 * 100e-6 + transfer, 2e-4 + transfer, 2e-4 + transfer, 8e-4 + transfer]
    )


def test_a_ring_of_all_of_summit_takes_its_textbook_time() -> None:
    """A share waits for the one before it: five hops inside a node, and one between."""
    share = 880e6 / 27_600
    hop = (5 * (share / 50e9 + 5e-6) + (share / 23e9 + 5e-6)) / 6
    assert clusters.summit_allreduces(27_600)["one ring of all GPUs"] == pytest.approx(2 * 27_599 * hop, rel=0.01)


def test_a_ring_of_few_gpus_is_simulated_in_full() -> None:
    network = clusters.summit_network(48)
    (result, _) = clusters.summit_allreduces(48).values()
    assert result == pytest.approx(simulate(network, [clusters.ring_allreduce(48, 880e6)]).seconds, rel=0.05)


def test_trees_between_nodes_are_full_after_shares_inside() -> None:
    """4,600 nodes, 12 levels: 2 x 12 + 63 exchanges of four pieces at a NIC, and twice five sixths inside a node."""
    piece = 880e6 / 2 / clusters.SUMMIT_CHUNKS
    exchange = 4 * piece / 23e9 + 5e-6
    inside = 2 * (5 / 6 * 880e6 / 50e9 + 5e-6)
    expected = (2 * 12 + clusters.SUMMIT_CHUNKS - 1) * exchange + inside
    result = clusters.summit_allreduces(27_600)["shares inside nodes, two trees between"]
    assert result == pytest.approx(expected, rel=0.01)


def test_synchronous_exchanges_of_trees_are_near_a_simulation_by_chunks() -> None:
    network = Network(64, clusters.summit_network(6).between)
    exchanges = clusters.tree_allreduce(64, clusters.SUMMIT_BYTES, 32)
    played = simulate(network, [exchanges]).seconds
    full = simulate(network, [[max(exchanges, key=len)]] * 2).seconds_per_step()
    assert 0.7 * played < len(exchanges) * full < 1.3 * played


@pytest.mark.parametrize("overlap", [0.0, 0.3, 2 / 3])
@pytest.mark.parametrize("share", [0.6, 0.93])
def test_a_step_that_is_long_enough_has_the_share(overlap: float, share: float) -> None:
    compute = compute_for(0.1, share, overlap)
    assert exposed(0.1, compute, overlap) == pytest.approx(share)
    assert exposed(0.1, 2 * compute, overlap) > share


def test_lag_hides_an_all_reduce_that_is_shorter_than_a_step_and_no_longer_one() -> None:
    assert exposed(0.1, 0.15, 0.0) == pytest.approx(0.6)
    assert exposed(0.1, 0.15, 0.0, lag=1) == 1.0
    assert exposed(0.3, 0.15, 0.0, lag=1) == pytest.approx(0.5)


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(page, "page", lambda: page.text(page.ring_star()))
    runpy.run_path(str(ROOT / "benchmarks" / "papers"), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed) > 1000 and printed in PAGE.read_text()
