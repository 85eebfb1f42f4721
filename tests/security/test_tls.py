"""TLS between machines: nobody on the way reads or changes anything, and a rank is who has its certificate."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli import certificates, doctor, main
from shoal.errors import ProtocolError
from shoal.fault_tolerance.partition import PeerProbe
from shoal.rendezvous.store import ThreadStore
from shoal.runtime.agent import current
from shoal.transport.authentication import HELLO_SIZE, REFUSED, Connecting
from shoal.transport.tls import Certificates
from support.closed_ports import closed_ports
from support.leftovers import wait_until
from support.limits import scaled
from support.relay import Change, in_the_middle
from support.relay_attacks import attack, cuts
from support.samples import ALL_DTYPES, sample
from support.world import World

SIZE = 3
SHAPES = [(), (0,), (3,), (5000,), (70, 1000)]
NEEDLE = b"said to nobody else."
NETWORK = pytest.mark.transport("network")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "made"
    certificates.make(folder, SIZE)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates of all ranks, which the agents of this process take."""
    copy = tmp_path / "certificates"
    shutil.copytree(made, copy)
    monkeypatch.setenv("SHOAL_TLS", "on")
    monkeypatch.setenv("SHOAL_CERTIFICATES", str(copy))
    return copy


def fleet(timeout: float = 20.0) -> shoal.Fleet:
    return shoal.Fleet(SIZE, transport="network", timeout=timeout)


def everything() -> list[torch.Tensor]:
    """Results of operations of all kinds, with tensors of all dtypes and sizes."""
    shoal.set_topology(shoal.topology.RingGraph(SIZE))
    results = [
        shoal.neighbor_allgather(sample(shoal.rank(), (2, *shape), dtype)) for dtype in ALL_DTYPES for shape in SHAPES
    ]
    for shape in SHAPES:
        results.append(shoal.neighbor_allreduce(sample(shoal.rank(), shape, torch.float32)))
        handles = [shoal.nonblocking.allreduce(sample(step, shape, torch.float64)) for step in range(5)]
        results += [handle.wait() for handle in handles]
    x = sample(shoal.rank(), (300_000,), torch.float32)
    shoal.bluefog.win_create(x, "x", zero_init=True)
    shoal.bluefog.win_put(x, "x")
    shoal.barrier()
    results.append(shoal.bluefog.win_update("x").clone())
    shoal.barrier()
    shoal.bluefog.win_free("x")
    return results


def fingerprint() -> list[str]:
    """Of the bits of each."""
    return [
        hashlib.sha256(
            one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b""
        ).hexdigest()
        for one in everything()
    ]


@NETWORK
def test_results_are_the_same_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = fleet().run(fingerprint)
    environment = {"SHOAL_TRANSPORT": "network", "SHOAL_TLS": "on", "SHOAL_CERTIFICATES": str(folder)}
    with World(SIZE, environment=environment) as world:
        assert world.results(fingerprint) == inside
    monkeypatch.setenv("SHOAL_TLS", "off")
    assert shoal.Fleet(SIZE, transport="threads").run(fingerprint) == inside


@NETWORK
def test_reversed_connections_are_inside_tls_too_and_need_the_certificate_of_the_rank(
    folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_ports(1):
        inside = fleet(60.0).run(fingerprint)
    monkeypatch.setenv("SHOAL_TLS", "off")
    assert shoal.Fleet(SIZE, transport="threads").run(fingerprint) == inside
    monkeypatch.setenv("SHOAL_TLS", "on")
    for kind in ("crt", "key"):
        shutil.copy(made / f"rank-2.{kind}", folder / f"rank-1.{kind}")
    with closed_ports(1), pytest.raises(shoal.ShoalError):
        fleet(20.0).run(fingerprint)


@NETWORK
@pytest.mark.parametrize("inside", [True, False], ids=["TLS", "plain"])
def test_names_and_numbers_are_not_readable_on_the_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Without TLS the test reads them."""
    monkeypatch.setenv("SHOAL_TLS", "on" if inside else "off")
    received = bytearray()

    def listen() -> Change:
        def change(data: bytes, _: int) -> bytes:
            received.extend(data)
            return data

        return change

    def exchange_needles() -> None:
        for count in (1, 10_000):
            shoal.allgather(torch.frombuffer(bytearray(NEEDLE * count), dtype=torch.uint8), name="the-name")

    with in_the_middle(listen):
        fleet().run(exchange_needles)
    assert (NEEDLE in received, b"the-name" in received) == ((False, False) if inside else (True, True))
    assert received.count(NEEDLE) >= (0 if inside else 10_000)


@NETWORK
def test_changes_by_a_relay_inside_tls_are_detected(folder: Path) -> None:
    attack("network", 0, 10)


@NETWORK
def test_a_connection_cut_inside_tls_is_reestablished(folder: Path) -> None:
    undisturbed, seen = fleet().run(fingerprint), []
    with in_the_middle(cuts(random.Random(1), seen)):
        assert fleet(60.0).run(fingerprint) == undisturbed
    assert len(seen) > 5


# A rank is who has its certificate


def average() -> float:
    return float(shoal.allreduce(torch.tensor([float(shoal.rank())])))


def refused(timeout: float = 6.0) -> str:
    with pytest.raises(shoal.ShoalError) as error:
        fleet(timeout).run(average)
    return str(error.value)


def of_another_authority(folder: Path) -> None:
    other = folder.parent / "other"
    certificates.make(other, SIZE)
    for name in ("rank-1.crt", "rank-1.key"):
        shutil.copy(other / name, folder / name)


def of_another_rank(folder: Path) -> None:
    for end in ("crt", "key"):
        shutil.copy(folder / f"rank-2.{end}", folder / f"rank-1.{end}")


def revoke_rank_1(folder: Path) -> None:
    kept = {name: (folder / name).read_bytes() for name in ("rank-1.crt", "rank-1.key")}
    certificates.revoke(folder, [1])
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def expired(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now = certificates._now()
        patch.setattr(certificates, "_now", lambda: now - timedelta(days=3))
        for end in ("crt", "key"):
            (folder / f"rank-1.{end}").unlink()
        certificates.make(folder, SIZE, timedelta(days=1))


TURNED_AWAY = "it refuses this agent: the secret, the certificate or the data of the rendezvous is not its own"
# The first to notice reports it to the others; the refused one gets an alert.
REASONS: dict[Callable[[Path], None], str] = {
    of_another_authority: "unable to get local issuer|certificate signature failure|unknown ca|decrypt error",
    of_another_rank: f"Hostname mismatch, certificate is not valid for 'rank-1.shoal'|{TURNED_AWAY}",
    revoke_rank_1: "certificate revoked",
    expired: "certificate (has )?expired",
}


@NETWORK
@pytest.mark.parametrize("spoil", REASONS, ids=lambda spoil: spoil.__name__)
def test_an_agent_with_an_invalid_certificate_is_refused_by_name(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    text = refused()
    assert re.search(REASONS[spoil], text), text


@NETWORK
@pytest.mark.parametrize("name", ["ca.crt", "rank-1.crt", "rank-1.key", "revoked.crl"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=["missing", "empty", "nonsense"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    if (name, content) == ("revoked.crl", None):
        assert fleet().run(average) == [1.0] * SIZE
        return
    with pytest.raises(ValueError, match=rf"SHOAL_TLS=on: cannot read .*{name}.*shoal certificates make writes them"):
        fleet().run(average)


@pytest.mark.parametrize(
    ("tls", "where", "match"),
    [("yes", "x", "SHOAL_TLS='yes': it must be on or off"), ("on", "", "set SHOAL_CERTIFICATES to the folder")],
)
def test_an_invalid_setting_is_refused(monkeypatch: pytest.MonkeyPatch, tls: str, where: str, match: str) -> None:
    monkeypatch.setenv("SHOAL_TLS", tls)
    monkeypatch.setenv("SHOAL_CERTIFICATES", where)
    with pytest.raises(ValueError, match=match):
        shoal.Fleet(1).run(shoal.rank)


@NETWORK
def test_tls_on_some_agents_only_is_a_mismatch_on_all(folder: Path) -> None:
    environment = {"SHOAL_TRANSPORT": "network", "SHOAL_CERTIFICATES": str(folder)}
    with World(SIZE, environment=environment, init=False) as world:
        outcomes = world.run(init_with_tls_on, [0, 2])
    for outcome in outcomes:
        assert (outcome.error, "SHOAL_TLS" in outcome.message) == ("Mismatch", True), outcome
        assert outcome.seconds < scaled(10)


def init_with_tls_on(ranks: list[int]) -> None:
    os.environ["SHOAL_TLS"] = "on" if int(os.environ["RANK"]) in ranks else "off"
    shoal.init()


@NETWORK
def test_a_peer_with_the_secret_and_without_a_certificate_is_refused(folder: Path) -> None:
    """Neither over TLS without a certificate nor in plain text."""

    def run() -> tuple[int, int]:
        router = current().engine.router
        endpoint, secret = router.endpoints[shoal.rank()], router._secret
        shoal.barrier()
        before = router.acceptor.rejected
        if shoal.rank() == 0:
            with socket.create_connection((endpoint.host, endpoint.port), timeout=5.0) as sock:
                sock.sendall(Connecting(secret, 2, 0).answer(sock.recv(HELLO_SIZE)))
                assert await_end(sock) in (b"", REFUSED)
            with socket.create_connection((endpoint.host, endpoint.port), timeout=5.0) as sock:
                hello = sock.recv(HELLO_SIZE)
                context = ssl.create_default_context(cafile=folder / "ca.crt")
                with context.wrap_socket(sock, server_hostname="rank-0.shoal") as inside:
                    with contextlib.suppress(OSError):
                        inside.sendall(Connecting(secret, 2, 0).answer(hello))
                    assert await_end(inside) in (b"", REFUSED)
            # With the certificate of rank 1, which is not for rank 2.
            with socket.create_connection((endpoint.host, endpoint.port), timeout=5.0) as sock:
                hello = sock.recv(HELLO_SIZE)
                inside = Certificates(folder, 1)._connecting.wrap_socket(sock, server_hostname="rank-0.shoal")
                with inside:
                    inside.sendall(Connecting(secret, 2, 0).answer(hello))
                    assert await_end(inside) in (b"", REFUSED)
        shoal.barrier()
        return before, router.acceptor.rejected

    assert fleet().run(run) == [(0, 3), (0, 0), (0, 0)]


@NETWORK
@pytest.mark.usefixtures("folder")
def test_a_reachability_query_is_answered_inside_tls() -> None:
    def run() -> list[int]:
        engine, received = current().engine, []
        engine.router.answer_by(lambda rank, incarnation: 7)
        asking = PeerProbe(engine.router)

        def waits() -> bool:
            with engine.lock:  # while TLS begins, the socket is nobody's for a moment
                return asking.is_pending

        shoal.barrier()
        if shoal.rank() == 0:
            with engine.lock:
                asking.ask(1, received.append)
            assert wait_until(lambda: not waits())
        shoal.barrier()
        return received

    assert fleet().run(run) == [[7], [], []]


def test_a_listener_with_another_ranks_certificate_is_rejected(made: Path) -> None:
    one, other = socket.socketpair()
    ours, remote = Certificates(made, 0).connect(one, 1), Certificates(made, 2).accept(other)
    with contextlib.closing(ours), contextlib.closing(remote):
        for sock in (ours, remote):
            sock._sock.setblocking(False)
        with pytest.raises(ProtocolError, match=r"its certificate is refused: Hostname mismatch.*'rank-1\.shoal'"):
            for _ in range(10):
                ours.shake_hands()
                remote.shake_hands()


def await_end(sock: socket.socket) -> bytes:
    """The bytes received until the other side ends the connection; without the alerts of TLS."""
    output = b""
    try:
        while more := sock.recv(1000):
            output += more
    except (ssl.SSLError, ConnectionResetError):
        return b""
    return b"" if output.startswith(b"\x15\x03\x03") else output


LIES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "endpoint": lambda packets: packets[1]["endpoint"].update(port=9),
    "exchanged": lambda packets: packets.insert(1, packets.pop(2)),
    "secret": lambda packets: packets[0].update(secret="known to who said it"),
}


@NETWORK
@pytest.mark.parametrize("lie", LIES)
def test_a_store_with_false_entries_for_one_agent_excludes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Without an explicit secret. Only rank 2 reads a false secret, and false entries of the others."""
    real = ThreadStore.first

    def first(self: ThreadStore, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        key, content = real(self, keys, deadline)
        if key.endswith("endpoint/all") and threading.current_thread().name.endswith("2"):
            status = json.loads(content)
            LIES[lie](status)
            return key, json.dumps(status).encode()
        return key, content

    monkeypatch.setattr(ThreadStore, "first", first)
    result = {"endpoint": "refused", "exchanged": "the rendezvous store does not return", "secret": TURNED_AWAY}
    text = refused()
    assert re.search(f"{result[lie]}|{TURNED_AWAY}", text), text


def test_the_doctor_reports_tls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.Report()
    doctor.report_init(report, {})
    assert not report.problems
    assert re.search(
        r"encryption +TLS between machines, as rank 0; its authority is good until ", capsys.readouterr().out
    )


def test_the_command_creates_revokes_and_lists_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--folder", str(tmp_path / "new")]
    assert main(["certificates", "make", "-n", "2", *where]) == 0
    stdout = capsys.readouterr().out
    assert "2 certificates, 0 revoked" in stdout and f"export SHOAL_TLS=on SHOAL_CERTIFICATES={tmp_path}/new" in stdout
    for secret in (tmp_path / "new").glob("*.key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    first = (tmp_path / "new" / "rank-1.crt").read_bytes()
    assert main(["certificates", "revoke", "1", *where]) == 0
    assert "1 certificates, 1 revoked" in capsys.readouterr().out
    assert main(["certificates", "revoke", "0", "1", *where]) == 2  # nothing has been changed
    assert "there is no" in capsys.readouterr().err
    assert main(["certificates", "make", "-n", "2", *where]) == 0
    assert "rank-1.crt     good" in capsys.readouterr().out
    assert (tmp_path / "new" / "rank-1.crt").read_bytes() != first
    (tmp_path / "new" / "ca.key").unlink()
    assert main(["certificates", "make", "-n", "3", *where]) == 2
    assert "has no ca.key" in capsys.readouterr().err
    assert main(["certificates", "show", "--folder", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    for wrong in (["-n", "0"], ["-n", "2", "--days", "-1"], ["-n", "2", "--days", "1e300"]):
        assert main(["certificates", "make", *wrong, "--folder", str(tmp_path / "wrong")]) == 2
        assert capsys.readouterr().err
