"""The main job: it runs under both launchers and in a fleet, learns, and its verdict says what was measured."""

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import shoal

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _data  # noqa: E402
import _picture  # noqa: E402
import _report  # noqa: E402
import train_digits  # noqa: E402
from support.limits import scaled  # noqa: E402

SHOAL_RUN = ("-m", "shoal", "run", "--no-prefix", "-n", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launched(launcher, picture, *options):
    script = [str(EXAMPLES / "train_digits.py"), "--picture", str(picture), *options]
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        capture_output=True,
        text=True,
        timeout=scaled(70),
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(printed):
    """The rows of the table at the end, without the times."""
    return [line.split() for line in printed.splitlines() if re.match(r"^ +(agent|their|consensus|sent)", line)]


def in_fleet(size, tmp_path, *options):
    args = train_digits.parse(["--epochs", "1", "--picture", str(tmp_path / "picture.png"), *options])
    return shoal.Fleet(size).run(train_digits.main, args)


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.timeout(150)  # each agent imports torch and scikit-learn, which takes long where others want the cores
def test_shoal_run_equals_a_fleet_and_prints_it(tmp_path):
    picture = tmp_path / "not yet there" / "digits.png"
    printed = launched(SHOAL_RUN, picture, "--epochs", "1")
    assert is_png(picture)
    assert f"Picture: {picture}" in printed
    rows = table(printed)
    assert [row[0] for row in rows] == ["agent", "agent", "their", "consensus", "sent"]
    atc, allreduce, alone = in_fleet(2, tmp_path)[0]
    for rank in range(2):
        assert rows[rank][4:] == [f"{100 * run.accuracy[-1][rank]:.1f}%" for run in (atc, allreduce, alone)]
    right = [int(run.correct.sum()) for run in (atc, allreduce)]
    (verdict,) = re.findall(r"Verdict: .* average model reads (\d+) of 449 test images, all-reduce (\d+)\.", printed)
    assert [int(one) for one in verdict] == right


def test_accuracy_improves(tmp_path):
    runs = in_fleet(2, tmp_path, "--epochs", "3", "--no-baselines", "--algorithm", "atc")[0]
    runs += in_fleet(2, tmp_path, "--epochs", "3", "--no-baselines", "--algorithm", "allreduce")[0]
    for run in runs:
        assert int(run.correct.sum()) > 0.8 * 449


@pytest.mark.soak
@pytest.mark.timeout(150)
def test_torchrun_and_shoal_run_train_equally(tmp_path):
    printed = [launched(launcher, tmp_path / "digits.png", "--epochs", "3") for launcher in (SHOAL_RUN, TORCHRUN)]
    assert table(printed[0]) == table(printed[1])


@pytest.mark.parametrize(
    ("algorithm", "topology", "size"),
    [
        ("atc", "one-peer", 3),
        pytest.param("atc", "star", 5, marks=pytest.mark.slow),
        pytest.param("awc", "ring", 4, marks=pytest.mark.slow),
        ("allreduce", "full", 2),
        ("awc", "one-peer", 1),
    ],
)
def test_every_agent_measures_the_same_fleet(tmp_path, algorithm, topology, size):
    results = in_fleet(size, tmp_path, "--algorithm", algorithm, "--topology", topology)
    assert is_png(tmp_path / "picture.png")
    names = [algorithm] if size == 1 else list(dict.fromkeys([algorithm, "allreduce", "alone"]))
    assert [run.algorithm for run in results[0]] == names
    for runs in results:
        assert [(run.accuracy, run.consensus_distance, run.bytes_sent) for run in runs] == [
            (run.accuracy, run.consensus_distance, run.bytes_sent) for run in results[0]
        ]


def test_adapt_then_combine_with_all_is_all_reduce(tmp_path):
    """Averaging x - lr m over all agents is x - lr (average of m), for momentum too, since it is linear."""
    full, reference, alone = in_fleet(3, tmp_path, "--topology", "full")[0]
    assert full.norm == pytest.approx(reference.norm, rel=1e-4)
    assert alone.norm != pytest.approx(reference.norm, rel=1e-4)
    assert full.consensus_distance[-1] < 1e-4 < alone.consensus_distance[-1]


def test_bytes_are_one_model_for_each_message(tmp_path):
    numbers = sum(parameter.numel() for parameter in train_digits.make_model().parameters())
    one_peer, allreduce, alone = in_fleet(4, tmp_path)[0]
    steps = -(-1348 // (4 * train_digits.BATCH))
    assert one_peer.bytes_sent == [4 * numbers * steps] * 4
    assert sum(allreduce.bytes_sent) == 6 * 4 * numbers * steps  # 2 (n - 1) / n of a model from each of n agents
    assert alone.bytes_sent == [0] * 4


def test_measuring_finds_the_distance_and_does_not_change_the_weights():
    def measured():
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, bias=False))
        weights = torch.full((640,), 1.0 + 2.0 * shoal.rank())
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        run = _report.Run("atc")
        train_digits.measure(model, weights, _data.load(2, 0.5, 0).test, run)
        return weights.tolist(), run.consensus_distance, run.norm

    for rank, (weights, distance, norm) in enumerate(shoal.Fleet(2).run(measured)):
        assert weights == [1.0 + 2.0 * rank] * 640
        assert distance == [pytest.approx(640**0.5)]  # each entry is 1 from the mean, 2
        assert norm == pytest.approx(2 * 640**0.5)


@pytest.mark.parametrize("agents", [1, 4, 60])
def test_shards_are_a_partition_of_the_training_images(agents):
    digits = _data.load(agents, alpha=0.5, seed=3)
    everything = torch.cat([*(shard.images for shard in digits.shards), digits.test.images]).flatten(1)
    assert sorted(map(tuple, everything.tolist())) == sorted(
        map(tuple, (torch.tensor(_data.load_digits().data) / 16).tolist())
    )
    assert min(len(shard) for shard in digits.shards) >= 1
    assert torch.tensor(digits.counts()).sum() == digits.total == len(everything) - len(digits.test)


def test_shards_are_uneven_and_the_same_for_the_same_seed():
    digits, again, other = (_data.load(4, alpha=0.5, seed=seed) for seed in (0, 0, 1))
    assert digits.counts() == again.counts() != other.counts()
    assert len({len(shard) for shard in digits.shards}) == 4
    assert any(count == 0 for row in digits.counts() for count in row)


def test_weights_make_the_mean_over_agents_the_mean_over_images():
    digits = _data.load(5, alpha=0.3, seed=1)
    by_agent = [digits.weight(rank) * shard.images.mean().item() for rank, shard in enumerate(digits.shards)]
    by_image = torch.cat([shard.images for shard in digits.shards]).mean().item()
    assert sum(by_agent) / 5 == pytest.approx(by_image, rel=1e-5)


def test_batches_iterate_over_a_small_shard_repeatedly_and_evenly():
    shard = _data.Images(torch.arange(5.0).view(5, 1, 1, 1), torch.arange(5))
    batches = shard.batches(3, seed=0)
    drawn = torch.cat([next(batches)[1] for _ in range(10)])
    assert torch.bincount(drawn).tolist() == [6] * 5
    assert drawn[:5].sort().values.tolist() == drawn[5:10].sort().values.tolist() == [0, 1, 2, 3, 4]


def verdict_on(right, right_of_reference, sent=(3e6, 1e6)):
    """The verdict on a model that reads the first ``right`` of 449 images."""
    runs = []
    for name, count, nbytes in zip(("atc", "allreduce"), (right, right_of_reference), sent, strict=True):
        run = _report.Run(name, accuracy=[[count / 449] * 2], consensus_distance=[0.0], norm=1.0, milliseconds=2.0)
        run.correct = torch.arange(449) < count
        run.bytes_sent = [int(nbytes)] * 2
        runs.append(run)
    args = train_digits.parse(["--picture", os.devnull])
    report = _report.Report(args, _data.load(2, 0.5, 0), shoal.topology.RingGraph(2), rank=1)
    return " ".join(report._verdict({run.algorithm: run for run in runs}))


def test_the_verdict_is_worse_for_lower_accuracy():
    assert "worse than all-reduce, by more than chance" in verdict_on(430, 440)
    assert "better than all-reduce, by more than chance" in verdict_on(440, 430)
    assert "as accurate as all-reduce" in verdict_on(435, 440)
    assert "sent 200% more, and a step took as much time" in verdict_on(435, 440)
    assert "sent 50% less" in verdict_on(435, 440, sent=(1e6, 2e6))


def test_chance_is_that_of_a_fair_coin():
    assert _report._chance(0, 5) == _report._chance(5, 0) == 2 / 32
    assert _report._chance(1, 3) == 2 * (1 + 4) / 16
    assert _report._chance(4, 4) == _report._chance(0, 0) == 1.0


def test_a_terminal_shows_every_epoch_of_every_agent():
    run = _report.Run("atc", accuracy=[[0.25, 0.5]], consensus_distance=[0.125])
    report = _report.Report(train_digits.parse([]), _data.load(2, 0.5, 0), shoal.topology.RingGraph(2), rank=0)
    terminal = io.StringIO()
    report._console = Console(file=terminal, force_terminal=True, width=100)
    with report:
        report.show(run)
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    for expected in ("25.0%", "50.0%", "epoch 1/20", "consensus distance 0.1"):
        assert expected in screen


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--alpha", "0"], ["--topology", "moebius"]])
def test_invalid_options_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        train_digits.parse(options)
    assert options[0] in capsys.readouterr().err


def test_the_survivors_print_results_and_draw_the_picture(tmp_path, capsys):
    picture = tmp_path / "digits.png"
    args = train_digits.parse(["--epochs", "2", "--picture", str(picture)])
    run = _report.Run("atc", consensus_distance=[1.0, 0.5], norm=1.0, milliseconds=2.0)
    run.correct, run.bytes_sent = torch.ones(449, dtype=torch.bool), [1000]
    with _report.Report(args, _data.load(2, 0.5, 0), shoal.topology.RingGraph(2), rank=1) as report:
        run.accuracy.append([0.5, 0.6])
        report.show(run)
        assert capsys.readouterr().out == ""
        run.accuracy.append([math.nan, 0.7])
        report.show(run)
    report.finish([run])
    printed = capsys.readouterr().out
    assert re.search(r"epoch 2/2 +accuracy 70.0% ", printed)
    assert re.search(r"agent 0 .* gone", printed) and re.search(r"agent 1 .* 70.0%", printed)
    assert "read 70.0%" in printed and is_png(picture)


def test_lines_of_agents_are_equally_wide_and_visible_where_they_overlap():
    run = _report.Run("atc", accuracy=[[0.5] * 4, [0.9] * 4], consensus_distance=[1.0, 0.5])
    axes = Figure().add_subplot()
    _picture._accuracy(axes, [run], _report.TITLES, 449)
    lines = axes.lines
    assert len({line.get_linewidth() for line in lines}) == 1
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 4
    assert [line.get_markevery()[0] for line in lines] == [0, 1, 2, 3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"agent {rank}" for rank in range(4)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "of 449 test images")


def test_the_picture_marks_each_killed_agent_where_its_accuracy_was_last_measured():
    accuracy = [[0.5] * 8, [0.6] * 8, [math.nan, *[0.7] * 7], [math.nan, 0.8, math.nan, *[0.8] * 5]]
    run = _report.Run("atc", accuracy=accuracy, consensus_distance=[4.0, 3.0, 2.0, 1.0])
    own, apart = Figure().subplots(1, 2)
    _picture._accuracy(own, [run], _report.TITLES, 449)
    _picture._disagreement(apart, [run], _report.TITLES)
    for axes, heights in ((own, [0.4, 0.3]), (apart, [3.0, 2.0])):
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert [line.get_xdata()[0] for line in crosses] == [2, 3]
        assert [line.get_ydata()[0] for line in crosses] == pytest.approx(heights)
        assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "an agent is killed"
    assert [text.get_text() for text in own.texts] == ["agent 0", "agent 2"]
