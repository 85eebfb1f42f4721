"""A model of the network: how long rounds of a topology, all-reduces and training on them would take elsewhere.

:class:`Network` says what agents have between them, a :class:`Link` inside a machine and one between machines.
:func:`simulate` plays steps of training on it, each a :class:`Step` of :class:`Messages`, and gives a
:class:`Timeline`; :func:`rounds_of` makes steps of a topology, :func:`direct_allreduce`, :func:`ring_allreduce`,
:func:`tree_allreduce`, :func:`hierarchical_allreduce` and :func:`parameter_server` of averaging over all, and
:func:`hierarchical` of averaging between machines. :func:`recommend` ranks the topologies of the catalog by the time to
agree and by what :class:`Training` on them costs, in a :class:`Recommendation`.

None of this starts agents. What does is not imported here: ``shoal.netmodel.probe``, which measures a real network.
Its names are imported when they are asked for: ``shoal topology`` needs torch for one of its commands only, for what
training costs.
"""

import typing as _typing

from .._lazy_import import names_of as _names_of

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public")
