"""The live page of a run (``shoal run --watch``), and of a finished run from its files (``shoal watch DIR``).

Nothing here imports torch, because launchers run without it.
"""
