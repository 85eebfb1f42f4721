"""The measurements of ``shoal bench``: exchanges of Shoal and of other libraries, in the same run on the same machine.

An agent's part is in ``parts``, and ``python -m shoal.bench.parts PART`` runs one of them inside a job. ``measurement``
starts the jobs, and ``results`` evaluates their figures.
"""
