"""The README's code does what the README says."""

import re
from pathlib import Path

from support.scripts import in_processes

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_ten_lines_give_every_agent_the_mean_of_all_ranks(tmp_path):
    script = tmp_path / "average.py"
    script.write_text(BLOCKS[0])
    assert in_processes(4, script) == [f"{rank} tensor([1.5000, 1.5000, 1.5000])\n" for rank in range(4)]


def test_numbers_in_the_readme_are_right() -> None:
    text = (ROOT / "README.md").read_text()
    assert "add three lines and remove one" in text
    assert DIFF in (ROOT / "docs" / "howto" / "ddp.md").read_text()
    assert [line[0] for line in DIFF.splitlines() if line[0] != " "].count("+") == 3
    assert [line[0] for line in DIFF.splitlines() if line[0] != " "].count("-") == 1


def test_the_readme_is_short_and_its_figures_are_those_of_the_linked_pages() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert "make demo" in text.split("```")[1] and "make test" in text.split("```")[1]
    facts = re.findall(r"^- \*\*.*?\.\*\* (.*?)\(\[[^]]*\]\((docs/[^)]*)\)\)", text, re.DOTALL | re.MULTILINE)
    assert len(facts) == 3
    for fact, page in facts:
        figures = re.findall(r"(?<![\w.-])\d[\d.]*(?= (?:to|times|%|MB|ms|on))", fact)
        assert figures, fact
        assert [figure for figure in figures if not re.search(rf"\b{figure}\b", (ROOT / page).read_text())] == []


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


def test_a_ddp_script_becomes_decentralized_with_the_shown_lines(tmp_path):
    plain = (ROOT / "examples" / "ddp_digits.py").read_text()
    script = tmp_path / "decentralized.py"
    script.write_text(patched(plain) + "\nprint(f'distance {shoal.consensus_distance(model):.6f}')\nshoal.shutdown()\n")
    assert "DistributedDataParallel(" not in script.read_text()
    printed = in_processes(2, script)
    accuracies = [float(re.findall(rf"rank {rank}: ([\d.]+)%", text)[0]) for rank, text in enumerate(printed)]
    assert min(accuracies) > 93
    # Two agents are neighbours: after their last average they have one model.
    assert [float(result) for result in re.findall(r"distance ([\d.]+)", "".join(printed))] == [0.0] * 2
