"""How the launcher writes what agents print: lines, states and prefixes, to a file and to a terminal."""

from __future__ import annotations

import os
import pty
import select
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli import agent_output
from shoal.cli.agent_output import STDERR, STDOUT, AgentOutput
from shoal.cli.launcher_signals import Signals


class Sink:
    """A descriptor to write to; returns the bytes that have arrived since the last read."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer

    def read(self) -> bytes:
        result = b""
        while select.select([self.reader], [], [], 0)[0]:
            piece = os.read(self.reader, 1 << 20)
            if not piece:
                break
            result += piece
        return result


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Sink]:
    with (tmp_path / "log").open("wb") as writer, (tmp_path / "log").open("rb") as reader:
        yield Sink(reader.fileno(), writer.fileno())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    monkeypatch.setattr(agent_output, "REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("NO_COLOR", "1")
    sink = Sink(*pty.openpty())
    attributes = termios.tcgetattr(sink.writer)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(sink.writer, termios.TCSANOW, attributes)
    yield sink
    for descriptor in (sink.reader, sink.writer):
        os.close(descriptor)


def on(sink: Sink) -> AgentOutput:
    return AgentOutput(sink.writer, sink.writer)


def test_a_line_is_written_when_it_is_complete(file: Sink) -> None:
    output = on(file)
    output.feed(0, STDOUT, b"be")
    output.feed(1, STDOUT, b"other\n")
    assert file.read() == b"[1] other\n"
    output.feed(0, STDOUT, b"gin\n\nmore")
    assert file.read() == b"[0] begin\n[0] \n"
    output.end(0, STDOUT)
    assert file.read() == b"[0] more\n"


def test_stdout_and_stderr_of_an_agent_are_not_interleaved_within_lines(file: Sink, terminal: Sink) -> None:
    output = AgentOutput(file.writer, terminal.writer)
    output.feed(0, STDOUT, b"out")
    output.feed(0, STDERR, b"err\n")
    output.feed(0, STDOUT, b"put\n")
    assert (file.read(), terminal.read()) == (b"[0] output\n", b"[0] err\n")


@pytest.mark.parametrize("pieces", [[b"a\r\nb\r\n"], [b"a\r", b"\nb\r", b"\n"], [b"a\r\r\nb\n"]])
def test_a_carriage_return_before_a_newline_is_part_of_the_line_end(file: Sink, pieces: list[bytes]) -> None:
    output = on(file)
    for piece in pieces:
        output.feed(0, STDOUT, piece)
    assert file.read() == b"[0] a\n[0] b\n"


@pytest.mark.parametrize("draw", [lambda text: b"\r" + text, lambda text: text + b"\r"])
def test_a_progress_bar_in_a_file_leaves_its_last_state(file: Sink, draw: Callable[[bytes], bytes]) -> None:
    output = on(file)
    for percent in range(0, 101, 10):
        output.feed(0, STDERR, draw(b"%d%%" % percent))
    assert file.read() == b""
    output.feed(0, STDERR, b"\n")
    assert file.read() == b"[0] 100%\n"


def test_a_long_progress_bar_in_a_file_leaves_a_state_periodically(file: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_output, "_STATE_IN_FILE_SECONDS", 0.05)
    output = on(file)
    output.feed(0, STDERR, b"\r1%\r2%\r3%")
    assert file.read() == b""
    time.sleep(0.06)
    output.feed(0, STDERR, b"\r4%")
    assert file.read() == b"[0] 3%\n"


def test_an_endless_line_is_cut_between_characters(file: Sink) -> None:
    output = on(file)
    text = "x" + "é" * (1 << 15)
    output.feed(0, STDOUT, text.encode())
    output.end(0, STDOUT)
    lines = file.read().decode().splitlines()
    assert [line[:4] for line in lines] == ["[0] ", "[0] "]
    assert "".join(line[4:] for line in lines) == text


def test_non_text_bytes_pass_through_an_endless_line(file: Sink) -> None:
    output = on(file)
    output.feed(0, STDOUT, b"\x80" * ((1 << 16) + 5))
    output.end(0, STDOUT)
    assert file.read().replace(b"[0] ", b"").replace(b"\n", b"") == b"\x80" * ((1 << 16) + 5)


def test_the_last_lines_are_those_of_stderr(file: Sink) -> None:
    output = on(file)
    for i in range(30):
        output.feed(3, STDERR, b"%d\n" % i)
    output.feed(3, STDOUT, b"out\n")
    assert output.last_lines(3) == [b"%d" % i for i in range(20, 30)]
    assert output.last_lines(0) == []


def test_a_closed_stdout_is_reported_to_the_caller(file: Sink) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = AgentOutput(writer, file.writer)
    assert not output.feed(0, STDOUT, b"line\n")
    assert output.feed(0, STDERR, b"line\n")
    os.close(writer)


def test_a_file_needs_no_redrawing(file: Sink) -> None:
    output = on(file)
    output.feed(0, STDOUT, b"partial")
    assert output.next_redraw() is None


def test_an_unfinished_line_stays_at_the_bottom_of_a_terminal(terminal: Sink) -> None:
    output = on(terminal)
    output.feed(0, STDERR, b"\r10%")
    output.redraw()
    assert terminal.read() == b"[0] 10%"
    output.feed(1, STDOUT, b"line\n")
    assert terminal.read() == b"\r\x1b[K[1] line\n"
    output.redraw()
    assert terminal.read() == b"[0] 10%"
    output.print("a message")
    assert terminal.read() == b"\r\x1b[Ka message\n"
    output.feed(0, STDERR, b"\r100%\n")
    output.redraw()
    assert terminal.read() == b"[0] 100%\n"


def test_the_lowest_rank_has_the_bottom_line_and_then_the_next(terminal: Sink) -> None:
    output = on(terminal)
    output.feed(2, STDOUT, b"two")
    output.redraw()
    output.feed(1, STDOUT, b"one")
    output.redraw()
    assert terminal.read() == b"[2] two\r\x1b[K[1] one"
    output.end(1, STDOUT)
    output.redraw()
    assert terminal.read() == b"\r\x1b[K[1] one\n[2] two"
    with Signals() as signals:
        assert output.close(signals) is None
    assert terminal.read() == b"\r\x1b[K"


def test_redrawing_ends_when_nothing_changes(terminal: Sink) -> None:
    output = on(terminal)
    output.feed(0, STDOUT, b"prompt> ")
    for _ in range(3):
        output.redraw()
    assert output.next_redraw() is None
    assert terminal.read() == b"[0] prompt> "


def test_a_state_wider_than_the_terminal_is_cut_to_fit(terminal: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((40, 24)))
    output = on(terminal)
    output.feed(0, STDOUT, b"x" * 100)
    output.redraw()
    assert terminal.read() == b"[0] " + b"x" * 35


def test_ranks_have_colours_on_a_terminal_only(terminal: Sink, file: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    output = AgentOutput(terminal.writer, file.writer)
    output.feed(0, STDOUT, b"a\n")
    output.feed(1, STDOUT, b"b\n")
    output.feed(1, STDERR, b"c\n")
    assert terminal.read() == b"\x1b[36m[0]\x1b[0m a\n\x1b[32m[1]\x1b[0m b\n"
    assert file.read() == b"[1] c\n"
    monkeypatch.setenv("NO_COLOR", "1")
    output.feed(0, STDOUT, b"a\n")
    assert terminal.read() == b"[0] a\n"
