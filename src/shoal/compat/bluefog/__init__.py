"""BlueFog's package layout, so that a script changes only the package in its imports.

    import shoal.compat.bluefog.torch as bf  # was: import bluefog.torch as bf
    from shoal.compat.bluefog.common import topology_util  # was: from bluefog.common import topology_util

The names are those of :mod:`shoal.bluefog`; docs/bluefog.md has the list.
"""
