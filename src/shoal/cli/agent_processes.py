"""Starts the agents of one machine, supervises them until they end, and leaves no process behind.

Everything happens in the main thread, in one loop over the agents' pipes and a wake-up pipe through which signals and
deaths arrive. No thread is needed, and must not be: the kernel ends an agent together with the *thread* that forked it.

Each agent leads a session of its own, as under torchrun. So a Ctrl-C reaches the launcher alone, which passes it on
exactly once. The processes that an agent leaves behind (the workers of a data loader) are in its process group and can
be found. Unlike a process group in the background, a session may still read the terminal, which a debugger in rank 0
does.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ..config import EXIT_NOTES, INCARNATION
from ..fault_tolerance.launcher_notes import PEER_LOSS, ExitNotes, awaited_ranks, is_marked
from ..observability.watch.live import Watch, print_message
from .agent_output import STDERR, STDOUT, AgentOutput, AgentPipes
from .launcher_signals import Signals, death_with

SETTLE_SECONDS = 0.5
"""The time without a further failure before an agent is restarted: agents that end of one cause end one by one, and
without any agent left none could admit it."""

SAME_INTERRUPT_SECONDS = 0.25
"""A second SIGINT within this time is the same Ctrl-C: a wrapper has passed it on, and the terminal sent it to all."""
FINISHED_SECONDS = 3.0
"""The time after which agents that still run get a report of one that has ended well: most end by then, too."""
CAUSE_SECONDS = 2.0
"""After an agent failed because another one was lost: how long to wait for the failure that caused it."""
CAUSE_EXIT_SECONDS = 30.0
"""The same while an agent of this machine is known to end: exit handlers and the release of memory may take long."""

# A terminal sends these to a whole process group, ``kill`` sends the others to one process.
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class AgentExit:
    """The end of one agent.

    Attributes:
        code: Its exit code, or minus the number of the signal that killed it.
        is_peer_loss: The agent failed because another agent was lost.
        awaited: The ranks for which the agent waited until the deadline that ended it.
    """

    rank: int
    pid: int
    code: int
    seconds: float
    is_peer_loss: bool = False
    awaited: tuple[int, ...] = ()

    @property
    def exit_status(self) -> int:
        """The status that a shell would give: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"exited with code {self.code}" if self.code >= 0 else f"was killed by {_signal_name(-self.code)}"
        why = ", because another agent was lost" if self.is_peer_loss else ""
        if self.awaited and self.code > 0:
            ranks = ", ".join(map(str, self.awaited))
            why = f", because rank{'s' if len(self.awaited) > 1 else ''} {ranks} did not come in time"
        return f"rank {self.rank} (pid {self.pid}) {how} after {self.seconds:.1f} s{why}"


@dataclass(frozen=True)
class JobExit:
    """The end of a run.

    Attributes:
        status: The exit status of the job, see docs/launching.md.
        all_gone: All agents failed, and failed agents were to be restarted; no agent had finished, and no signal to the
            launcher had ended them.
        summary: A message to the user about lost agents, if any.
    """

    status: int
    all_gone: bool = False
    summary: str = ""


@dataclass(frozen=True)
class _AgentProcess:
    rank: int
    process: subprocess.Popen[bytes]
    started: float


@dataclass(frozen=True)
class _Helper:
    name: str
    process: subprocess.Popen[bytes]
    loss: str
    is_needed: bool


@dataclass(frozen=True)
class FailureHandling:
    """What follows the failure of an agent.

    Attributes:
        survive: let the others continue, instead of ending them.
        grace: seconds between asking an agent to end and the next, harder step.
        restarts: how often each failed agent is restarted, while none has finished and others are alive.
    """

    survive: bool
    grace: float
    restarts: int = 0


class AgentProcesses:
    """The agents of this machine in one run, as a context: at its end every agent is gone, in all cases.

    Args:
        output: where their output goes; None lets them write to the launcher's own stdout and stderr.
        signals: the signals to the launcher.
        failures: what follows the failure of an agent.
        elsewhere: whether agents of other launchers take part in the run. Called when no agent of this machine can
            admit others; later calls must give the same result.
        watch: is notified of starts and ends of agents, and served in the loop.
    """

    def __init__(
        self,
        output: AgentOutput | None,
        signals: Signals,
        failures: FailureHandling,
        elsewhere: Callable[[], bool] = lambda: False,
        watch: Watch | None = None,
    ) -> None:
        self._output = output
        self._signals = signals
        self._survive = failures.survive
        self._restarts = failures.restarts
        self._elsewhere = elsewhere
        self._watch = watch
        self._grace = failures.grace
        self._living: list[_AgentProcess] = []
        self._outcomes: dict[int, AgentExit] = {}  # the last of each agent
        self._start_functions: dict[int, Callable[[int], None]] = {}
        self._restarted: Counter[int] = Counter()  # how often each rank was restarted
        self._again: list[AgentExit] = []  # agents to be restarted, at this time
        self._again_at = 0.0
        self._finished: deque[tuple[float, AgentExit]] = deque()  # each with the time at which to report its end
        self._first_failure: AgentExit | None = None  # that is no peer loss, if there is one
        self._notes = ExitNotes()
        # The first peer loss, if all are to end and its cause is not known yet; and its time.
        self._peer_loss: tuple[AgentExit, float] | None = None
        self._helpers: list[_Helper] = []
        self._end_commands: dict[int, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._end_processes: list[subprocess.Popen[bytes]] = []
        # The times and signals of the next steps if the agents do not end by themselves. Not None once they are to end.
        self._steps: list[tuple[float, signal.Signals]] | None = None
        self._requested: signal.Signals | None = None
        self._interrupted_at = -math.inf
        self._passed_on: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._pipes = None if output is None else AgentPipes(output, self._selector)

    def __enter__(self) -> AgentProcesses:
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        if self._watch is not None:
            self._selector.register(self._watch, selectors.EVENT_READ, self._watch.serve)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for agent in self._living:
            _kill_group(agent.process)
        helpers = [*(helper.process for helper in self._helpers), *self._end_processes]
        for process in (*(agent.process for agent in self._living), *helpers):
            process.kill()
            process.wait()
        if self._pipes is not None:
            self._pipes.close()
        self._selector.close()
        self._notes.close()
        if self._output is not None:
            self._output.close(self._signals)

    def start(self, rank: int, command: Sequence[str], environ: Mapping[str, str], *, keeps_stdin: bool) -> None:
        """Start one agent. It is killed with the launcher, however that ends."""

        first = int(environ.get(INCARNATION, 0))  # more than 0 where it joins others

        def start(incarnation: int) -> None:
            again = {INCARNATION: str(first + incarnation)} if incarnation else {}
            self._start_agent(rank, command, {**environ, **again}, keeps_stdin and not incarnation)

        self._start_functions[rank] = start
        start(0)

    def _start_agent(self, rank: int, command: Sequence[str], environ: Mapping[str, str], keeps_stdin: bool) -> None:
        pipe = subprocess.PIPE if self._pipes is not None else None
        stdin = None if keeps_stdin else subprocess.DEVNULL
        environ = {**environ, EXIT_NOTES: self._notes.path}
        process = _start(command, env=environ, stdin=stdin, stdout=pipe, stderr=pipe)
        self._living.append(_AgentProcess(rank, process, time.monotonic()))
        if self._watch is not None:
            self._watch.started(rank, process.pid)
        if self._pipes is not None:
            self._pipes.add(rank, {STDOUT: process.stdout, STDERR: process.stderr})

    def start_helper(
        self, name: str, command: Sequence[str], descriptor: int, *, loss: str, is_needed: bool = False
    ) -> None:
        """Start a process that serves the agents with an inherited descriptor, and ends with the last of them.

        Args:
            loss: what is no longer possible if it ends before them, for the user.
            is_needed: whether the agents are ended then.
        """
        process = _start(command, stdin=subprocess.DEVNULL, pass_fds=(descriptor,))
        self._helpers.append(_Helper(name, process, loss, is_needed))

    def run_on_end(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run a command, with one more argument that describes its end, when this agent ends and others continue: when
        it fails, or :data:`FINISHED_SECONDS` after it has ended well.
        """
        self._end_commands[rank] = (command, environ)

    def supervise(self) -> JobExit:
        """Wait for the end of all agents."""
        while self._living or self._again:
            for key, _ in self._selector.select(self._next_due()):
                key.data()
            if self._pipes is not None:
                self._pipes.follow_reader()
            self._take_due_step()
            self._reap()
            self._report_peer_loss()
            self._report_finished()
            self._start_again()
            if self._output is not None:
                self._output.redraw()
            if self._watch is not None and time.monotonic() >= self._watch.due:
                self._watch.serve()
        stopped = self._output.close(self._signals) if self._output is not None else None
        if stopped is not None:
            return JobExit(128 + stopped)
        ending = self._ending()
        if ending.status == 0 and self._output is not None and self._output.is_incomplete:
            return replace(ending, status=1)  # as for a program whose last output could not be written
        return ending

    def print(self, text: str) -> None:
        """Tell the user something, on stderr."""
        if self._output is not None:
            self._output.print(f"shoal run: {text}")
        else:
            print_message(text)

    def _ending(self) -> JobExit:
        lost = [self._outcomes[rank] for rank in sorted(self._outcomes) if self._outcomes[rank].code != 0]
        if self._requested is not None:
            return JobExit(128 + self._requested if lost else 0)
        if not lost:
            return JobExit(0)
        status = self._first_failure.exit_status if self._first_failure is not None else 1
        if not self._survive:
            return JobExit(status)
        finished = len(self._outcomes) - len(lost)
        summary = f"{finished} of {len(self._outcomes)} agents finished; lost: {'; '.join(map(str, lost))}"
        was_signalled = any(-outcome.code in self._passed_on for outcome in lost)
        all_gone = self._restarts > 0 and not finished and not was_signalled and not self._elsewhere()
        return JobExit(0 if finished else status, all_gone, summary)

    def _next_due(self) -> float | None:
        due = [self._steps[0][0]] if self._steps else []
        due += [self._cause_due()] if self._peer_loss is not None and self._steps is None else []
        due += [self._again_at] if self._again else []
        due += [self._finished[0][0]] if self._finished and self._living else []
        redraw = self._output.next_redraw() if self._output is not None else None
        if redraw is not None:
            due.append(redraw)
        look = self._pipes.next_look if self._pipes is not None else None
        if look is not None:
            due.append(look)
        if self._watch is not None:
            due.append(self._watch.due)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _read_signals(self) -> None:
        for signum in self._signals.read():
            if signum == signal.SIGTSTP:
                self._suspend()
            elif signum != signal.SIGCHLD:
                self._obey(signum)

    def _obey(self, signum: signal.Signals) -> None:
        if signum == signal.SIGINT and time.monotonic() - self._interrupted_at < SAME_INTERRUPT_SECONDS:
            return
        if signum == signal.SIGINT and self._steps is not None:
            self.print("interrupted again: killing the agents")
            self._signal_agents(signal.SIGKILL)
            return
        if signum in (signal.SIGINT, signal.SIGTERM) and self._steps is None:
            self._requested = signum
            if signum == signal.SIGINT:
                self._interrupted_at = time.monotonic()
            again = " (Ctrl-C again kills them)" if signum == signal.SIGINT else ""
            self.print(f"{_signal_name(signum)}: passed on, waiting for {_count(len(self._living))} to end{again}")
            self._end(signum)
            return
        self._passed_on.add(signum)
        self._signal_agents(signum)

    def _end(self, first: signal.Signals) -> None:
        harder = [signal.SIGTERM, signal.SIGKILL] if first == signal.SIGINT else [signal.SIGKILL]
        now = time.monotonic()
        self._steps = [(now + self._grace * (1 + i), signum) for i, signum in enumerate(harder)]
        self._again.clear()
        self._signal_agents(first)

    def _take_due_step(self) -> None:
        if not self._steps or time.monotonic() < self._steps[0][0]:
            return
        _, signum = self._steps.pop(0)
        self.print(f"{_count(len(self._living))} still there: sending {_signal_name(signum)}")
        self._signal_agents(signum)

    def _signal_agents(self, signum: signal.Signals) -> None:
        for agent in self._living:
            if signum == signal.SIGKILL:
                _kill_group(agent.process)
            elif signum in _GROUP_SIGNALS:
                os.killpg(agent.process.pid, signum)
            else:
                os.kill(agent.process.pid, signum)

    def _suspend(self) -> None:
        """On Ctrl-Z the agents stop, and continue with the launcher."""
        for agent in self._living:
            os.killpg(agent.process.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for agent in self._living:
            os.killpg(agent.process.pid, signal.SIGCONT)

    def _reap(self) -> None:
        ended = [(agent, code) for agent in self._living if (code := _exit_code(agent.process)) is not None]
        for agent, code in ended:
            if code != 0 or self._steps is not None:
                # Before the agent is reaped, while its pid still stands for its group and nothing else.
                _kill_group(agent.process)
            if self._pipes is not None:
                self._pipes.drain(agent.rank)
            agent.process.wait()
            self._living.remove(agent)
        now = time.monotonic()
        notes = self._notes.read() if ended else {}
        outcomes = []
        for agent, code in ended:
            pid = agent.process.pid
            note = notes.get(pid, b"") if code > 0 else b""
            is_loss, awaited = note == PEER_LOSS, awaited_ranks(note)
            outcomes.append(AgentExit(agent.rank, pid, code, now - agent.started, is_loss, awaited))
        # Of agents reaped together, one that was killed did not fail because of another one's failure.
        for outcome in sorted(outcomes, key=lambda outcome: (outcome.is_peer_loss, outcome.code >= 0, outcome.rank)):
            self._outcomes[outcome.rank] = outcome
            if self._watch is not None:
                self._watch.ended(outcome.rank, str(outcome), outcome.code == 0)
            if outcome.code == 0:
                self._finished.append((now + FINISHED_SECONDS, outcome))
            if outcome.code == 0 or self._steps is not None:
                continue
            if outcome.is_peer_loss and not self._survive:
                self._peer_loss = self._peer_loss or (outcome, now)
            else:
                self._take_failure(outcome)
        self._check_helpers()

    def _check_helpers(self) -> None:
        """Report helpers that have ended before the agents."""
        for helper in self._helpers:
            if self._living and helper.process.returncode is None and helper.process.poll() is not None:
                self.print(f"{helper.name} has ended (code {helper.process.returncode}): {helper.loss}")
                if helper.is_needed and self._steps is None:
                    self._end(signal.SIGTERM)

    def _report_peer_loss(self) -> None:
        """Report a peer loss as the job's failure if no cause is found: it is on another machine."""
        if self._peer_loss is None or self._steps is not None:
            return
        if not self._living or time.monotonic() >= self._cause_due():
            self._take_failure(self._peer_loss[0])

    def _cause_due(self) -> float:
        """When to wait no longer for the failure that caused a peer loss, in ``time.monotonic()``."""
        assert self._peer_loss is not None
        notes = self._notes.read()
        ending = any(notes.get(agent.process.pid, PEER_LOSS) != PEER_LOSS for agent in self._living)
        return self._peer_loss[1] + (CAUSE_EXIT_SECONDS if ending else CAUSE_SECONDS)

    def _take_failure(self, outcome: AgentExit) -> None:
        if self._first_failure is None or (self._first_failure.is_peer_loss and not outcome.is_peer_loss):
            self._first_failure = outcome
        others, rank = len(self._living), outcome.rank
        again = self._restarted[rank] < self._restarts and not self._has_finished
        again = again and self._may_be_admitted()
        then = "letting the rest go on" if self._survive else "ending the rest"
        failure = f"{outcome}; {then} ({_count(others)})" if others else str(outcome)
        self.print(
            f"{failure}, and starting it again ({self._restarted[rank] + 1} of {self._restarts})" if again else failure
        )
        lines = self._output.last_lines(outcome.rank) if self._output is not None else []
        if lines:
            text = "\n".join(f"    {line.decode(errors='backslashreplace')}" for line in lines)
            self.print(f"the last lines of rank {outcome.rank} on stderr:\n{text}")
        self._again_at = time.monotonic() + SETTLE_SECONDS
        if again:
            self._again.append(outcome)
        elif not self._survive:
            self._end(signal.SIGTERM)
        elif others:
            self._run_on_end(outcome)

    def _report_finished(self) -> None:
        """Report agents that have ended well while others run: these may still wait in their init() for them."""
        while self._living and self._finished and time.monotonic() >= self._finished[0][0]:
            self._run_on_end(self._finished.popleft()[1])

    def _run_on_end(self, outcome: AgentExit) -> None:
        if outcome.rank in self._end_commands:
            command, environ = self._end_commands[outcome.rank]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._end_processes.append(_start([*command, str(outcome)], env=environ, **quiet))

    def _start_again(self) -> None:
        """Restart the agents that are due. If no agent is left that could admit them, restart none."""
        if not self._again or (self._living and time.monotonic() < self._again_at):
            return
        if not self._may_be_admitted():
            self._again.clear()
        due, self._again = self._again, []
        for outcome in due:
            if self._has_finished:
                self.print(f"rank {outcome.rank} is not started again: another agent has finished meanwhile")
                self._run_on_end(outcome)
            else:
                self._restarted[outcome.rank] += 1
                self._start_functions[outcome.rank](self._restarted[outcome.rank])

    def _may_be_admitted(self) -> bool:
        """An agent may be left that can admit restarted ones: an agent that waits to rejoin cannot."""
        return any(not is_marked(agent.process.pid) for agent in self._living) or self._elsewhere()

    @property
    def _has_finished(self) -> bool:
        """An agent has finished its script, and the others will."""
        return any(outcome.code == 0 for outcome in self._outcomes.values())


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    bind = death_with(os.getpid())
    return subprocess.Popen(command, start_new_session=True, preexec_fn=bind, **options)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of an agent that is not yet reaped, as ``Popen.returncode``; None if it is alive."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _count(agents: int) -> str:
    return "1 agent" if agents == 1 else f"{agents} agents"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
