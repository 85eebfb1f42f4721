"""Events, counters, timelines, reports, the membership log, and the live page of a run.

The public names are imported on first use, because the programs that read traces run without torch.
"""

import typing as _typing

from .._lazy_import import names_of as _names_of

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403 - as checkers and editors see them
else:
    __getattr__, __dir__ = _names_of(globals(), "_public")
