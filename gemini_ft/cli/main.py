"""The ``gemini`` command: finds the function of a sub-command and calls it with the remaining arguments."""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

import gemini_ft
from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.launch.failures import refusal_behind


class Command(NamedTuple):
    """A sub-command: ``module.function(arguments) -> exit status``. Only its own module is imported, when it is called."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "run": Command("gemini_ft.launch.launcher", "command", "start a training script as torchrun does, with fast and reliable restarts"),
    "doctor": Command("gemini_ft.cli.doctor", "command", "look at a host before its first job, and say what is wrong"),
    "agent": Command("gemini_ft.cli.commands", "agent", "own a host's snapshot memory in the foreground, as a service"),
    "status": Command("gemini_ft.cli.commands", "status", "show what this host's agent holds and does"),
    "top": Command("gemini_ft.cli.top", "command", "show how fast the hosts of a run train, and how old their commits are"),
    "watch": Command("gemini_ft.cli.watch", "command", "say what Prometheus's alert rules would, and run a command"),
    "ps": Command("gemini_ft.cli.commands", "ps", "list the runs of this host"),
    "leave": Command("gemini_ft.cli.commands", "leave", "end this host's agent"),
    "drain": Command("gemini_ft.cli.commands", "drain", "have a host leave its run after a step that is committed"),
    "hosts": Command("gemini_ft.cli.commands", "hosts", "list the hosts that a run has put out of use, and take one back"),
    "checkpoints": Command(
        "gemini_ft.cli.commands", "checkpoints", "list the checkpoints in storage and in memory, and what is wrong with them"
    ),
    "goodput": Command("gemini_ft.cli.goodput", "command", "say what the time of a run went into, by phase and failure"),
    "export": Command("gemini_ft.cli.export", "command", "write a checkpoint for Lightning, torch.distributed.checkpoint or safetensors"),
    "pipeline": Command("gemini_ft.cli.planning", "pipeline", "show what a gradient pipeline does with each parameter of a model"),
    "simulate": Command("gemini_ft.cli.planning", "simulate", "forecast lost work and effective training time of a cluster that fails"),
    "plan": Command("gemini_ft.cli.planning", "plan", "say how many replicas and how much memory a cluster needs, and what to expect"),
    "switch": Command("gemini_ft.cli.switch", "command", "add up gradients of other hosts, as a switch in the network would"),
    "completion": Command("gemini_ft.cli.main", "completion", "print a script with which bash or zsh completes commands and options"),
    "store": Command("gemini_ft.cli.store", "command", "serve the store of a rendezvous apart from the training hosts"),
}

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
_USAGE = "usage: gemini [--version] COMMAND [ARGUMENTS]"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([_USAGE, "", "commands:", *lines, "", "'gemini COMMAND --help' says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``gemini`` with ``argv`` (default: this process's own arguments); returns its exit status.

    An error of this package becomes one line on stderr: its own status if it has one, 2 where the user has to change the command, else 1.
    Where nobody reads what is printed any longer (``gemini ps | head -1``), it is 141, as of a program that SIGPIPE ends.
    """
    try:
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
        if argv is None:
            _leave_threads(status)
        return status
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return 128 + signal.SIGPIPE


def completion(arguments: Sequence[str]) -> int:
    """``gemini completion bash|zsh``: a script with which a shell completes the command's words."""
    what = 'Print a script for the shell: eval "$(gemini completion bash)" has commands and options completed.'
    parser = argparse.ArgumentParser(prog="gemini completion", description=what)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(arguments).shell
    print(("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _BASH % " ".join(COMMANDS), end="")
    return 0


def _leave_threads(status: int) -> None:
    """Ends this process at once if a thread that was given up still waits in torch's code.

    Python would unwind its stack where it comes back, and C++ abort the process for that: status 134 in place of its own.
    """
    stores = sys.modules.get("gemini_ft.launch.stores")  # which brings torch with it
    if stores is not None and stores.has_given_up():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)


def _nobody_reads() -> bool:
    """Whether it was the standard output whose other end is gone, and not a connection of a command."""
    looking = select.poll()
    looking.register(sys.stdout, 0)
    return bool(looking.poll(0))


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(_help())
            return 0
        case ["--version", *_]:
            print(gemini_ft.__version__)
            return 0
        case [name, *_] if name not in COMMANDS:
            print(f"{_USAGE}\ngemini: unknown command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
    name, *rest = arguments
    chosen = COMMANDS[name]
    try:
        return int(getattr(importlib.import_module(chosen.module), chosen.function)(rest))
    except GeminiError as error:
        print(f"gemini {name}: {error}", file=sys.stderr)
        return 1 if refusal_behind(error) is not None else int(getattr(error, "exit_status", 2 if isinstance(error, ConfigError) else 1))
    except UnicodeEncodeError as error:  # a name that was made of bytes (`--run-id $'\xff'`)
        print(f"gemini {name}: {error.object!r} is no text in {error.encoding}: give another name", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
