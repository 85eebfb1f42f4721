"""Integrations with training frameworks: a module for each framework, to be imported by its name.

``shoal.frameworks.transformers`` has a Trainer, ``shoal.frameworks.accelerate`` an Accelerator,
``shoal.frameworks.lightning`` a strategy for Lightning's Trainer. Each needs its own package, and nothing else of Shoal
needs any of them.
"""

from __future__ import annotations

from ..runtime.agent import Agent


def not_installed(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error for a missing package of a framework: its name, and the extra that installs it."""
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'shoal[{extra}]'", name=error.name)


def check_agent(agent: Agent, who: str) -> None:
    """Refuse agents that a framework does not support.

    Args:
        who: The begin of the message.

    Raises:
        ValueError: The agent is a thread, or the others would survive its loss.
    """
    if agent.launch.launcher == "fleet":
        raise ValueError(
            f"{who}: there is one state for each process, so agents that are threads (shoal.Fleet) cannot have one "
            "each. Start processes: shoal run -n 4 script.py"
        )
    if agent.engine.survives_losses:
        raise ValueError(
            f'{who}: on_loss="continue": the samples of an agent that is lost would be read by no agent, and its '
            "metrics be missing. Leave it out, and resume from a checkpoint"
        )
