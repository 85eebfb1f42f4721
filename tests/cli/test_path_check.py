"""``shoal doctor --rendezvous`` on two machines."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shoal import cli
from shoal.cli import path_check
from support.limits import scaled
from support.namespaces import Namespace, network_namespaces
from support.world import plain_environment


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def doctor_on(machines: list[Namespace], port: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "shoal", "doctor", "--rendezvous", f"{machines[0].address}:{port}"]
    results = [
        subprocess.Popen(
            ["ip", "netns", "exec", machine.name, *command],
            env=plain_environment() | {"SHOAL_PORTS": "29500-29600"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in machines
    ]
    try:
        yield results
    finally:
        for one in results:
            one.kill()
            one.communicate()


@pytest.mark.transport("namespaces")
@pytest.mark.timeout(180)
def test_two_machines_find_each_other_and_report_all_paths_open() -> None:
    with network_namespaces(2) as machines, doctor_on(machines, 29400) as doctors:
        for node, one in enumerate(doctors):
            output, _ = one.communicate(timeout=scaled(170))
            assert one.returncode == 0, output
            assert f"this is machine {node}" in output and "OK: agents of these machines can run together" in output
            assert "0 to 1" in output and f"open: {machines[1].address}:29500" in output


def test_each_direction_is_named_with_its_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two threads act as the machines. Connections to the data port of machine 1 are refused."""
    monkeypatch.delenv("SHOAL_PORTS", raising=False)
    monkeypatch.setenv("SHOAL_INTERFACE", "127.0.0.1")
    attempt = path_check._try

    def refused(source: int, address: str, port: int, token: bytes) -> path_check.Direction:
        return attempt(source, address, free_port() if source == 0 else port, token)

    monkeypatch.setattr(path_check, "_try", refused)
    port = free_port()
    results: list[int] = []

    def run(node: int) -> None:
        results.append(cli.main(["doctor", "--rendezvous", f"127.0.0.1:{port}", "--node-rank", str(node)]))

    threads = [threading.Thread(target=run, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    output = capsys.readouterr().out
    assert results == [0, 0], output
    assert output.count("CLOSED: machine 0 cannot connect to 127.0.0.1:") == 2
    assert output.count("(Connection refused: a firewall?)") == 2
    assert output.count("note: agents of machine 1 open the connections for both directions") == 2


@pytest.mark.slow
@pytest.mark.transport("namespaces")
@pytest.mark.timeout(180)
def test_a_firewall_in_one_direction_is_named_with_the_direction() -> None:
    with network_namespaces(2) as machines:
        machines[0].let_no_connection_in(but_port=29400)
        with doctor_on(machines, 29400) as doctors:
            for one in doctors:
                output, _ = one.communicate(timeout=scaled(170))
                assert one.returncode == 0, output
                assert f"open: {machines[1].address}:29500" in output
                assert f"CLOSED: machine 1 cannot connect to {machines[0].address}:29500 (no answer" in output
                assert "note: agents of machine 0 open the connections for both directions" in output


@pytest.mark.slow
@pytest.mark.transport("namespaces")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [0, 1])
def test_packet_loss_in_one_direction_is_distinguished_from_loss_in_both(lost: int) -> None:
    """The messages that machine 0 receives show the difference. Machine 1 receives none and names the next check."""
    with network_namespaces(2) as machines:
        machines[lost].cut(machines[1 - lost], True)
        with doctor_on(machines, 29400) as doctors:
            first, second = (one.communicate(timeout=scaled(170))[0] for one in doctors)
        assert [one.returncode for one in doctors] == [1, 1], first + second
    if lost == 0:
        assert f"what {machines[1].address} sends reaches this machine, and the answers do not reach it" in first
        assert "machine 0 to machine 1" in first
    else:
        assert "no machine has connected" in first and "no request to connect has come either" in first
    assert f"cannot connect to {machines[0].address}:29400 (no answer: a firewall?)" in second
    assert "the output of machine 0 shows which direction is closed" in second


def test_if_the_other_machine_is_absent_the_remedy_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for node, word in ((0, "no machine has connected to"), (1, "cannot connect to")):
        where = f"127.0.0.1:{free_port()}"
        assert cli.main(["doctor", "--rendezvous", where, "--node-rank", str(node), "--wait", "0.5"]) == 1
        output = capsys.readouterr().out
        assert f"{word} {where}" in output and "same command" in output


def test_a_foreign_client_at_the_rendezvous_is_a_failure_and_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    results: list[int] = []
    thread = threading.Thread(
        target=lambda: results.append(cli.main(["doctor", "--rendezvous", f"127.0.0.1:{port}", "--node-rank", "0"]))
    )
    thread.start()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            break
    thread.join(60.0)
    assert results == [1] and "sent an invalid answer" in capsys.readouterr().out
