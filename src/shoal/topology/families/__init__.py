"""Graphs and schedules by family, a module for each."""
