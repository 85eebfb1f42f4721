"""A timeline overwrites no file that another process has put in its place."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
import torch

import shoal


@pytest.mark.parametrize(
    ("variable", "stem", "what"),
    [("SHOAL_TIMELINE", "shoal-rank{}.json", "timeline"), ("SHOAL_RECORD", "agent{}.jsonl", "record")],
)
@pytest.mark.parametrize("trap", ["link", "link to nothing", "hard link", "socket", "pipe", "another user's file"])
def test_a_trace_is_not_written_to_another_users_file(
    trap: str,
    variable: str,
    stem: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "traces"))
    precious, place = tmp_path / "precious", tmp_path / "traces" / stem.format(0)
    precious.write_text("all that I have")
    place.parent.mkdir()
    if trap == "link":
        place.symlink_to(precious)
    elif trap == "link to nothing":
        place.symlink_to(tmp_path / "nothing")
    elif trap == "hard link":
        place.hardlink_to(precious)
    elif trap == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(place))
    elif trap == "pipe":
        os.mkfifo(place)
    else:
        if os.geteuid():
            pytest.skip("only root can give a file away")
        place.write_text("of another")
        os.chown(place, 12345, 12345)
    with caplog.at_level(logging.ERROR, "shoal"):
        assert shoal.Fleet(2).run(lambda: float(shoal.allreduce(torch.ones(1)))) == [1.0, 1.0]
    (warning_text,) = [record.message for record in caplog.records if f"continues without a {what}" in record.message]
    assert "rank 0" in warning_text and str(place) in warning_text
    assert precious.read_text() == "all that I have" and not (tmp_path / "nothing").exists()
    assert trap != "another user's file" or place.read_text() == "of another"
    assert (place.parent / stem.format(1)).stat().st_size > 100
