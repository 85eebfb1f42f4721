"""``shoal completion``: prints a script that completes this command's subcommands, options and files in a shell."""

from __future__ import annotations

import argparse

BASH = """\
_shoal() {
    local word=${COMP_WORDS[COMP_CWORD]} words= choices=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]} in
@CASES@
    esac
    case $word in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$choices" -- "$word") $(compgen -f -- "$word")) ;;
    esac
}
complete -o filenames -F _shoal shoal
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + BASH
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("shell", choices=SHELLS, help='as in: eval "$(shoal completion bash)"')


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell), end="")
    return 0


def script(shell: str) -> str:
    """The script for a shell, from the command lines of all subcommands."""
    from . import COMMANDS, parser_of

    parsers = {name: parser_of(name)[1] for name in COMMANDS}
    if shell == "fish":
        return _fish(parsers)
    cases = [
        f"        {name}) words={_quoted(_options(parser))} choices={_quoted(_choices(parser))} ;;"
        for name, parser in parsers.items()
    ]
    text = ZSH if shell == "zsh" else BASH
    return text.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@CASES@", "\n".join(cases))


def _fish(parsers: dict[str, argparse.ArgumentParser]) -> str:
    from . import COMMANDS

    lines = []
    for name, (_, summary) in COMMANDS.items():
        lines.append(f"complete -c shoal -n __fish_use_subcommand -a {name} -d {_quoted([summary])}")
    for name, parser in parsers.items():
        inside = f"complete -c shoal -n '__fish_seen_subcommand_from {name}'"
        for option in _options(parser):
            long = option.startswith("--")
            lines.append(f"{inside} -l {option[2:]}" if long else f"{inside} -o {option[1:]}")
        choices = _choices(parser)
        if choices:
            lines.append(f"{inside} -a {_quoted(choices)}")
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    """The values, or commands, that may stand without an option."""
    return [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]


def _quoted(words: list[str]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"
