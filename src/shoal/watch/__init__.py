"""A page that shows a run: while it goes on (``shoal run --watch``), or what its files say of it (``shoal watch DIR``).

Nothing here imports torch, which launchers do without.
"""
