"""The small GPT: what it computes, what each agent reads, and that resuming is exact."""

from __future__ import annotations

import re
import sys
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from support.saved_runs import assert_same_bits, saved
from support.scripts import in_processes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _text  # noqa: E402
import train_gpt  # noqa: E402

TEXT = "".join(f"{number} sheep and {number % 7} shoals; " for number in range(400))
SMALL = ("--steps", "5", "--batch", "2", "--context", "16", "--width", "16", "--layers", "2", "--heads", "2")
SMALL = (*SMALL, "--warm-up", "2", "--evaluate-every", "2", "--test-windows", "4", "--sample", "9")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sheep.txt"
    path.write_text(TEXT)
    return path


def in_fleet(size: int, file: Path, *options: str) -> list[list[train_gpt.Run]]:
    args = train_gpt.parse(["--text", str(file), *SMALL, *options])
    return shoal.Fleet(size, timeout=20.0).run(train_gpt.main, args)


def loaded(path: str, agents: int = 1, context: int = 16) -> _text.Text:
    """The text as every agent reads it."""
    return shoal.Fleet(agents).run(_text.load, path, context)[0]


def model_of(context: int = 8, alphabet: int = 5) -> train_gpt.GPT:
    return train_gpt.GPT(alphabet, context, width=8, layers=2, heads=2, seed=0)


# Resuming


@pytest.mark.parametrize("algorithm", train_gpt.ALGORITHMS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, file: Path, algorithm: str) -> None:
    """It stops between two evaluations, and before the second of the two rounds that three agents have."""
    options = ("--algorithm", algorithm, "--checkpoint")
    (full,) = in_fleet(3, file, *options, str(tmp_path / "whole"))[0]
    (stopped,) = in_fleet(3, file, *options, str(tmp_path / "parts"), "--stop-after", "3")[0]
    assert (stopped.done, stopped.evaluated, stopped.sample) == (3, [2], "")
    (resumed,) = in_fleet(3, file, *options, str(tmp_path / "parts"), "--resume")[0]
    assert (resumed.evaluated, resumed.of_agents) == (full.evaluated, full.of_agents)
    assert resumed.sample == full.sample
    assert full.evaluated == [2, 4, 5]
    states = saved(tmp_path / "whole")
    assert list(states) == [f"{algorithm}/step-5/agent-{rank}" for rank in range(3)]
    assert_same_bits(states, saved(tmp_path / "parts"))


@pytest.mark.slow  # test_train_digits.py runs its script in processes, and this one in a fleet
@pytest.mark.timeout(150)  # modules are imported in each process, which takes long where others want the cores, too
def test_processes_resume_a_fleets_checkpoint(tmp_path: Path, file: Path) -> None:
    (run, _) = in_fleet(2, file, "--compare", "--checkpoint", str(tmp_path / "whole"))[0]
    in_fleet(2, file, "--compare", "--checkpoint", str(tmp_path / "parts"), "--stop-after", "3")
    picture = tmp_path / "not yet there" / "gpt.png"
    options = ("--compare", "--checkpoint", str(tmp_path / "parts"), "--resume", "--picture", str(picture))
    output, other = in_processes(2, EXAMPLES / "train_gpt.py", "--text", str(file), *SMALL, *options)
    assert other == ""
    assert_same_bits(saved(tmp_path / "whole"), saved(tmp_path / "parts"))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    steps = re.findall(r"^(adapt, then combine|all-reduce) +step (\d)/5", output, re.MULTILINE)
    assert steps == [("adapt, then combine", step) for step in "45"] + [("all-reduce", step) for step in "245"]
    assert f"writes:\n\n{run.sample}\n" in output
    assert re.search(r"Verdict: .* needs \d\.\d{3} bits per character of the test, .* than all-reduce", output)


def test_another_number_of_agents_another_model_or_another_text_is_refused(tmp_path: Path, file: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "c"))
    in_fleet(2, file, *options, "--stop-after", "1")
    with pytest.raises(SystemExit, match=r"c/atc/\S+ is of 2 agents, and there are 1 now\. Run with 2"):
        in_fleet(1, file, *options, "--resume")
    with pytest.raises(SystemExit, match=r"of a job with width 16, and this one has 32: a job goes on as it began"):
        in_fleet(2, file, *options, "--resume", "--width", "32")
    file.write_text(TEXT[1:])
    with pytest.raises(
        SystemExit, match=rf"of a job with text {len(TEXT)} characters, and this one has {len(TEXT) - 1}"
    ):
        in_fleet(2, file, *options, "--resume")


# Training


def test_the_loss_decreases(file: Path) -> None:
    (run,) = in_fleet(2, file, "--steps", "60", "--lr", "0.02", "--evaluate-every", "30")[0]
    assert run.of_consensus[-1] < 0.8 * log2(len(set(TEXT)))
    assert run.of_consensus[-1] < run.of_consensus[0]
    assert len(run.sample) == 9


@pytest.mark.parametrize("algorithm", train_gpt.ALGORITHMS)
def test_two_passes_of_two_windows_are_one_pass_of_four(tmp_path: Path, file: Path, algorithm: str) -> None:
    options = ("--algorithm", algorithm, "--checkpoint")
    in_fleet(3, file, *options, str(tmp_path / "two"))
    in_fleet(3, file, *options, str(tmp_path / "one"), "--batch", "4", "--accumulate", "1")
    for two, one in zip(saved(tmp_path / "two").values(), saved(tmp_path / "one").values(), strict=True):
        assert torch.equal(two["chance"]["state"], one["chance"]["state"])
        assert two["optimizer"]["shoal"]["rounds"] == one["optimizer"]["shoal"]["rounds"] == 5
        for name, param in two["model"].items():
            assert (param - one["model"][name]).abs().max() < 1e-4, name  # Adam divides by small numbers


def test_every_agent_reports_the_same(file: Path) -> None:
    results = in_fleet(4, file)
    for (run,) in results:
        assert run == results[0][0]
        assert len(run.of_agents[0]) == 4
        assert run.distance[-1] > 0


def test_clipping_bounds_the_gradient_of_an_agents_step(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(params: Any, most: float) -> torch.Tensor:
        params = list(params)
        for param in params:
            param.grad.mul_(1e3)
        total = clip(params, most)
        norms.append(torch.cat([param.grad.flatten() for param in params]).norm().item())
        return total

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    in_fleet(1, file, "--steps", "2")
    assert norms == [pytest.approx(1.0, rel=1e-4)] * 2


# The model


def test_a_position_attends_only_to_earlier_ones() -> None:
    model = model_of().double()
    read = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    logits = model(read)
    assert logits.shape == (1, 8, 5)
    for place in range(8):
        other = read.clone()
        other[0, place] = (other[0, place] + 1) % 5
        changed = (model(other) - logits).abs().amax(dim=(0, 2)) > 1e-12
        assert changed.tolist() == [later >= place for later in range(8)]


def test_input_and_output_embeddings_stay_tied(file: Path) -> None:
    model = model_of()
    assert model.head.weight is model.characters.weight
    table, other = 5 * 8 + 8 * 8, 12 * 8 * 8 + 9 * 8 + 4 * 8  # 3 + 1 + 4 + 1 and the two norms' 4 of the width
    assert sum(param.numel() for param in model.parameters()) == table + 2 * other + 2 * 8
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    assert model.characters.weight.grad is model.head.weight.grad

    def run() -> bool:
        args = train_gpt.parse(["--text", str(file), *SMALL])
        text = _text.load(args.text, args.context)
        trained = train_gpt.GPT(len(text.alphabet), 16, 16, 2, 2, seed=0)
        before = trained.head.weight.clone()
        train_gpt.train("atc", trained, args, text, train_gpt.Console(quiet=True))
        return trained.head.weight is trained.characters.weight and not torch.equal(before, trained.head.weight)

    assert shoal.Fleet(2).run(run) == [True, True]


def test_the_bits_of_an_untrained_model_are_those_of_the_alphabet(file: Path) -> None:
    text = loaded(str(file))
    args = train_gpt.parse(["--context", "16", "--test-windows", "1000"])
    model = model_of(16, len(text.alphabet))
    torch.nn.init.zeros_(model.head.weight)
    assert train_gpt.bits(model, text, args) == pytest.approx(log2(len(text.alphabet)), rel=1e-5)
    assert model.training


def test_a_model_samples_likely_characters() -> None:
    model = model_of(alphabet=3)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0], [2.0], [-50.0]]).expand(3, 8))
        model.norm.weight.zero_()
        model.norm.bias.fill_(1 / 8)
    written = train_gpt.write(model, torch.zeros(4, dtype=torch.int64), 1000, seed=1)
    shares = torch.bincount(written, minlength=3) / 1000
    assert shares.tolist() == pytest.approx([0.269, 0.731, 0.0], abs=0.04)
    assert torch.equal(written[:30], train_gpt.write(model, torch.zeros(4, dtype=torch.int64), 30, seed=1))


def test_the_verdict_is_more_for_a_higher_loss() -> None:
    runs = [train_gpt.Run(name, of_consensus=[result]) for name, result in (("atc", 2.5), ("allreduce", 2.375))]
    assert "2.500 bits per byte of the test, 0.125 more than all-reduce" in train_gpt.verdict(*runs, "ring", "byte")
    assert "0.125 less than all-reduce" in train_gpt.verdict(*reversed(runs), "ring", "byte")


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    factors = [train_gpt.warm_up_and_fall(step, first=10, last=100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9]
    assert factors[50] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)


# The text


def test_characters_are_encoded_and_decoded(file: Path) -> None:
    text = loaded(str(file))
    assert (text.unit, text.alphabet) == ("character", sorted(set(TEXT)))
    assert text.decode(text.train) + text.decode(text.test) == TEXT
    assert len(text.test) == len(TEXT) // 10


@pytest.mark.parametrize(
    "content", [bytes(range(256)) * 4, "".join(map(chr, range(0x4E00, 0x5200))).encode()], ids=["binary", "chinese"]
)
def test_a_file_without_a_small_alphabet_is_read_as_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    text = loaded(str(tmp_path / "file"))
    assert (text.unit, len(text.alphabet)) == ("byte", 256)
    assert bytes(torch.cat([text.train, text.test]).tolist()) == content
    assert text.decode(torch.tensor([0x61, 0xFF, 0x62])) == "a\N{REPLACEMENT CHARACTER}b"


def test_agents_have_their_own_parts_of_equal_length(file: Path) -> None:
    text = loaded(str(file))
    parts = [text.shard(rank, 3) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    assert 0 <= len(text.train) - sum(map(len, parts)) < 3
    assert torch.equal(torch.cat(parts), text.train[: sum(map(len, parts))])


def test_windows_are_slices_of_the_text_and_its_next_characters() -> None:
    text = torch.arange(20)
    read, following = _text.windows(text, 200, 5, torch.Generator().manual_seed(0))
    assert torch.equal(following, read + 1)
    assert torch.equal(read, read[:, :1] + torch.arange(5))
    assert (read[:, 0].min(), following.max()) == (0, 19)


def test_the_test_part_is_read_from_its_start_without_gaps() -> None:
    read, following = _text.tiles(torch.arange(21), 5, most=100)
    assert torch.equal(read.flatten(), torch.arange(20)) and torch.equal(following, read + 1)
    assert len(_text.tiles(torch.arange(20), 5, most=100)[0]) == 3
    assert len(_text.tiles(torch.arange(21), 5, most=2)[0]) == 2


def test_the_default_text_comes_with_python() -> None:
    text = loaded("", agents=2, context=128)
    assert text.name == _text.HELP
    assert len(text.train) > 100_000
    assert "assert" in text.decode(text.train[:10_000])


def test_texts_that_are_missing_or_too_short_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(SystemExit, match=r"cannot read .*nowhere: No such file"):
        loaded(str(tmp_path / "nowhere"))
    length = len(TEXT) - len(TEXT) // 10
    assert len(loaded(str(file), agents=20, context=length // 20 - 1).train) == length
    with pytest.raises(SystemExit, match=rf"sheep.txt has {len(TEXT)} characters, of which {length // 20} are for one"):
        loaded(str(file), agents=20, context=length // 20)


@pytest.mark.parametrize(
    "options",
    [["--steps", "0"], ["--accumulate", "0"], ["--width", "10"], ["--sample", "-1"], ["--resume"]],
)
def test_invalid_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse(options)
    assert options[0] in capsys.readouterr().err
