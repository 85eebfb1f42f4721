"""``shoal report``: of records that the test wrote, and of a run in which agents were killed and rejoined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import shoal
from shoal.cli import main
from shoal.cli.report import Stay, draw, stays
from shoal.observability.membership_log import CAME, CHANGED, LEFT, MembershipEvent, read
from support.limits import scaled
from support.world import World, reserved_port

BY_HAND = [
    MembershipEvent(100.0, 0, 0, CAME, alive=(0, 1)),
    MembershipEvent(100.5, 1, 0, CAME, alive=(0, 1)),
    MembershipEvent(110.0, 0, 0, CHANGED, lost=(1,), alive=(0,)),
    MembershipEvent(112.0, 1, 1, CAME, alive=(1,)),
    MembershipEvent(115.0, 0, 0, CHANGED, entered=(1,), alive=(0, 1)),
    MembershipEvent(115.25, 1, 1, CHANGED, entered=(0, 1), alive=(0, 1)),
    MembershipEvent(130.0, 0, 0, LEFT),
    MembershipEvent(131.0, 1, 1, LEFT),
]


def written(folder: Path, entries: list[MembershipEvent]) -> Path:
    for one in entries:
        with (folder / f"agent{one.rank}.{one.incarnation}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
    return folder


def test_the_membership_log_shows_each_interval() -> None:
    assert stays(BY_HAND) == [
        Stay(0, 0.0, 0.0, 30.0, False),
        Stay(1, 0.5, 0.5, 10.0, True),
        Stay(1, 12.0, 15.25, 31.0, False),
    ]
    unfinished = [*BY_HAND[:4], MembershipEvent(120.0, 0, 0, CHANGED, lost=(), alive=(0,))]
    assert stays(unfinished) == [
        Stay(0, 0.0, 0.0, None, False),
        Stay(1, 0.5, 0.5, 10.0, True),
        Stay(1, 12.0, None, None, False),
    ]


def test_the_membership_log_of_a_restarted_job() -> None:
    begun_again = [MembershipEvent(50.0 + one.at, *list(vars(one).values())[1:]) for one in BY_HAND]
    departed = [one for one in BY_HAND if one.at < 130.0]
    assert stays([*departed, *begun_again]) == [
        Stay(0, 0.0, 0.0, 50.0, True),
        Stay(0, 50.0, 50.0, 80.0, False),
        Stay(1, 0.5, 0.5, 10.0, True),
        Stay(1, 12.0, 15.25, 50.5, True),
        Stay(1, 50.5, 50.5, 60.0, True),
        Stay(1, 62.0, 65.25, 81.0, False),
    ]


def test_a_restarted_job_does_not_overwrite_the_log(tmp_path: Path) -> None:
    for attempt in ("0", "1"):
        with World(1, environment={"SHOAL_RECORD": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": attempt}) as world:
            world.results(shoal.shutdown)
    assert [one.what for one in read(tmp_path)] == [CAME, LEFT] * 2


def test_a_log_is_read_also_if_its_writer_was_killed(tmp_path: Path) -> None:
    written(tmp_path, BY_HAND)
    with (tmp_path / "agent1.0.jsonl").open("a") as file:
        file.write('{"at": 110.0, "ra')
    assert read(tmp_path) == BY_HAND
    (tmp_path / "agent7.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"agent7\.jsonl is no record"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("at", '"x"'), ("at", "1e400"), ("rank", "[]"), ("alive", "[[0]]"), ("lost", '["a"]'), ("what", "{}")],
)
def test_a_log_with_a_value_of_another_type_or_size_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    written(tmp_path, BY_HAND)
    fields = {"at": "1.0", "rank": "7", "incarnation": "0", "what": '"came"', "lost": "[]", "entered": "[]"}
    fields |= {"alive": "[7]", name: value}
    line = "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}\n"
    (tmp_path / "agent7.jsonl").write_text(line)
    assert main(["report", str(tmp_path)]) == 2
    assert "agent7.jsonl is no record of an agent" in capsys.readouterr().err


def test_the_report_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pictures" / "there.png"
    assert main(["report", str(written(tmp_path, BY_HAND)), "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "lost: 1; came back: 1, 5.2 s later (median; at most 5.2)" in " ".join(out.split())
    assert picture.stat().st_size > 1000
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "there is neither a trace nor a record of an agent" in capsys.readouterr().err


def test_the_picture_has_a_legend() -> None:
    axes = Figure().add_subplot()
    draw(axes, stays(BY_HAND), 31.0)
    assert axes.get_title("left") == "membership of each agent over time"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds since the start", "rank")
    legend = axes.get_legend()
    assert legend is not None
    named = dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))
    assert list(named) == ["lost", "member", "waits to be admitted"]
    drawn = [(bar.get_width(), bar.get_facecolor()) for bar in axes.patches if bar.get_width()]  # type: ignore[attr-defined]
    colours = [named[name].get_facecolor() for name in ("member", "waits to be admitted")]
    assert drawn == [(30.0, colours[0]), (9.5, colours[0]), (3.25, colours[1]), (15.75, colours[0])]
    crosses = [line for line in axes.lines if len(line.get_xdata())]
    assert [(line.get_xdata()[0], line.get_color()) for line in crosses] == [(10.0, named["lost"].get_color())]


SCRIPT = """
import os, sys, time, torch, shoal
shoal.init()
rank = shoal.rank()
model = torch.nn.Linear(2, 1)
run = shoal.Checkpoint(model=model)
for step in range(run.load(None, missing_ok=True), 4000):
    if step == 5 and rank > 0 and "SHOAL_INCARNATION" not in os.environ:
        os._exit(3) if rank == 1 else os.kill(os.getpid(), 9)
    time.sleep(0.02)
    everybody = len(shoal.allgather(torch.tensor([rank]))) == shoal.size() and step > 10
    run.save(None, step + 1)
    if everybody:
        break
print(f"rank {rank} ends at {step} with {shoal.alive()}", flush=True)
shoal.shutdown()
"""


@pytest.mark.slow
def test_restarted_agents_are_in_the_membership_log(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "record"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "shoal", "run", "-n", "3", "--on-failure", "restart"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SHOAL_RECORD": str(folder)}
    job = subprocess.run([*launch, str(script)], env=environment, capture_output=True, text=True, timeout=scaled(60))
    assert job.returncode == 0, job.stderr
    ends = {line.split(" ends ")[1] for line in job.stdout.splitlines() if " ends " in line}
    assert len(ends) == 1 and ends.pop().endswith("with (0, 1, 2)"), job.stdout
    assert job.stderr.count("and starting it again (1 of 3)") == 2 and "exited with code 3" in job.stderr
    result = stays(read(folder))
    assert [(one.rank, one.was_lost) for one in result] == [(0, False), (1, True), (1, False), (2, True), (2, False)]
    assert all(one.entered is not None and one.ended is not None for one in result)


def test_each_agent_is_restarted_up_to_its_limit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(3)\n")
    launch = [sys.executable, "-m", "shoal", "run", "-n", "2", "--on-failure", "restart", "--max-restarts", "2"]
    job = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=scaled(60))
    assert job.returncode == 0 and job.stderr.count("starting it again") == 2, job.stderr
    assert "1 of 2 agents finished; lost: rank 1" in job.stderr


@pytest.mark.soak
def test_the_only_agent_of_a_machine_rejoins_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "shoal", "run", "--nnodes", "2", "--on-failure", "restart"]
    with reserved_port() as port:
        meet = ["--rendezvous", f"127.0.0.1:{port}"]
        output = subprocess.run(
            [*launch, *meet, "-n", "1", str(script)], capture_output=True, text=True, timeout=scaled(60)
        )
        assert output.returncode == 2 and "set SHOAL_SECRET" in output.stderr
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SHOAL_SECRET": "of these two"}
        jobs = [
            subprocess.Popen(
                [*launch, *meet, "-n", "1", "--node-rank", str(node), str(script)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(2)
        ]
        ends = [job.communicate(timeout=scaled(60)) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert "starting it again (1 of 3)" in ends[1][1]
    lasts = [one[0].splitlines()[-1].split(" ends ")[1] for one in ends]
    assert lasts[0] == lasts[1] and lasts[0].endswith("with (0, 1)")


def test_agents_that_are_admitted_together_are_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [MembershipEvent(100.0, rank, 0, CAME, alive=(0, 1, 2, 3)) for rank in range(4)]
    entries += [MembershipEvent(105.0, rank, 0, CHANGED, lost=(2, 3), alive=(0, 1)) for rank in (0, 1)]
    entries += [MembershipEvent(110.0, rank, 1, CAME, alive=(rank,)) for rank in (2, 3)]
    entries += [MembershipEvent(112.0, rank, 0, CHANGED, entered=(2, 3), alive=(0, 1, 2, 3)) for rank in (0, 1)]
    entries += [MembershipEvent(112.1, rank, 1, CHANGED, entered=(0, 1, 2, 3), alive=(0, 1, 2, 3)) for rank in (2, 3)]
    assert main(["report", str(written(tmp_path, entries))]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "of 4" in line]
    assert rows == [["5.0", "2,", "3", "2", "of", "4"], ["12.0", "2,", "3", "4", "of", "4"]]
