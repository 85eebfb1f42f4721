"""Save a decentralized run and resume it: every agent has a model of its own, so every agent's state is kept.

A :class:`Checkpoint` names the parts of a run. It writes one file for each agent, and a manifest when all files are
complete; without a manifest the files do not count. So at any time a process is killed, the last complete checkpoint is
the one that is found. The same object works in ``torch.distributed.checkpoint``, under keys that name the agent.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch

from ...dtensors import is_sharded, parts_of_state, spread_as
from ...errors import Mismatch, PeerLost, ShoalError
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.state_transfer import admit_joining_agents, transfer_state
from ...runtime.agent import current
from ...topology._validate import as_int
from ..optimizer import DecentralizedOptimizer
from ..params import check_not_averaged
from .checkpoint_files import (
    AgentErrors,
    Manifest,
    all_try,
    complete,
    find,
    from_one_agent,
    is_name,
    is_of_step,
    next_name,
    present_agents,
    read_states,
    remove_all_but,
    withdraw,
    write_states,
)
from .states import (
    NO_SCHEDULES,
    GeneratorState,
    Stateful,
    as_stateful,
    in_own_memory,
    is_scheduled,
    mean_state,
    state_for_new_agent,
    state_of_agent,
    without_own_memory,
)


class Checkpoint:
    """The parts of a run, saved and loaded together, separately for each agent.

    With ``torch.distributed.checkpoint``::

        state = {"training": shoal.Checkpoint(model=model, optimizer=optimizer)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)

    ``torch.distributed.checkpoint`` keeps one copy for each key, from any agent. Therefore the keys name the agent and
    the number of agents (``training.agent1of4.model.0.weight``). Loading with another number of agents fails at a
    missing key, before anything is changed. To change the number, load with the old one and call :meth:`save`; then
    :meth:`load` with the new one and ``start="consensus"``.

    A script's own counters are a dict, which ``load`` fills in place::

        state = {"step": 0, "best": math.inf}
        checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, state=state)

    Args:
        parts: The same names on all agents; each part is one of these:

            - an object with ``state_dict`` and ``load_state_dict``: a model, an optimizer, a scheduler, a sampler;
            - a dict or a list of plain data (numbers, strings, None, tensors, and collections of these), such as
              counters: a loaded or rejoining agent has the values of the checkpoint or of the other agents in it;
            - a ``torch.Generator``, such as ``torch.default_generator``, which dropout draws from.

    Raises:
        TypeError: A part is none of these.
        ValueError: There is none.
    """

    def __init__(self, **parts: Stateful | torch.Generator | dict[Any, Any] | list[Any]) -> None:
        if not parts:
            raise ValueError("a checkpoint without parts: name them: Checkpoint(model=model, optimizer=optimizer)")
        self._parts: dict[str, Stateful] = {}
        for name, part in parts.items():
            self._parts[name] = as_stateful(name, part)
        self._warned_of_schedules = False
        # Models are loaded first, because an optimizer may keep data that belongs to their values.
        self._parts = dict(sorted(self._parts.items(), key=lambda item: not isinstance(item[1], torch.nn.Module)))

    # Files of Checkpoint.save

    @overload
    def save(
        self, folder: str | os.PathLike[str], step: int, *, keep: int | None = 3, timeout: float | None = None
    ) -> Path: ...

    @overload
    def save(
        self, folder: str | os.PathLike[str] | None, step: int, *, keep: int | None = 3, timeout: float | None = None
    ) -> Path | None: ...

    def save(
        self, folder: str | os.PathLike[str] | None, step: int, *, keep: int | None = 3, timeout: float | None = None
    ) -> Path | None:
        """Write a checkpoint. All agents call it, between two steps; when it returns, the checkpoint counts.

        If one agent cannot write, none has saved, and all raise.

        Restarted agents (``shoal run --on-failure restart``) and joining ones (``--join``) are admitted here: their
        :meth:`load` gives them the state of a present agent, and returns ``step``.

        Args:
            folder: On a disk that all machines share, or each machine's own if ranks stay on their machines. None:
                nothing is written, but restarted agents are admitted.
            step: Returned by :meth:`load`, 0 or more; the same on all agents.
            keep: How many of the latest checkpoints to keep; None keeps all.
            timeout: Seconds that each wait for the other agents may take.

        Returns:
            The checkpoint's own folder, ``<folder>/000007-step-700`` for the seventh save; None if none is written.

        With ``on_loss="continue"`` it contains the surviving agents, numbered in the order of their ranks: it loads
        into as many agents, or with ``start="consensus"`` into any number.

        Raises:
            TypeError: ``step`` or ``keep`` is no whole number.
            ValueError: ``step`` is negative, or ``keep`` less than 1.
            RuntimeError: A model holds the mean of all agents, inside :func:`~shoal.consensus`.
            ShoalError: An agent could not save; the error names the ranks and the reasons. One reason is a state of
                other objects than tensors, numbers, strings and their collections, because it could not be loaded.
        """
        agent = current("Checkpoint.save")
        _check_unsharded_agents("Checkpoint.save")
        step = as_int(step, "checkpoint: step")
        if step < 0:
            raise ValueError(f"checkpoint: step={step} must be 0 or more")
        if keep is not None and as_int(keep, "checkpoint: keep") < 1:
            raise ValueError(f"checkpoint: keep={keep} must be 1 or more, or None for all")
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                check_not_averaged("Checkpoint.save", part.parameters())
        self._warn_of_schedules()
        place = None
        # None: the agent that names the folder was lost. The remaining ones save again, under another name and
        # renumbered.
        while folder is not None and place is None:
            place = self._save_among(present_agents(timeout), Path(folder), step, keep, timeout)
        # After the files: an admitted agent gets the state of this step, and its file is not missing in a save that has
        # begun.
        if agent.engine.survives_losses and admit_joining_agents(agent, timeout):
            transfer_state(agent, lambda: self._handed_over(step), timeout)
            self._meet()
        return place

    def _warn_of_schedules(self) -> None:
        """A learning-rate schedule that is not saved would begin anew in a resumed run or a restarted agent."""
        optimizers = [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]
        has_schedule = not all(isinstance(part, NO_SCHEDULES) for part in self._parts.values())
        if self._warned_of_schedules or has_schedule or not any(map(is_scheduled, optimizers)):
            return
        self._warned_of_schedules = True
        warnings.warn(
            "checkpoint: a learning-rate schedule of an optimizer that is saved is not saved itself. It would start "
            "over when the run is resumed or an agent restarted. Add it: Checkpoint(..., schedule=schedule)",
            stacklevel=3,
        )

    def _meet(self) -> None:
        """Agents have entered, and have their state: do what all have to do together then."""
        # By name: the calls are collective, and agents may have passed their parts in different orders.
        for _, part in sorted(self._parts.items()):
            if isinstance(part, DecentralizedOptimizer):
                part.met()

    def _handed_over(self, step: int) -> dict[str, Any]:
        """The state for an agent that is admitted now."""
        states = {}
        for name, part in self._parts.items():
            if not isinstance(part, GeneratorState):  # agents that draw alike would be of little use to each other
                state = part.hand_over() if isinstance(part, DecentralizedOptimizer) else part.state_dict()
                states[name] = in_own_memory(dict(state) if isinstance(state, Mapping) else state)
        return {"step": step, "parts": states}

    def _enter(self, timeout: float | None) -> int:
        """Join at the others' next save, with the state of one of them."""
        agent = current("Checkpoint.load")
        entry = agent.engine.rejoin
        entry.wait(entry.rejoin_seconds if timeout is None else timeout, agent.engine.stall_seconds)
        state = transfer_state(agent, None, timeout)
        parts = {name: part for name, part in self._parts.items() if not isinstance(part, GeneratorState)}
        if parts.keys() != state["parts"].keys():
            raise ValueError(
                f"checkpoint: rank {agent.rank} was started again, and loads {', '.join(parts)}; the others save "
                f"{', '.join(state['parts'])}. Load the same parts that they save"
            )
        for name, part in parts.items():
            if isinstance(part, DecentralizedOptimizer):
                part.take_over(state["parts"][name])
            else:
                part.load_state_dict(state["parts"][name])
        self._meet()
        return int(state["step"])

    def _save_among(
        self, there: tuple[int, ...], folder: Path, step: int, keep: int | None, timeout: float | None
    ) -> Path | None:
        """A checkpoint of these agents, numbered in this order; None if one of them was lost during the save."""
        agent, place = current("Checkpoint.save"), None
        first, number = there[0], there.index(agent.rank)
        try:
            begun = from_one_agent(
                first, "checkpoint.name", lambda: [next_name(folder, step), *sorted(self._parts)], timeout
            )
            name, parts = _named(begun[0]), begun[1:]
            path = place = folder / name

            def write() -> int:
                # Models last: an optimizer with windows takes in what has arrived, and so changes its model.
                parts_in_order = reversed(self._parts.items())
                states = {name: in_own_memory(part.state_dict()) for name, part in parts_in_order}  # may need all
                if not is_of_step(name, step):
                    raise Mismatch(f"step={step} was given, and rank {first} saves {name}")
                if sorted(self._parts) != parts:
                    own, its = ", ".join(sorted(self._parts)), ", ".join(parts)
                    raise Mismatch(f"the parts are {own}, and those of rank {first} are {its}")
                if len(there) < agent.size:
                    states = {part: state_of_agent(state, number, len(there)) for part, state in states.items()}
                return write_states(path, number, states)

            # A gather of all agents' results: no manifest is written before every file is on its disk.
            failures, crc = all_try("checkpoint.save", write, timeout)
            # All agents see the same failures, so all take back their files and raise, or none.
            if failures:
                withdraw(place, number)
                raise failures.error(f"{place} is not saved")
            own = torch.tensor([crc or 0], device="cpu")
            checksums = gather_by_rank(own, Internal("checkpoint.checksums"), timeout=timeout)
            # An agent that was lost after the names were agreed has no file, or one without a checksum here. The
            # numbering would then have a gap.
            if tuple(checksums) == there:
                crcs = tuple(int(checksum) for checksum in checksums.values())
                manifest = Manifest(step, len(there), tuple(self._parts), crcs, agent.size)
                made = partial(complete, folder, name, manifest, keep)
                try:
                    remove_all_but(folder, from_one_agent(first, "checkpoint.manifest", made, timeout))
                except ShoalError as error:
                    # The error of the one agent, on all. After a timeout the manifest may still be written.
                    if type(error) is ShoalError:
                        withdraw(place, number)
                    raise
                return place
        except PeerLost as lost:
            # Only the loss of the agent that names the folder is answered with another attempt; the other operations go
            # on without lost agents by themselves.
            if first not in lost.ranks or not agent.engine.survives_losses:
                raise
        if place is not None:
            withdraw(place, number)
        return None

    def load(
        self,
        folder: str | os.PathLike[str] | None,
        step: int | None = None,
        *,
        start: Literal["own", "consensus"] = "own",
        missing_ok: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Resume at the state of a :meth:`save`. All agents call it.

        Saved parts that this checkpoint does not name are ignored. Nothing is loaded unless all agents could read. If
        one cannot, or the checksum of a file is wrong, a warning names the file, and the previous checkpoint is loaded
        (of that ``step``, if one is given).

        If all agents failed and the launcher restarted the job, its last checkpoint may have fewer agents than the job.
        Then all begin at the mean of the saved agents, as with ``start="consensus"``, with a warning.

        An agent that is restarted while the others run (``shoal run --on-failure restart``) reads no file. It waits
        until the others call :meth:`save`, for up to ``SHOAL_ENTRY_TIMEOUT`` seconds, and is admitted there. It gets
        the state of a nearby agent; the algorithm's memory is reset. Until then it exchanges with no agent.

        Args:
            folder: The one given to :meth:`save`; None: there are no files.
            step: The step to load; None for the latest checkpoint.
            start: ``"own"``: each agent's own state, bit for bit. ``"consensus"``: the same state on all agents, with
                any number of them. Fractional values (parameters, running means, momentum) are the mean over the saved
                agents that have them, summed in float64; equal learning rates are unchanged. All other values
                (counters, the rounds of the optimizer) are agent 0's. Generators are not loaded, because agents with
                equal random numbers would be of little use to each other. Every machine must have all files.
            missing_ok: Return 0, and change nothing, if there is no complete checkpoint yet.
            timeout: Seconds that each wait for the other agents may take.

        Returns:
            The step that was saved.

        Raises:
            FileNotFoundError: There is no complete checkpoint (of that step).
            ValueError: It is of another number of agents, or lacks a part.
            ShoalError: No checkpoint (of that step) could be read by all; it names the ranks, the files and the
                reasons for the last one.
        """
        _check_unsharded_agents("Checkpoint.load")
        if current("Checkpoint.load").engine.is_joining:
            return self._enter(timeout)
        if start not in ("own", "consensus"):
            raise ValueError(f"checkpoint: start={start!r}; it may be 'own' or 'consensus'")
        if folder is None:
            if missing_ok:
                return 0
            raise FileNotFoundError("checkpoint: folder=None has no files; missing_ok=True begins at step 0")
        folder = Path(folder)
        there = present_agents(timeout)
        found = from_one_agent(
            there[0], "checkpoint.find", lambda: find(folder, step) | {"parts": sorted(self._parts)}, timeout
        )
        if not found["found"]:
            if missing_ok and not found["steps"]:
                return 0
            which = "" if step is None else f" of step {step}; there are those of {found['steps']}"
            raise FileNotFoundError(f"there is no complete checkpoint in {folder}{which}")
        errors: list[ShoalError] = []
        for name, content in found["found"]:
            if errors:
                warnings.warn(f"checkpoint: {errors[-1]}; the one before it is tried", stacklevel=2)
            place, manifest = folder / _named(name), Manifest(**content)
            start_state = _initial_state(start, place, manifest, len(there))
            failures, states = self._read(place, manifest, start_state, there, found["parts"], timeout)
            # Nothing is loaded before all agents could read. Otherwise some would continue from this checkpoint and
            # others from the one before.
            if states is not None and not failures:
                for part_name, part in self._parts.items():
                    if start_state == "own" or not isinstance(part, GeneratorState):
                        part.load_state_dict(states[part_name])
                return manifest.step
            errors.append(failures.error(f"{place} is not loaded"))
        raise errors[0]

    def _read(
        self,
        place: Path,
        manifest: Manifest,
        start: str,
        there: tuple[int, ...],
        parts: Iterable[str],
        timeout: float | None,
    ) -> tuple[AgentErrors, dict[str, Any] | None]:
        """The state that each agent loads from one checkpoint, by part; and the agents that could not read it.

        Args:
            parts: The names of the parts of the first of these agents.
        """
        agent = current("Checkpoint.load")
        if start == "own" and manifest.agents not in (agent.size, len(there)):
            raise ValueError(
                f"{place} is of {manifest.agents} agents, and there are {len(there)} now. Run with {manifest.agents}, "
                "or load with start='consensus': then every agent begins at the mean of all saved models."
            )

        def check(names: Iterable[str]) -> None:
            lacking = set(names) - set(manifest.parts)
            if lacking:
                raise ValueError(f"{place} has {', '.join(manifest.parts)}, and not {', '.join(sorted(lacking))}")

        check(parts)  # of one agent: an error here is raised on all, where an agent with other parts would wait below

        def read() -> dict[str, Any]:
            check(self._parts)
            if start == "own" and manifest.agents == agent.size:
                return read_states(place, agent.rank, manifest)
            if start == "own":  # numbered in the order of the ranks that were there, as it was saved
                own = read_states(place, there.index(agent.rank), manifest)
                return {part: state_of_agent(state, agent.rank, agent.size) for part, state in own.items()}
            files = [read_states(place, rank, manifest, mmap=True) for rank in range(manifest.agents)]
            return {name: _mean_of([file[name] for file in files], name, part) for name, part in self._parts.items()}

        return all_try("checkpoint.load", read, timeout)

    # torch.distributed.checkpoint

    def state_dict(self) -> dict[str, Any]:
        """For ``torch.distributed.checkpoint``: one entry, which names this agent.

        Each tensor of a model has a key. Any other part is one object, in a tuple, which is not taken apart: an
        optimizer that has not stepped yet has no tensors to read its momentum into, and it would be left out silently.
        Where replicas have several processes (``init(mesh=)``) the parts of a model's sharded tensors are put together
        by their key, and what each process has beside them is under a key that names the process.
        """
        key, own = _key(), _key_of_process()
        state: dict[str, Any] = {}
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                whole = part.state_dict()
                state.setdefault(key, {})[name] = whole
                beside = [called for called, value in whole.items() if key != own and not _is_sharded(value)]
                if beside:
                    state.setdefault(own, {})[name] = {called: whole.pop(called) for called in beside}
            else:
                state.setdefault(own, {})[name] = (in_own_memory(_of_process(part)),)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave.

        Raises:
            ValueError: The state is another agent's, or of another number of agents.
        """
        key, own = _key(), _key_of_process()
        if not {key, own} & set(state_dict):
            raise ValueError(
                f"the state is that of {', '.join(state_dict)}, and this is {own}. For another number of agents use "
                "Checkpoint.save, and Checkpoint.load with start='consensus'."
            )
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                whole = state_dict.get(key, {}).get(name, {})
                beside = state_dict.get(own, {}).get(name, {}) if own != key else {}
                part.load_state_dict({**whole, **beside} if beside else whole)
            else:
                [value] = state_dict[own][name]
                if isinstance(part, torch.optim.Optimizer):
                    value = {**value, "state": spread_as(value["state"], _params(part))}
                part.load_state_dict(value)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_sharded(value)


def _of_process(part: Stateful) -> Any:
    """The state of a part, as far as this process has it."""
    state = part.state_dict()
    if isinstance(part, torch.optim.Optimizer):
        return {**state, "state": parts_of_state(state["state"], _params(part))}
    return state


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_unsharded_agents(call: str) -> None:
    """Refuse replicas of several processes: an agent's own checkpoint is complete only with the files of all
    processes.
    """
    if current(call).launch.beside:
        raise ValueError(
            f"{call}: an agent is one process of a replica here (init(mesh=)), and a checkpoint is complete when all "
            "processes of all replicas have saved, which torch.distributed.checkpoint ensures: "
            'dcp.save({"training": checkpoint}, checkpoint_id=folder)'
        )


def _initial_state(start: str, place: Path, manifest: Manifest, there: int) -> str:
    """``start``, or the mean, if this job was restarted and had lost agents when this was saved."""
    agent = current("Checkpoint.load")
    fewer = manifest.size == agent.size and manifest.agents not in (agent.size, there)
    if start != "own" or not fewer or not agent.launch.attempt:
        return start
    warnings.warn(
        f"checkpoint: {place} is of {manifest.agents} agents, since others had been lost when it was saved. This run "
        f"was begun again, with {there}: all of them begin at the mean of those",
        stacklevel=3,
    )
    return "consensus"


def _mean_of(states: list[Any], name: str, part: Stateful) -> Any:
    algorithm = part.algorithm if isinstance(part, DecentralizedOptimizer) else None
    return state_for_new_agent(mean_state([without_own_memory(state, algorithm) for state in states], name))


def _key() -> str:
    agent = current("Checkpoint")
    return f"agent{agent.rank}of{agent.size}"


def _key_of_process() -> str:
    """The agent's key if it is one process; else also the number of the process among all."""
    launch = current("Checkpoint").launch
    return f"{_key()}-process{launch.ranks[launch.rank]}of{launch.processes}" if launch.beside else _key()


def _named(name: Any) -> str:
    """The name of a checkpoint, as another agent sent it. It is checked, because it becomes a path below which files
    are written and removed.
    """
    if not is_name(name):
        raise ShoalError(f"checkpoint: another agent sent {name!r}, which is no checkpoint's name")
    return str(name)
