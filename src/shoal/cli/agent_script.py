"""Runs an agent's script as ``python script.py`` or ``python -m module`` does, and notes a ``SystemExit`` that ends it.

Python passes an uncaught exception to ``sys.excepthook``, but not ``SystemExit``, and exit handlers see neither. Every
exception that ends the script passes through this file. So ``shoal run`` starts this file by its path, with the command
line of the script.

Neither Shoal nor torch is imported before the script, which may set environment variables that they read.
"""

import sys
from types import TracebackType


def main() -> None:
    """Run the script that the command line names. The folder of this file hides no module from it."""
    sets_path = not getattr(sys.flags, "safe_path", sys.flags.isolated)  # -P, -I; Python 3.10 has no -P
    if sets_path:
        del sys.path[0]
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("shoal: name a script, or -m and a module: python -m shoal.cli.agent_script train.py [arguments]")
    sys.excepthook = _excepthook
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1:], sets_path)
        else:
            _run_file(arguments, sets_path)
    except SystemExit as error:
        script_end = sys.modules.get("shoal.runtime.script_end")
        if script_end is not None:
            script_end.note_exit(error)
        raise


def _run_module(arguments: list[str], sets_path: bool) -> None:
    import os
    import runpy

    sys.argv = ["-m", *arguments[1:]]  # the module finds its path in sys.argv[0]
    if sets_path:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib would be imported for it
    _new_main()
    # The interpreter itself calls this for -m. The public run_module() puts the old __main__ back at the end.
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


def _run_file(arguments: list[str], sets_path: bool) -> None:
    import os
    import pkgutil
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    path = os.path.abspath(arguments[0])  # noqa: PTH100
    sys.argv = arguments
    if pkgutil.get_importer(path) is not None:  # a folder or an archive, with a module __main__
        import runpy

        sys.path.insert(0, path)
        _new_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if sets_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    names = _new_main()
    if path.endswith(".pyc"):
        names["__loader__"] = loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        names["__loader__"] = reader = SourceFileLoader("__main__", path)
        code = compile(reader.get_data(path), path, "exec", dont_inherit=True)
    names |= {"__file__": path, "__cached__": None}
    exec(code, names)  # type: ignore[arg-type]


def _new_main() -> dict[str, object]:
    """The names of a new module ``__main__``, to replace that of this file."""
    import builtins
    from types import ModuleType

    module = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(module)
    names |= {"__builtins__": builtins, "__annotations__": {}}
    return names


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
