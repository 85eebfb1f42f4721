"""The folder of checkpoints: the complete ones, the latest one, atomically written files, and all agents' steps on it.

``<folder>/000007-step-700/agent-3.pt`` is the file of agent 3 in the seventh save. ``manifest.json`` beside it is
written when all agents' files are on the disk, and removed before any of them is: only a checkpoint with a manifest
counts. It has a checksum of each file, and of itself: they detect damage by a disk, and are no signature.

All agents take steps together where one of them may fail: an error on one agent is raised on all
(:func:`from_one_agent`, :func:`all_try`).
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...errors import ShoalError
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import broadcast_object
from ...runtime.agent import current

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_MANIFEST = "manifest.json"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The data of a complete checkpoint: its step, and the number of agents that wrote it."""

    step: int
    agents: int
    parts: Sequence[str]
    checksums: Sequence[int] = ()
    """CRC-32 of each agent's file; empty where an earlier version wrote it."""
    size: int = 0
    """How many ranks the run had, of which some may have been lost; 0 where an earlier version wrote it."""

    def __post_init__(self) -> None:
        # Without a checksum, as in an earlier version, any JSON may be in its place.
        counts = (self.step, self.agents - 1, self.size, *self.checksums)
        parts = isinstance(self.parts, list | tuple) and all(isinstance(part, str) for part in self.parts)
        if not parts or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("it has other things than numbers of agents and steps, and names of parts")


class Damaged(Exception):
    """A file that does not hold what was written to it."""


def next_name(folder: Path, step: int) -> str:
    """The name of a new folder, also if the same step was saved, or begun, before."""
    # Incomplete folders count as well: files of a failed save would otherwise be mixed with those of this one.
    number = max((number for number, _ in _begun(folder)), default=0) + 1
    return f"{number:06d}-step-{step}"


def is_name(name: object) -> bool:
    """Whether a name is that of a checkpoint's folder, and leads nowhere else."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_of_step(name: str, step: int) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and int(match[2]) == step


def find(folder: Path, step: int | None) -> dict[str, Any]:
    """``found``: (name, manifest) of each complete checkpoint (of a step), the last first; ``steps`` of all."""
    complete = [(place.name, manifest) for _, place in _begun(folder) if (manifest := _manifest_of(place))]
    found = [(name, asdict(manifest)) for name, manifest in complete if step is None or manifest.step == step]
    return {"found": found[::-1], "steps": sorted({manifest.step for _, manifest in complete})}


def complete(folder: Path, name: str, manifest: Manifest, keep: int | None) -> list[str]:
    """Make a checkpoint count, and of all only the last ``keep``; their names."""
    content = asdict(manifest)
    text = json.dumps(content | {"crc32": _crc_of(content)}, indent=1)
    # The manifest comes last and as a whole. A process that is killed before leaves a folder that does not count.
    manifest_path = folder / name / _MANIFEST
    try:
        write_atomically(manifest_path, lambda path: path.write_text(text))
        # The folder's own entry: after a power cut the files could else be on the disk, and the folder that names them
        # not.
        _sync(folder)
    except BaseException:
        # All agents take back their files now; with a manifest, what is left would still be found.
        with suppress(OSError):
            manifest_path.unlink(missing_ok=True)
        raise
    # Only complete checkpoints: an incomplete one among the last would push out one that can be loaded.
    counting = [place for _, place in _begun(folder) if _manifest_of(place)]
    last = counting[-keep:] if keep else counting
    for place in counting[: -len(last)]:
        # Before any agent removes its files: with its manifest, a checkpoint of which half is gone would still be
        # found. A power cut may bring it back, as the folder is not synced. That does no harm: newer checkpoints are
        # tried first, a missing or partial file is an error on all agents, and the next save unlinks it again. One that
        # cannot be removed stays: the new checkpoint counts already, and its save has not failed.
        with suppress(OSError):
            (place / _MANIFEST).unlink()
    return [place.name for place in last]


def remove_all_but(folder: Path, names: Collection[str]) -> None:
    """Remove older checkpoints. All agents call it: each may have its own disk, or they share one, where others may
    have begun the next checkpoint.

    A checkpoint with an unreadable manifest is kept, so that users can repair it.
    """
    begun = _begun(folder)
    last = max((number for number, place in begun if place.name in names), default=0)
    for number, place in begun:
        if number < last and place.name not in names and not (place / _MANIFEST).exists():
            shutil.rmtree(place, ignore_errors=True)


def write_states(place: Path, rank: int, states: dict[str, Any]) -> int:
    """One agent's file; its checksum.

    Raises:
        TypeError: A state holds something that :func:`read_states` would refuse; it names the part.
    """

    def write(path: Path) -> None:
        save_tensors(states, path)
        try:
            # Read back now: a state that read_states refuses would be found only when the run is to be resumed.
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            _name_the_part(states)
            raise error from None

    place.mkdir(parents=True, exist_ok=True)
    path = _file_of(place, rank)
    write_atomically(path, write)
    return _crc(path)


def save_tensors(state: Any, path: Path) -> None:
    """As ``torch.save``, with the system's own errors."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # the system's error is only its context
        raise _of_the_system(error) from None


def _of_the_system(error: BaseException) -> BaseException:
    """The operating system's error behind an error of torch, such as a full disk; else the error itself."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__context__
    return error


def withdraw(place: Path, rank: int) -> None:
    """Take back what one agent has written of a checkpoint that is not to be."""
    path = _file_of(place, rank)
    if (place / _MANIFEST).exists():  # it counts: the agent that wrote it was lost before the others learned of it
        return
    with suppress(OSError):  # it never was there
        for file in (path, _partial(path)):
            file.unlink(missing_ok=True)
        place.rmdir()  # unless it has files of others


def read_states(place: Path, rank: int, manifest: Manifest, mmap: bool = False) -> dict[str, Any]:
    """One agent's file: plain data and tensors only, so no code runs. With ``mmap`` a tensor costs no memory.

    Raises:
        Damaged: The file differs from the one that was written.
    """
    path = _file_of(place, rank)
    # Before torch.load: its errors on a damaged file do not tell what is wrong, and damaged numbers cause none at all.
    if manifest.checksums and _crc(path) != manifest.checksums[rank]:
        raise Damaged(f"{path} has changed since it was written: its checksum differs from that in the manifest")
    states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    return states


def _name_the_part(states: dict[str, Any]) -> None:
    for name, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise TypeError(
                f"the state of {name} holds something that would not be loaded again "
                f"({named[1] if named else str(error).splitlines()[0]}): it may hold tensors, numbers, strings, and "
                "collections of these"
            ) from None


def _file_of(place: Path, rank: int) -> Path:
    return place / f"agent-{rank}.pt"


def _begun(folder: Path) -> list[tuple[int, Path]]:
    """The folders of checkpoints, complete or not, by number."""
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()]
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def _manifest_of(place: Path) -> Manifest | None:
    """None if there is none, and, with a warning, where it cannot be read."""
    path = place / _MANIFEST
    try:
        content = json.loads(path.read_text())
        crc = content.pop("crc32", None)
        manifest = Manifest(**content)
        if crc is None and not manifest.checksums:  # of an earlier version
            return manifest
        if crc == _crc_of(content) and len(manifest.checksums) == manifest.agents:
            return manifest
        problem = "its checksum is not that of what it says"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"checkpoint: {path} is damaged ({problem}); that checkpoint does not count", stacklevel=2)
    return None


def _crc_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that all of it is on the disk under its name, or nothing."""
    partial = _partial(path)
    try:
        write(partial)
        # Before the rename: after a power cut the name could otherwise refer to a file without its content.
        _sync(partial)
        partial.replace(path)
    except BaseException:
        # A full disk is the usual reason: what was written would keep it full.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    # The rename is an entry of the folder, which fsync of the file does not write.
    _sync(path.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot do it with folders
            raise
    finally:
        os.close(descriptor)


T = TypeVar("T")


def present_agents(timeout: float | None) -> tuple[int, ...]:
    """The ranks of the current agents, the same on all of them."""
    return tuple(gather_by_rank(torch.empty(0, device="cpu"), Internal("checkpoint.agents"), timeout=timeout))


def from_one_agent(rank: int, name: str, ask: Callable[[], T], timeout: float | None) -> T:
    """Call ``ask`` on one rank and return its result on all agents; an error is raised on all as well."""
    answer: dict[str, Any] = {}
    failure = None
    if current().rank == rank:
        try:
            answer = {"found": ask()}
        # The others wait in the broadcast below. An error raised here would leave them there until their deadline.
        except Exception as error:
            failure, answer = error, {"error": _text_of(error)}
    answer = broadcast_object(answer, rank, Internal(name), timeout=timeout)
    if "error" in answer:
        raise ShoalError(f"{name.partition('.')[0]}: at rank {rank}, {answer['error']}", (rank,)) from failure
    found: T = answer["found"]
    return found


class AgentErrors(dict[int, str]):
    """The agents' errors by rank, the same on all agents."""

    def error(self, problem: str) -> ShoalError:
        return ShoalError(f"{problem}: " + "; ".join(f"at rank {rank}, {text}" for rank, text in self.items()), self)


def all_try(name: str, attempt: Callable[[], T], timeout: float | None) -> tuple[AgentErrors, T | None]:
    """Call ``attempt`` on all agents: the errors of all, and this agent's result. No agent waits for a failed one."""
    result, problem = None, ""
    try:
        result = attempt()
    # Not raised here: this agent would be missing in the gather below, and the others would wait for it.
    except Exception as error:
        problem = _text_of(error)
    texts = gather_by_rank(
        torch.tensor(list(problem.encode()), dtype=torch.uint8, device="cpu"), Internal(name), timeout=timeout
    )
    return AgentErrors({rank: bytes(text.tolist()).decode() for rank, text in texts.items() if len(text)}), result


def _text_of(error: Exception) -> str:
    # Encodable: the name of a file may have bytes that are no UTF-8, and an error here would leave the others waiting.
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
