"""``shoal topology recommend``: the ranking, and figures that can be worked out by hand."""

from __future__ import annotations

import json

import pytest

from shoal.cli import main

NETWORK = ["--agents", "64", "--per-machine", "8", "--latency", "5ms", "--bandwidth", "1gbit", "--model-mb", "100"]


def recommended(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, float]]:
    assert main(["topology", "recommend", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["name"]: one for one in found["candidates"]}


def test_a_round_of_one_message_a_card_takes_the_latency_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """100 MB at 1 Gbit/s are 0.8 s, and 5 ms before them."""
    one = recommended(capsys, *NETWORK)["one-peer-exponential of machines"]
    assert one["seconds_per_round"] == pytest.approx(0.805, rel=1e-3)
    assert one["rounds"] == 3
    assert one["seconds"] == pytest.approx(3 * 0.805, rel=1e-3)


def test_agents_of_one_machine_share_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    alone = recommended(capsys, "--agents", "8", "--per-machine", "1", *NETWORK[4:])["ring"]
    shared = recommended(capsys, "--agents", "64", "--per-machine", "8", *NETWORK[4:])["random-matchings"]
    assert alone["models_on_a_card"] == pytest.approx(2.0)
    assert shared["seconds_per_round"] > alone["seconds_per_round"]


def test_the_fastest_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [one["seconds"] for one in recommended(capsys, *NETWORK).values() if one["rounds"] is not None]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("options", "word"), [(["--latency", "5"], "5"), (["--bandwidth", "fast"], "fast"), (["--agents", "0"], "0")]
)
def test_a_wrong_unit_says_what_is_accepted(capsys: pytest.CaptureFixture[str], options: list[str], word: str) -> None:
    with pytest.raises(SystemExit):
        main(["topology", "recommend", *options])
    assert word in capsys.readouterr().err
