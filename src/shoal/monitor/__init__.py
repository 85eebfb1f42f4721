"""What a fleet did and how fast: the timeline of each agent.

Its names are imported when they are asked for: who reads what agents have written needs no torch.
"""

import typing as _typing

from .._lazy_import import names_of as _names_of

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public")
