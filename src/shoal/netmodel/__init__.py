"""A model of the network: predicts the time of rounds of a topology, of all-reduces and of training on another network.

:class:`Network` describes the network between agents, by a :class:`Link` inside a machine and one between machines.
:func:`simulate` simulates steps of training on it, each a :class:`Step` of :class:`Messages`, and gives a
:class:`Timeline`; :func:`rounds_of` makes steps of a topology, :func:`direct_allreduce`, :func:`ring_allreduce`,
:func:`tree_allreduce`, :func:`hierarchical_allreduce` and :func:`parameter_server` of averaging over all, and
:func:`hierarchical` of averaging between machines. :func:`recommend` ranks the topologies of the catalog by the time to
agree and by the costs of :class:`Training` on them, in a :class:`Recommendation`.

None of this starts agents. Only ``shoal.netmodel.probe`` does, which measures a real network and is not imported here.
Names are imported on first use, because ``shoal topology`` needs torch for only one of its commands, for the costs of
training.
"""

import typing as _typing

from .._lazy_import import names_of as _names_of

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public")
