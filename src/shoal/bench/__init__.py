"""What ``shoal bench`` measures: the exchange of Shoal against that of others, in the same run on the same machine.

An agent's part is in ``speed``, ``memory``, ``wire`` and ``scaling``, and ``python -m shoal.bench PART`` runs one of
them inside a job. What starts the jobs and judges their figures needs no agent: ``jobs``, ``verdicts``, ``picture``.
"""
