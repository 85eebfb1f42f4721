"""When launchers that join a run report to the launcher that displays it, and when not."""

from __future__ import annotations

import os
import socket

import pytest

from shoal.cli.watch import listen_for_joining, watch_of_joining
from shoal.observability.watch.live import LocalViewer, RemoteViewer
from shoal.rendezvous.elastic_join import Invitation
from support.leftovers import nothing_is_left

ELSEWHERE = "203.0.113.1"


def invitation(size: int = 4, watch_port: int = 0) -> Invitation:
    return Invitation("job", size, 2, os.getpid(), -1, watch_port=watch_port)


def test_a_watched_job_with_spare_ranks_publishes_its_collector_address() -> None:
    with nothing_is_left(), LocalViewer(4, 2, "two", begins=2) as watch:
        assert listen_for_joining(None, invitation(), "s", "127.0.0.1", 7, 1) == 0
        assert listen_for_joining(watch, invitation(size=2), "s", "127.0.0.1", 7, 1) == 0
        assert (
            listen_for_joining(watch, invitation(), "s", "127.0.0.1", 7, 2) == 8
        )  # with the launchers of other machines
        port = listen_for_joining(watch, invitation(), "s", "127.0.0.1", 7, 1)
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))  # no more of the machine than the store has


def test_a_joining_launcher_sends_status_only_where_a_collector_listens() -> None:
    with nothing_is_left():
        assert watch_of_joining(invitation(), "s", "127.0.0.1", 1) is None
        watch = watch_of_joining(invitation(watch_port=7), "s", "127.0.0.1", 1)
        assert isinstance(watch, RemoteViewer)
        with watch:
            assert watch.path and not watch.address


def test_with_tls_no_status_is_sent_in_plain_text_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TLS", "on")
    with nothing_is_left(), LocalViewer(4, 2, "two", begins=2) as watch:
        assert listen_for_joining(watch, invitation(), "s", ELSEWHERE, 7, 1) == 0
        assert watch_of_joining(invitation(watch_port=7), "s", ELSEWHERE, 1) is None
        assert listen_for_joining(watch, invitation(), "s", "127.0.0.1", 7, 1) > 0
        remote_viewer = watch_of_joining(invitation(watch_port=7), "s", "127.0.0.1", 1)
        assert remote_viewer is not None
        with remote_viewer:
            pass


def test_if_the_collector_cannot_be_found_the_run_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with nothing_is_left():
        assert watch_of_joining(invitation(watch_port=7), "s", "no.such.host.invalid", 1) is None
    stderr = capsys.readouterr().err
    assert "the page there does not show these agents: where is no.such.host.invalid:7" in stderr
