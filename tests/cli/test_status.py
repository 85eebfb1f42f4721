"""`shoal status`: the status of running agents, queried from another shell, and the permission to query it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shoal
from shoal.cli import main, status
from shoal.cli.status import Process
from shoal.runtime.agent import current
from shoal.transport import status_socket
from shoal.transport.authentication import HELLO_SIZE, Accepting
from shoal.transport.listeners import listen_privately
from shoal.transport.sockets import GREETING_SECONDS
from support import PROCESS_GROUP, TRANSPORTS
from support.fault_points import over_both
from support.flooders import NOBODY, may_become_others
from support.leftovers import wait_until
from support.limits import scaled
from support.unauthenticated_peers import count_of_descriptors, listener_address
from support.world import World

NETWORK = {"SHOAL_TRANSPORT": "network"}
Agents = dict[int, dict[str, Any]]


def pids(world: World) -> list[int]:
    return [member.pid for member in world.members]


def agents_of(statuses: list[Process]) -> Agents:
    return {agent["rank"]: agent for process in statuses for agent in process.agents}


def printed_line(statuses: list[Process]) -> str:
    """The printed output, as one line."""
    console = Console(width=300)
    with console.capture() as captured:
        console.print(status.rendered(statuses))
    return " ".join(captured.get().split())


def until(statuses: Callable[[], Agents], true: Callable[[Agents], bool]) -> Agents:
    """Poll until the value is as expected, and return it."""
    last: Agents = {}

    def look() -> bool:
        nonlocal last
        last = statuses()
        return true(last)

    assert wait_until(look), last
    return last


# What is said


def until_there_is(path: Path) -> None:
    assert wait_until(path.exists)


def chain(seen: Path) -> None:
    """Rank 2 does something else until there is a file, rank 1 waits for it, and rank 0 waits for rank 1."""
    rank = shoal.rank()
    shoal.allreduce(torch.ones(1), name="before")
    if rank == 2:
        until_there_is(seen)
    if rank:
        shoal.pair_gossip(torch.ones(1), 3 - rank)
    if rank < 2:
        shoal.pair_gossip(torch.ones(1), 1 - rank)


@over_both
def test_each_agent_reports_its_call_its_missing_peers_and_its_last_result(
    environment: dict[str, str], tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    with World(3, environment=environment) as world:
        pending = [world.run_on(rank, chain, seen) for rank in range(3)]
        result = until(
            lambda: agents_of(status.look(pids(world))),
            lambda agents: (
                len(agents) == 3
                # They do not answer all at the same time: one may still be in the call before.
                and all("pair_gossip" in str(agents[rank]["waiting"]) for rank in (0, 1))
                and agents[2]["ended"].startswith("allreduce")
            ),
        )
        for rank, other in ((0, 1), (1, 2)):
            (waits,) = result[rank]["waiting"]
            assert (waits["call"], waits["ranks"]) == (f"pair_gossip of ranks {rank} and {other} round 0", [other])
            assert result[rank]["stands_still"] and 0.0 <= waits["seconds"] < 10.0 < waits["gives_up"]
        assert result[2]["waiting"] == [] and not result[2]["stands_still"]
        for rank, agent in result.items():
            assert agent["ended"] == "allreduce (average) 'before' round 0", rank
            assert (agent["rank"], agent["size"], agent["pid"]) == (rank, 3, pids(world)[rank])
            assert agent["host"] == socket.gethostname() and abs(time.time() - agent["since"]) < 60.0
        output = printed_line(status.look(pids(world)))
        assert "in pair_gossip of ranks 0 and 1 round 0 for rank 1 " in output and "runs its script" in output
        seen.touch()
        assert all(not one.outcome().error for one in pending)


def train(steps: int) -> int:
    model = torch.nn.Linear(3, 1)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return shoal.observability.bytes_sent()


@over_both
def test_steps_and_bytes_are_those_that_the_agent_counts(environment: dict[str, str]) -> None:
    with World(2, environment=environment) as world:
        sent = world.results(train, 7)
        result = agents_of(status.look(pids(world)))
        for rank in range(2):
            assert list(result[rank]["steps"].values()) == [7]
            assert result[rank]["bytes_sent"] == sent[rank] > 0
            assert 0.0 <= result[rank]["stepped_ago"] < 20.0


@over_both
def test_a_stopped_agent_is_named_within_two_seconds_with_its_state(environment: dict[str, str]) -> None:
    with World(2, environment=environment) as world:
        world.results(shoal.barrier)
        world.kill(1, signal.SIGSTOP)
        try:
            began = time.monotonic()
            result = status.look(pids(world))
            assert time.monotonic() - began < scaled(2.0)
            assert status.status_of(result) == status.SOME_DID_NOT
            (silent,) = [one for one in result if one.silent]
            assert (silent.pid, silent.rank, silent.state) == (pids(world)[1], 1, "stopped")
            assert f"rank 1 (pid {silent.pid}): it does not answer: continue it" in printed_line(result)
            assert list(agents_of(result)) == [0]
        finally:
            world.kill(1, signal.SIGCONT)
        assert status.status_of(status.look(pids(world))) == status.ALL_ANSWERED
        world.results(shoal.barrier)


def hold_the_mutex(seen: Path) -> None:
    """Rank 0 holds a window's mutex until there is a file, and rank 1 wants it."""
    shoal.bluefog.win_create(torch.ones(3), "weights")
    if shoal.rank() == 0:
        with shoal.bluefog.win_mutex("weights", for_self=True):
            shoal.barrier()
            until_there_is(seen)
    else:
        shoal.barrier()
        shoal.bluefog.win_put(torch.ones(3), "weights", require_mutex=True)
    shoal.barrier()
    shoal.bluefog.win_free("weights")


@over_both
def test_a_waiting_window_call_is_reported_too(environment: dict[str, str], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with World(2, environment=environment) as world:
        pending = [world.run_on(rank, hold_the_mutex, seen) for rank in range(2)]
        result = until(
            lambda: agents_of(status.look(pids(world))),
            lambda agents: any("'weights'" in one["call"] for one in agents[1].get("waiting", ())),
        )
        first = result[1]["waiting"][0]
        assert first["call"].startswith("win_") and first["ranks"] == [0] and result[1]["stands_still"]
        seen.touch()
        assert all(not one.outcome().error for one in pending)


def sum_all() -> None:
    shoal.allreduce(torch.ones(3), name="all")


@pytest.mark.transport(PROCESS_GROUP)
def test_agents_over_process_groups_name_the_peers_missing_from_their_call() -> None:
    with World(3, environment={"SHOAL_TRANSPORT": PROCESS_GROUP}) as world:
        world.results(train, 3)
        pending = [world.run_on(rank, sum_all) for rank in range(2)]
        result = until(
            lambda: agents_of(status.look(pids(world))),
            lambda agents: all([2] in [agent["ranks"] for agent in agents[rank]["waiting"]] for rank in (0, 1)),
        )
        for rank in (0, 1):
            (waits,) = result[rank]["waiting"]  # the rounds of coordination are nobody's call
            assert waits["call"] == "allreduce (average) 'all' round 0" and result[rank]["stands_still"]
            assert list(result[rank]["steps"].values()) == [3] and result[rank]["bytes_sent"] > 0
        assert result[2]["waiting"] == []
        output = printed_line(status.look(pids(world)))
        assert output.count("in allreduce (average) 'all' round 0 for rank 2 ") == 2 and "runs its script" in output
        world.results(sum_all, on=[2])
        assert all(not one.outcome().error for one in pending)


@pytest.mark.parametrize("transport", [*TRANSPORTS, PROCESS_GROUP])
def test_the_agents_of_a_fleet_are_found_over_any_transport(transport: str) -> None:
    go_on = threading.Event()

    def run() -> None:
        shoal.allreduce(torch.ones(3), name="all")
        go_on.wait(30)

    running = threading.Thread(target=shoal.Fleet(3, transport=transport).run, args=(run,))
    running.start()
    try:
        result = until(
            lambda: agents_of(status.look([os.getpid()])),
            lambda agents: len(agents) == 3 and all("allreduce" in agent["ended"] for agent in agents.values()),
        )
        assert all(value["ended"] == "allreduce (average) 'all' round 0" for value in result.values())
        assert all(value["waiting"] == [] and not value["stands_still"] for value in result.values())
    finally:
        go_on.set()
        running.join()


def test_a_single_agent_is_found() -> None:
    with World(1) as world:
        result = status.look(pids(world))
        assert list(agents_of(result)) == [0] and "one agent" in printed_line(result)


def test_all_threads_of_a_fleet_are_found_through_one_socket_also_after_its_owner_has_left() -> None:
    left, go_on = threading.Event(), threading.Event()

    def run() -> None:
        shoal.barrier()
        if shoal.rank() == 0:  # the first to be there, as likely as any
            shoal.shutdown()
            left.set()
        go_on.wait(30)

    running = threading.Thread(target=shoal.Fleet(5).run, args=(run,))
    running.start()
    try:
        assert left.wait(30)
        for keeper in range(4):  # the owner of the socket is next
            listeners = status.find()[os.getpid()]
            assert len(listeners) == 1
            deadline = time.monotonic() + 10.0
            while True:  # word that rank 0 left may still be under way
                result = agents_of(status.ask({os.getpid(): listeners}))
                if all(0 in agent["left"] for agent in result.values()) or time.monotonic() > deadline:
                    break
            assert set(result) == {1, 2, 3, 4}, keeper
            assert all(agent["size"] == 5 and 0 in agent["left"] for agent in result.values())
            (own,) = [agent for agent in status_socket.here._agents if agent.has_private_listener]
            status_socket.here.leave(own)  # as if it closed
            own.acceptor.close()  # type: ignore[attr-defined]
            status_socket.here.join(own)
    finally:
        go_on.set()
        running.join()
    assert os.getpid() not in status.find()


def test_an_agent_without_queries_runs_no_timer() -> None:
    """It does not poll for queries."""
    assert shoal.Fleet(2).run(lambda: current().engine.router.next_check) == [float("inf")] * 2


# Permissions and requests


def question(path: str, query: bytes = status_socket.QUESTION) -> bytes:
    """An agent's answer to a request; empty where it closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(GREETING_SECONDS + 5.0)
        sock.connect(path)
        sock.recv(HELLO_SIZE)
        sock.send(query)
        received = []
        while packet := sock.recv(status_socket.PACKET_BYTES):
            received.append(packet)
        return b"".join(received)


def test_the_reply_is_json_without_the_secret() -> None:
    with World(2, environment={"SHOAL_SECRET": "only we know"}) as world:
        [path] = status.find()[pids(world)[0]]
        answer = question(path)
        assert json.loads(answer)["agents"][0]["rank"] == 0
        assert b"only we know" not in answer


@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_another_user_gets_nothing() -> None:
    """Neither through the process's descriptors nor at the socket, whose name all users see."""
    ask = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(5.0)
try:
    sock.connect(sys.argv[1].replace("@", "\\0"))
    heard = sock.recv(1000)
    if heard:
        sock.send(sys.argv[3].encode())
        heard = sock.recv(1000)
    print("heard", len(heard))
except OSError as error:
    print(type(error).__name__)
"""
    with World(2) as world:
        [path] = status.find()[pids(world)[0]]
        unix = world.results(listener_address, on=[0])[0].unix
        stdout = [
            subprocess.run(
                [sys.executable, "-I", "-c", ask, where, str(NOBODY), status_socket.QUESTION.decode()],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for where in (path, f"@{unix}")
        ]
        assert stdout[0] == "PermissionError" and stdout[1] in ("heard 0", "ConnectionResetError", "BrokenPipeError")
        world.results(shoal.barrier)


@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_a_socket_of_another_user_is_not_queried() -> None:
    """For example a socket that was created under an agent's name."""
    listen = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(sys.argv[1].replace("@", "\\0"))
sock.listen()
print("listens", flush=True)
connection, _ = sock.accept()
try:
    connection.send(bytes(int(sys.argv[3])))
    print("heard", len(connection.recv(1000)))
except OSError:
    print("heard 0")
"""
    name = f"@shoal-test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", listen, name, str(NOBODY), str(HELLO_SIZE)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "listens\n"
        [result] = status.ask({os.getpid(): [name.replace("@", "\0")]})
        assert "another user" in result.silent
        assert other.stdout.readline() == "heard 0\n"


def test_over_a_network_a_status_query_is_no_reply_to_a_handshake() -> None:
    with World(2, environment=NETWORK) as world:
        way = world.results(listener_address, on=[0])[0]
        with socket.create_connection((way.host, way.port), timeout=1.0) as sock:
            assert len(sock.recv(HELLO_SIZE)) == HELLO_SIZE
            sock.sendall(status_socket.QUESTION)
            with pytest.raises(TimeoutError):
                sock.recv(1)
        world.results(shoal.barrier)


@pytest.mark.parametrize("query", [status_socket.QUESTION[:-1], status_socket.QUESTION + b"?", b"SHOAL: stop"])
def test_other_requests_get_no_reply(query: bytes) -> None:
    with World(1) as world:
        [path] = status.find()[pids(world)[0]]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(0.5)
            sock.connect(path)
            sock.recv(HELLO_SIZE)
            sock.send(query)
            with pytest.raises(TimeoutError):
                sock.recv(1)


def averages(count: int) -> int:
    for k in range(count):
        out = shoal.neighbor_allreduce(torch.tensor([float(shoal.rank()), float(k)]), name="x")
        assert out.tolist() == [0.5, float(k)]
    return count


@over_both
def test_a_flood_of_queries_holds_no_descriptor_for_long_and_blocks_no_client(environment: dict[str, str]) -> None:
    with World(2, environment=environment) as world:
        [path] = status.find()[pids(world)[0]]
        before = world.results(count_of_descriptors)
        stop, requested = threading.Event(), [0] * 4

        def ask(number: int) -> None:
            while not stop.is_set():
                try:
                    question(path)
                    requested[number] += 1
                except OSError:
                    pass  # there is no room just now

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for one in askers:
            one.start()
        try:
            assert wait_until(lambda: min(requested) > 5)
            assert world.results(averages, 200) == [200, 200]
            assert world.results(count_of_descriptors)[0] <= before[0] + 40
        finally:
            stop.set()
            for one in askers:
                one.join()
        assert wait_until(lambda: world.results(count_of_descriptors) == before)


def test_a_client_that_does_not_read_blocks_no_other() -> None:
    with World(2) as world:
        before = world.results(count_of_descriptors)
        [path] = status.find()[pids(world)[0]]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.connect(path)
            sock.send(status_socket.QUESTION)
            world.results(averages, 50)
            assert wait_until(lambda: world.results(count_of_descriptors) == before)


def test_many_agents_are_sent_in_packets_that_fit_a_socket() -> None:
    agents = [{"rank": rank, "text": "x" * 500} for rank in range(1000)]
    packets = status_socket._in_packets(agents)
    assert max(map(len, packets)) <= status_socket.PACKET_BYTES and sum(map(len, packets)) <= status_socket.MOST_BYTES
    status = json.loads(b"".join(packets))
    assert (
        status["there"] == 1000 and status["agents"] == agents[: len(status["agents"])] and len(status["agents"]) > 200
    )


def fork_and_wait() -> int:
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    return child


def test_a_forked_child_is_no_agent() -> None:
    with World(1) as world:
        [child] = world.results(fork_and_wait)
        try:
            assert wait_until(lambda: child not in status.find())  # it closes what it has right after the fork
            assert pids(world)[0] in status.find()
        finally:
            os.kill(child, signal.SIGKILL)
            world.results(os.waitpid, child, 0)


# The output of the command


@contextmanager
def one_that_answers(
    *packets: bytes, greeting: bytes | None = None, answers: list[bytes] | None = None
) -> Iterator[list[str]]:
    """Where something listens that looks like an agent, and says this; ``said`` is what it could say."""
    private = listen_privately()
    assert private is not None
    sock, descriptor = private
    sock.setblocking(True)
    sock.settimeout(10.0)

    def answer() -> None:
        try:
            connection, _ = sock.accept()
        except OSError:
            return
        with connection:
            connection.send(Accepting(b"", 0, 1).hello if greeting is None else greeting)
            connection.settimeout(5.0)
            try:
                connection.recv(100)
                for packet in packets:
                    connection.send(packet)
                    if answers is not None:
                        answers.append(packet)
            except OSError:
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield [f"/proc/{os.getpid()}/fd/{descriptor}"]
    finally:
        thread.join()
        sock.close()
        os.close(descriptor)


AGENT = {"rank": 0, "size": 1, "host": "here", "job": "here:1", "script": "train.py", "since": 0.0}
NONSENSE = [
    b"{",
    b"[]",
    b"\xff",
    b'{"there": 1}',
    b'{"there": 1, "agents": [3]}',
    b'{"there": 1, "agents": [{}]}',
    json.dumps({"there": 1, "agents": [AGENT | {"rank": "0"}]}).encode(),
    json.dumps({"there": 1, "agents": [AGENT | {"waiting": []}]}).encode(),
    b"[" * 10_000,
]


@pytest.mark.parametrize("answer", NONSENSE)
def test_an_invalid_reply_is_reported_as_such(answer: bytes) -> None:
    with one_that_answers(answer) as path:
        [result] = status.ask({os.getpid(): path})
    assert result.agents == () and "its answer is invalid" in result.silent


def test_a_process_with_a_wrong_greeting_is_not_queried() -> None:
    with one_that_answers(b"", greeting=b"220 mail") as path:
        [result] = status.ask({os.getpid(): path})
    assert "its answer is invalid" in result.silent


def test_an_endless_reply_is_cut_off() -> None:
    output: list[bytes] = []
    with one_that_answers(*[b"x" * 10_000] * 1000, answers=output) as path:
        [result] = status.ask({os.getpid(): path}, within=5.0)
    assert "its answer is invalid" in result.silent
    assert len(output) < 100  # a megabyte, with what the socket holds


def test_a_busy_agent_gives_its_identity() -> None:
    with one_that_answers(json.dumps({"there": 1, "agents": [AGENT]}).encode()) as path:
        result = status.ask({os.getpid(): path})
    assert "has no time to say more" in printed_line(result)


def test_terminal_control_characters_are_not_printed() -> None:
    evil = AGENT | {"host": "here\x1b[2Jthere", "job": "\x1b[2J:1"}
    assert "\x1b" not in printed_line([Process(1, "running", 0, (evil,), 1)])


def test_the_script_the_job_and_its_start_are_printed() -> None:
    now = time.time()
    agents = [
        AGENT | {"rank": rank, "size": 2, "script": "train.py --lr 1", "since": now - 65 + rank} for rank in (0, 1)
    ]
    output = printed_line([Process(1, "running", 0, tuple(agents), 2)])
    at = time.strftime("%H:%M:%S", time.localtime(now - 65))
    assert f"2 of 2 agents of train.py --lr 1, job here:1, started {at} (1:05 ago)" in output or "started 20" in output


def test_only_the_agents_of_a_job_are_listed() -> None:
    with World(2) as world:
        [first, second] = status.look(pids(world))
        name, script = first.agents[0]["job"], first.agents[0]["script"]
        assert script and second.agents[0]["job"] == name
        for job in (name, name.rpartition(":")[2], script):
            assert set(pids(world)) <= {one.pid for one in status.look((), job)}
        assert status.look(pids(world), "another") == []
        assert main(["status", "--job", "another"]) == status.NONE_FOUND


def test_the_failure_and_its_reason_are_printed() -> None:
    over = {"lost": [3, 1], "over": "rank 3 was lost", "waiting": [], "stands_still": False, "agrees_with": []}
    agent = AGENT | over | {"ended": "", "steps": {}, "calls": 0, "here": [], "bytes_sent": 0, "seconds_ago": 0.0}
    assert "lost: ranks 1, 3 rank 0: rank 3 was lost" in printed_line([Process(1, "running", 0, (agent,), 1)])


def test_no_agent_found_has_its_own_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(os.getpid())]) == status.NONE_FOUND == 2
    assert "there are no agents" in capsys.readouterr().out


def test_json_has_all_fields_of_each_process(capsys: pytest.CaptureFixture[str]) -> None:
    with World(2) as world:
        assert main(["status", "--json", *map(str, pids(world))]) == status.ALL_ANSWERED == 0
        decoded = json.loads(capsys.readouterr().out)
        assert [one["pid"] for one in decoded] == sorted(pids(world))
    assert {one["agents"][0]["rank"] for one in decoded} == {0, 1}


def test_only_the_requested_processes_are_listed() -> None:
    with World(2) as world:
        assert [one.pid for one in status.look(pids(world)[:1])] == pids(world)[:1]


def test_watching_continues_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with World(1) as world:
        monkeypatch.setattr(status.time, "sleep", sleep)  # type: ignore[attr-defined]
        assert main(["status", "--watch", "0.2", *map(str, pids(world))]) == status.ALL_ANSWERED
    assert looks == [0.2] * 3


def test_the_command_itself_finds_agents_of_another_shell(tmp_path: Path) -> None:
    with World(2) as world:
        run = subprocess.run(
            [sys.executable, "-m", "shoal", "status", *map(str, pids(world))], capture_output=True, text=True
        )
    assert (run.returncode, run.stderr) == (0, "") and "2 of 2 agents" in run.stdout
