"""Processes that agents fork: the agent is unaffected, and the child gets an error."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

import shoal
from shoal.runtime.agent import current
from support.world import World

NETWORK = {"SHOAL_TRANSPORT": "network"}
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]


def in_a_child(call: Callable[[], object]) -> str:
    """The outcome of a call in a forked child: the class and the text of its exception, or its value. "hangs" if so."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        try:
            output = repr(call())
        except BaseException as error:
            output = f"{type(error).__name__}: {error}"
        os.write(write_end, output.encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    output = os.read(read_end, 4096).decode() or "hangs"
    os.close(read_end)
    return output


def ask_a_child_while_a_thread_holds_the_lock() -> list[str]:
    """Whatever thread is inside Shoal at a fork is not there in the child to leave it."""
    rank = shoal.rank()
    handle = shoal.nonblocking.neighbor_allreduce(torch.ones(3), name=f"pending{rank}")  # the other one comes later
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with current().engine.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    answers = [in_a_child(one) for one in (handle.wait, shoal.init, shoal.rank, work, shoal.is_initialized)]
    answers.append(in_a_child(lambda: shoal.allreduce(torch.ones(3))))
    done.set()
    thread.join()
    shoal.neighbor_allreduce(torch.ones(3), name=f"pending{1 - rank}")
    handle.wait()
    return answers


def work() -> float:
    return (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()


@pytest.mark.parametrize("environment", OVER)
def test_a_child_raises_that_it_is_no_agent_whatever_locks_the_parents_threads_hold(
    environment: dict[str, str],
) -> None:
    with World(2, environment=environment) as world:
        for rank, answers in enumerate(world.results(ask_a_child_while_a_thread_holds_the_lock)):
            waited, started, requested, worked, is_one, called = answers
            for output in (waited, started, requested, called):
                assert output.startswith("NotInitialized: "), answers
                assert f"forked from that of rank {rank}" in output, answers
            assert worked == "27000000.0" and is_one == "False"


def ask_a_child_of_a_fleet() -> list[str]:
    return [in_a_child(lambda: shoal.allreduce(torch.ones(3))), in_a_child(shoal.init)]


def test_a_child_of_a_fleet_is_no_agent_either(transport: str) -> None:
    def run() -> list[str]:
        shoal.barrier()
        answers = ask_a_child_of_a_fleet() if shoal.rank() == 0 else []
        shoal.barrier()
        return answers

    answers = shoal.Fleet(2, transport=transport, timeout=30.0).run(run)[0]
    for output in answers:
        assert output.startswith("NotInitialized: "), answers
        assert "forked from that of rank 0" in output, answers


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


def fork_by_every_method() -> list[object]:
    process = multiprocessing.get_context("fork").Process(target=work)
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)  # for the child, which inherits it
        process.start()
        process.join(30)
        ended: object = process.exitcode
        if ended is None:
            os.kill(process.pid or 0, signal.SIGUSR1)
            process.join(30)
            stacks.seek(0)
            ended = f"hangs, with these stacks:\n{stacks.read()}"
            process.kill()
        faulthandler.unregister(signal.SIGUSR1)
    loaded = sum(batch.sum().item() for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"))
    code = subprocess.run(["true"], preexec_fn=lambda: None, check=False).returncode
    return [ended, loaded, code, in_a_child(work)]


def fork_while_threads_average() -> tuple[list[object], list[str], list[int]]:
    failed: list[str] = []
    calls = [0, 0, 0]
    forked = threading.Event()
    mean = (shoal.size() - 1) / 2

    def average(k: int, numel: int) -> None:
        """As often as the others: how often, they agree on by asking."""
        try:
            while True:
                handle = shoal.nonblocking.neighbor_allreduce(torch.full((numel,), float(shoal.rank())), name=f"x{k}")
                over = shoal.allreduce(torch.tensor(float(forked.is_set())), name=f"over{k}").item() == 1.0
                result = handle.wait()
                assert result[0].item() == result[-1].item() == mean
                calls[k] += 1
                if over:
                    return
        except BaseException as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=average, args=(k, numel)) for k, numel in enumerate((4, 5_000, 100_000))]
    for thread in threads:
        thread.start()
    # torch initializes parts at their first use, under locks, which a child that is forked meanwhile never gets.
    while not all(calls) and not failed:
        time.sleep(0.01)
    results = fork_by_every_method()
    forked.set()
    for thread in threads:
        thread.join(40)
    return results, failed, calls


@pytest.mark.parametrize("environment", OVER)
def test_threads_of_an_agent_continue_while_its_process_forks(environment: dict[str, str]) -> None:
    with World(2, environment=environment, timeout=40.0) as world:
        for result, failed, calls in world.results(fork_while_threads_average, patience=100.0):
            assert result == [0, 600.0, 0, "27000000.0"]
            assert not failed
            assert all(calls), calls
        assert world.is_sound()
