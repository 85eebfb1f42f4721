"""``benchmarks/training.py``: its models, its arithmetic, its verdicts, and the whole command on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import shoal
from shoal.bench.measurement import Figures
from support.namespaces import require_namespaces

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import _models  # noqa: E402
import _table2  # noqa: E402
import _training_agent  # noqa: E402
import _training_picture  # noqa: E402
import _training_tables as tables  # noqa: E402
import _ways  # noqa: E402
import training  # noqa: E402

ATC, AWC, OVERLAP = (f"{way}, {_ways.ONE_PEER}" for way in (_ways.ATC, _ways.AWC, _ways.OVERLAP))


def launched(*options, timeout):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "training.py"), "--quick", *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(kind, agents, seconds):
    """A comparison as an agent tells it, every repetition alike."""
    values = {name: [value] * 3 for name, value in seconds.items()}
    return [
        Figures(kind, 1000, agents, values),
        Figures(f"{kind}: batch", 1000, agents, {"images or rows of each agent": [8.0]}),
        Figures(f"{kind}: shares", 1000, agents, {"8": [0.5]}),
    ]


def rows(figures, judged=True):
    return {row.what.split(": ")[1]: row for row in tables.tables_of(figures, judged)[0].rows}


# What is trained


@pytest.mark.parametrize(
    ("work", "millions", "layers"),
    [(_models.mlp(), 50.36, 12), (_models.resnet20(), 0.2697, 20), (_models.vgg16(), 14.73, 14)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_model_has_its_stated_size(work, millions, layers):
    model = work.make()
    assert _models.nbytes_of(model) / 4e6 == pytest.approx(millions, rel=1e-3)
    assert sum(param.dim() > 1 for param in model.parameters()) == layers
    inputs, labels = work.batch(2, rank=0)
    assert model(inputs).shape == (2, work.labels)
    assert labels.max() < work.labels


@pytest.mark.parametrize("megabytes", training.VOLUMES)
def test_an_mlp_of_a_given_size_has_it(megabytes):
    with torch.device("meta"):
        assert _models.nbytes_of(_models.mlp_of(megabytes * 10**6).make()) == pytest.approx(megabytes * 1e6, rel=5e-3)


def test_agents_start_with_the_same_weights_and_have_their_own_batches():
    work = _models.resnet20()
    first, second = work.make().state_dict(), work.make().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(work.batch(2, 1)[0], work.batch(2, 1)[0])
    assert not torch.equal(work.batch(2, 0)[0], work.batch(2, 1)[0])


def test_agents_share_each_epoch_of_the_digits_between_them():
    digits, agents = _table2.Digits(seed=1), 4
    streams = [digits.batches(rank, agents) for rank in range(agents)]
    seen = [next(stream)[0].flatten(1) for _ in range(digits.steps(agents)) for stream in streams]
    images = torch.cat(seen)
    train, test = (part[0].flatten(1) for part in (digits._train, digits._test))
    # Some digits look alike to the last pixel, so they are counted by their pixels.
    counted, available = Counter(_image_bytes(images)), Counter(_image_bytes(train))
    assert len(images) == agents * digits.steps(agents) * _table2.BATCH > 0.9 * len(train)
    assert counted <= available
    assert len(train) + len(test) == 1797


def _image_bytes(images):
    return [image.numpy().tobytes() for image in images]


@pytest.mark.parametrize("way", [_ways.ATC, _ways.AWC])
def test_exchanges_over_one_peer_rounds_average_exactly(way):
    def agent():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, shoal.rank())
        trainer = _ways.decentralized(way, model)
        for _ in range(2):
            trainer.exchange(_ways.ONE_PEER)
        return model.weight.item()

    assert shoal.Fleet(4).run(agent) == [1.5] * 4


# The page's statements


def test_the_batch_is_the_one_at_which_ddp_communicates_for_half_of_its_step():
    assert _training_agent.nearest_to_half({"8": [0.7], "16": [0.56], "32": [0.45], "64": [0.3]}) == "32"


def test_ddp_is_compared_in_its_fastest_mode():
    seconds = {"alone": 1.0, "DDP, 1 MB buckets": 2.5, "DDP, 25 MB buckets, static graph": 2.0, ATC: 1.6, AWC: 1.0}
    result = rows(measured("mlp", 2, seconds))
    assert result[ATC].peer == "DDP, 25 MB buckets, static graph"
    assert result[ATC].ratio == "1.25x as fast"
    assert result["without communication"].ratio == "50% communicating"


@pytest.mark.parametrize(("agents", "met"), [(2, True), (4, False), (3, None)])
def test_a_goal_depends_on_the_number_of_agents(agents, met):
    figures = measured("mlp", agents, {"alone": 1.0, "DDP": 1.25, ATC: 1.0})
    assert rows(figures)[ATC].met is met
    assert rows(figures, judged=False)[ATC].met is None
    assert tables.tables_of(figures, judged=True)[0].missed is (met is False)


def test_between_hosts_only_overlapping_modes_have_a_goal():
    result = rows(measured("hosts", 8, {"alone": 1.0, "DDP": 1.6, ATC: 1.5, AWC: 1.0, OVERLAP: 1.1}))
    assert [result[way].met for way in (ATC, AWC, OVERLAP)] == [None, True, False]


def test_overhead_is_computed_in_pairs_to_cancel_a_slowdown_of_the_machine():
    plain = [1.0, 1.2, 1.4, 1.6, 1.8]
    assert tables.overhead([p + 0.014 for p in plain], plain) == pytest.approx(0.01)


def test_the_hidden_part_of_an_exchange_is_what_does_not_lengthen_the_step():
    seconds = {"alone": 1.0, "ATC": 1.1, "ATC: exchange": 0.4, "DDP": 1.8, "DDP: exchange": 1.0}
    figures = [Figures("volumes: 21 MB", 21_000_000, 4, {name: [value] for name, value in seconds.items()})]
    [sheet] = tables.tables_of(figures, judged=True)
    assert [(line[1], line[-1]) for line in sheet.lines] == [("ATC", "75%"), ("DDP", "20%")]


def test_the_time_to_an_accuracy_is_that_of_the_epoch_that_reached_it():
    values = {"ATC: accuracy": [0.9, 0.97, 0.96], "ATC: seconds": [1.0, 2.0, 3.0], "ATC: worst agent": [0.8, 0.9, 0.95]}
    one = Figures("table2: seed 0", 1, 8, values)
    assert tables._learnt(one, "ATC") == (0.96, 0.95, 2.0)
    never = replace(one, values={**values, "ATC: accuracy": [0.9, 0.91, 0.92]})
    assert tables._learnt(never, "ATC") == (0.92, 0.95, None)


@pytest.mark.parametrize(("copies", "verdict"), [(1.4, "met"), (1.8, "not met")])
def test_memory_is_compared_with_its_formula(copies, verdict):
    one = {
        way: Figures("memory", 100, 4, {way: [held], f"{way}: arena": [0.0]})
        for way, held in (("alone", 1000.0), ("ATC", 1000.0 + 100 * copies))
    }
    [sheet] = tables.tables_of(list(one.values()), judged=True)
    assert sheet.lines[0][-1] == verdict
    assert sheet.missed is (verdict == "not met")


def test_a_later_measurement_replaces_only_its_part(tmp_path):
    for number, kinds in enumerate((["mlp", "mlp: batch", "hosts"], ["mlp"])):
        figures = [{"kind": kind, "nbytes": 1, "agents": 2, "values": {"run": [number]}} for kind in kinds]
        content = {"machine": "it", "quick": False, "loads": {kinds[0]: number}, "figures": figures}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    result = training.read([tmp_path / "0.json", tmp_path / "1.json"])
    assert [(one["kind"], one["values"]["run"]) for one in result["figures"]] == [("mlp", [1]), ("hosts", [0])]
    assert result["loads"] == {"mlp": 1}


# The whole command


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_the_command_measures_prints_and_stores(tmp_path, monkeypatch, capsys):
    options = ["--quick", "--only", "mlp", "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "training.py"), *options])
    assert training.main() == 0
    printed = capsys.readouterr().out
    assert "A 50-million-parameter MLP" in printed
    content = json.loads((tmp_path / "figures.json").read_text())
    figures = {one["kind"]: one["values"] for one in content["figures"]}
    assert {"alone", ATC, AWC} <= set(figures["mlp"])
    assert all(len(values) == 2 and min(values) > 0 for values in figures["mlp"].values())
    assert {"mlp"} == set(content["loads"])


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_hosts_train_and_learn(tmp_path):
    require_namespaces()
    launched("--only", "figure12", "--json", str(tmp_path / "figures.json"), timeout=190)
    content = json.loads((tmp_path / "figures.json").read_text())
    figures = {one["kind"]: one["values"] for one in content["figures"]}
    assert {_ways.ATC, _ways.AWC, _ways.HIERARCHICAL_ATC, _ways.HIERARCHICAL_AWC, "DDP"} <= set(figures["table2"])
    assert figures["table2: seed 0"]["DDP: accuracy"] == figures["table2: seed 0"]["DDP: worst agent"]


def test_each_panel_of_the_picture_has_axes_with_units_and_a_legend():
    seconds = {"DDP, bucket 25 MB": 2.0, ATC: 1.0, AWC: 1.0, OVERLAP: 1.0}
    step = Figures("table2", 1000, 8, {_ways.LOCAL: [0.02], "DDP": [0.3], _ways.ATC: [0.2]})
    speed, times = Figure().subplots(1, 2)
    _training_picture._against(speed, measured("mlp", 2, seconds)[:1])
    _training_picture._steps(times, [step])
    assert [axes.get_xlabel() for axes in (speed, times)] == [
        "steps per second, as a multiple of DDP's",
        "milliseconds",
    ]
    legends = [{text.get_text() for text in axes.get_legend().get_texts()} for axes in (speed, times)]
    assert legends == [
        {"DDP", "goal", _ways.ATC, _ways.AWC, _ways.OVERLAP},
        {"computing", "exchange of DDP", f"exchange of {_ways.ATC}"},
    ]
