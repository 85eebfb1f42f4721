"""Steps that all agents take together where one of them may fail: an error on one agent is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...errors import ShoalError
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import broadcast_object
from ...runtime.agent import current

T = TypeVar("T")


def present_agents(timeout: float | None) -> tuple[int, ...]:
    """The ranks of the current agents, the same on all of them."""
    return tuple(gather_by_rank(torch.empty(0), Internal("checkpoint.agents"), timeout=timeout))


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
    texts = gather_by_rank(torch.tensor(list(problem.encode()), dtype=torch.uint8), Internal(name), timeout=timeout)
    return AgentErrors({rank: bytes(text.tolist()).decode() for rank, text in texts.items() if len(text)}), result


def _text_of(error: Exception) -> str:
    # Encodable: the name of a file may have bytes that are no UTF-8, and an error here would leave the others waiting.
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
