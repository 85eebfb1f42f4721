"""Saving a training run, resuming it, and handing its state to agents that rejoin."""
