"""The README's code does what the README says."""

import re
from pathlib import Path

import torch

import shoal
from shoal.algorithms import CATALOG
from support.scripts import in_processes

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_ten_lines_give_every_agent_the_mean_of_all_ranks(tmp_path):
    script = tmp_path / "average.py"
    script.write_text(BLOCKS[0])
    assert in_processes(4, script) == [f"{rank} tensor([1.5000, 1.5000, 1.5000])\n" for rank in range(4)]


def test_the_calls_it_shows_average_what_they_say():
    """On a ring of four, with agent 1 in the place of the reader for the pull, and of nobody for the rest."""

    def run():
        rank = shoal.rank()
        pull, push = {3: 0.5} if rank != 3 else {0: 0.5}, {1: 0.5} if rank != 1 else {2: 0.5}
        code = BLOCKS[1].replace("dst_weights={1: 0.5}", "dst_weights=push").replace("0.5, {3: 0.5})", "0.5, pull)")
        names = {"x": torch.tensor([float(rank)]), "pull": pull, "push": push, "seen": []}
        code = code.replace("{3: 0.5}, {1: 1.0}", "{(bf.rank() - 1) % 4: 0.5}, {(bf.rank() + 1) % 4: 1.0}")
        exec(
            re.sub(r"^y = .*$", r"\g<0>\nseen.append(y.item())", code.replace("   #", "  #"), flags=re.MULTILINE), names
        )
        return names["seen"]

    found = shoal.Fleet(4).run(run)
    ring = [sum([(rank - 1) % 4, rank, (rank + 1) % 4]) / 3 for rank in range(4)]
    pushed = [0.5 * 0, 0.5 * 1 + 0.5 * (0 + 2 + 3), 0.5 * 2 + 0.5 * 1, 0.5 * 3]
    for rank, (static, pull, push, push_pull, handle) in enumerate(found):
        assert torch.tensor([static, handle]).allclose(torch.tensor([ring[rank]] * 2))
        assert pull == 0.5 * rank + 0.5 * (3 if rank != 3 else 0)
        assert push == pushed[rank]
        assert push_pull == 0.5 * rank + 0.5 * ((rank - 1) % 4)


def test_what_it_counts_is_as_many() -> None:
    text = (ROOT / "README.md").read_text()
    assert "add three lines and remove one" in text
    assert [line[0] for line in DIFF.splitlines() if line[0] != " "].count("+") == 3
    assert [line[0] for line in DIFF.splitlines() if line[0] != " "].count("-") == 1
    assert "**Algorithms**: thirty," in text
    assert len({type(entry.example()) for entry in CATALOG.values()}) == 30


def patched(script: str) -> str:
    """A script with the README's diff applied, whose lines without a sign must be there, in order."""
    lines, at = script.splitlines(), 0
    for line in DIFF.splitlines():
        sign, text = line[0], line[2:]
        if sign == "+":
            lines.insert(at, text)
        else:
            at = lines.index(text, at)
            if sign == "-":
                del lines[at]
                continue
        at += 1
    return "\n".join(lines)


def test_a_script_for_ddp_becomes_decentralized_by_the_lines_it_shows(tmp_path):
    plain = (ROOT / "examples" / "ddp_digits.py").read_text()
    script = tmp_path / "decentralized.py"
    script.write_text(patched(plain) + "\nprint(f'distance {shoal.consensus_distance(model):.6f}')\nshoal.shutdown()\n")
    assert "DistributedDataParallel(" not in script.read_text()
    printed = in_processes(2, script)
    accuracies = [float(re.findall(rf"rank {rank}: ([\d.]+)%", text)[0]) for rank, text in enumerate(printed)]
    assert min(accuracies) > 93
    # Two agents are neighbours: after their last average they have one model.
    assert [float(found) for found in re.findall(r"distance ([\d.]+)", "".join(printed))] == [0.0] * 2
