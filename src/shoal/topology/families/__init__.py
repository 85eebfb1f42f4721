"""Graphs and schedules by family, a module for each; importing this enters them in the catalog."""

from . import registered as registered
