"""Groups of parameters that are sent together, if the caller sets them: a number of groups, or explicit groups.

They replace ``bucket_bytes``, which sets a size. Each group is one message of each dtype, and contains no other
parameters. Parameters in no group are put into buckets of the usual size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...topology._validate import check_size

Layout = list[list[str]]
"""The names of the parameters of each bucket."""
Named = Mapping[torch.nn.Parameter, str]


def by_count(params: Named, num_groups: object) -> Layout:
    """The given number of groups of about equal bytes, in the order in which gradients are computed: the last layers
    first.

    Raises:
        ValueError: ``num_groups`` is no number of groups: 1 or more, and not more than there are parameters.
    """
    try:
        count = check_size(num_groups)
    except (TypeError, ValueError):
        count = 0
    if not 1 <= count <= len(params):
        raise ValueError(f"num_groups={num_groups!r}: it must be a whole number, 1 to {len(params)}, of parameters")
    left = list(params)[::-1]
    groups: list[list[torch.nn.Parameter]] = []
    for behind in range(count - 1, -1, -1):
        share, taken = sum(param.nbytes for param in left) / (behind + 1), 0
        group: list[torch.nn.Parameter] = []
        # The next one where that is nearer to an equal share, and as long as one is left for each group behind.
        while len(left) > behind and (not group or not behind or taken + left[0].nbytes / 2 <= share):
            taken += left[0].nbytes
            group.append(left.pop(0))
        groups.append(group)
    return _of_one_kind(params, groups)


def as_given(params: Named, groups: object) -> Layout:
    """Groups of parameters, or of their names.

    Raises:
        TypeError, ValueError: The groups are no lists of these parameters, or have one twice.
    """
    called = {name: param for param, name in params.items()}
    found: list[list[torch.nn.Parameter]] = []
    for group in _listed(groups):
        found.append([])
        for one in _listed(group):
            param = called.get(one) if isinstance(one, str) else one
            if not isinstance(param, torch.nn.Parameter) or param not in params:
                what = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
                raise ValueError(f"groups: {what} is no parameter of this optimizer")
            if any(param is other for members in found for other in members):
                raise ValueError(f"groups: {params[param]!r} is named twice")
            found[-1].append(param)
    return _of_one_kind(params, found)


def _listed(given: object) -> Sequence[object]:
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(f"groups must be lists of parameters, or of their names, not {type(given).__name__}")
    return list(given)


def _of_one_kind(params: Named, groups: Iterable[Sequence[torch.nn.Parameter]]) -> Layout:
    """Each group, cut by dtype and device."""
    layout: Layout = []
    for group in groups:
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for param in group:
            kinds.setdefault((param.dtype, param.device), []).append(params[param])
        layout += kinds.values()
    return layout
