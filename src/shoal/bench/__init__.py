"""The measurements of ``shoal bench``: exchanges of Shoal and of other libraries, in the same run on the same machine.

An agent's part is in ``parts``, and ``python -m shoal.bench.parts PART`` runs one of them inside a job. The modules
that start the jobs and evaluate their figures need no agent: ``jobs``, ``results``.
"""
