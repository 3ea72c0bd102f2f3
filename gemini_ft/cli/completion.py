"""``gemini completion``: a script with which a shell completes the command's words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gemini_ft.cli.main import COMMANDS

_BASH = """_gemini() {
    local word=${COMP_WORDS[COMP_CWORD]} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="%s --help --version"
    elif [[ $word == -* ]]; then
        words=$(gemini "${COMP_WORDS[1]}" --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]+' | sort -u)
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _gemini gemini
"""


def command(arguments: Sequence[str]) -> int:
    """``gemini completion bash|zsh``; exit status."""
    what = 'Print a script for the shell: eval "$(gemini completion bash)" has commands and options completed.'
    parser = argparse.ArgumentParser(prog="gemini completion", description=what)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(arguments).shell
    print(("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _BASH % " ".join(COMMANDS), end="")
    return 0
