"""``gemini run``: torchrun, with settings that restart reliably and workers that are forked instead of started anew.

It takes torchrun's own arguments and behaves like it: the same environment, logs, signals and exit status. What it
does besides: it names the run for the hosts' agents and tells the local one when the job has ended, it keeps torch
2.13 from restarting workers on the key-value store of the attempt before, and it notices a lost host within seconds.

A script that comes through a pipe (standard input, a FIFO, ``<(...)``) can be read only once, but every rank and restart needs it:
a copy is kept in memory.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import stat
import sys
import time
import traceback
import uuid
import zipfile
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import get_args

from torch.distributed import run as torchrun
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from gemini_ft import failpoints
from gemini_ft.agent import lifecycle
from gemini_ft.agent.ahead import started_ahead
from gemini_ft.agent.departure import PARTING_SECONDS, is_alive
from gemini_ft.agent.watchdog import AgentWatch
from gemini_ft.config import NOT_ELASTIC, GeminiConfig, load_config, unknown_variables
from gemini_ft.errors import ConfigError, RunAliveError
from gemini_ft.hosts import HOSTNAME, host_id
from gemini_ft.launch import slurm
from gemini_ft.launch.endings import (
    ENDED_ELSEWHERE,
    LEFT,
    NOT_STORED,
    OVERTAKEN,
    Endings,
    HostDrain,
    account_of,
    final_endings,
    own_log_dir,
    tell_spares,
    unheard,
)
from gemini_ft.launch.health import UNHEALTHY, HealthOptions, HostHealth, UnhealthyError
from gemini_ft.launch.launched import LAUNCH, default_run_id, is_passing
from gemini_ft.launch.notes import PROTECTED, STORES, Notes, notes_of_workers
from gemini_ft.launch.preload import early_environment, modules_to_preload
from gemini_ft.launch.spares import LaunchingHost, better_rendezvous
from gemini_ft.launch.stores import OvertakenError, surviving_stores
from gemini_ft.launch.trainjob import reported_progress
from gemini_ft.launch.whole_rounds import whole_rounds
from gemini_ft.launch.worker_start import StandBy, cold_workers, forked_workers
from gemini_ft.wire.worker_messages import OF_RUN, Launch

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 10
_ACCOUNT_SECONDS = 0.5  # for the agent to say which ranks are slow
_DRAIN_SIGNALS, _RESTARTS = (get_args(GeminiConfig.model_fields[name].annotation) for name in ("drain_signal", "restart"))
# Torchrun's options that say how hosts meet.
_MEETING = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "node_rank", "standalone")
# A host is lost after interval times attempts. Torch's own 15 s are longer than all the rest of a recovery.
_KEEP_ALIVE = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
_MOST = 10**6  # hosts, or workers of one
_NO_INTERVAL = 0.001  # seconds for which torch's launcher sleeps between two looks at the workers: it waits for news of them


def command(argv: Sequence[str]) -> int:
    """Runs a script under torch's elastic launcher until the job ends.

    ``argv``: torchrun's arguments, among which ``--run-id``, ``--explain``, ``--cold`` and ``--preload`` are allowed.

    Returns the exit status; docs/launcher.md has the table.

    Raises:
        ConfigError: there is no such script, or torch's launcher refuses the value of an option.
        RunAliveError: another launch of this run is at work on this host.
    """
    options = make_parser().parse_args(argv)
    _check(options)
    program = program_of(options)
    _show_messages()
    lifecycle.raise_descriptor_limit()
    _heed_signals(options.signals_to_handle.split(","))
    for warning in unknown_variables(os.environ):
        logger.warning("%s", warning)
    is_nameless = is_passing(program) and not (options.run_id or os.environ.get("GEMINI_RUN_ID"))
    run_id = prepare(options, program)
    failpoints.arm(run_id, host_id())
    config = load_config()
    _check_health(options, config)
    check_range(options, config, os.environ)
    options.signals_to_handle = ",".join(each for each in options.signals_to_handle.split(",") if each.strip() != config.drain_signal)
    if torchrun.parse_min_max_nnodes(options.nnodes)[1] == 1:
        _refuse_second(run_id)
    endings: Endings | None = None
    try:
        with ExitStack() as stack:
            this, notes, drain, endings = _set_up(stack, options, run_id, config)
            copy = stack.enter_context(copied_from_pipe(program)) if not (options.module or options.no_python) else None
            reserve = torchrun.determine_local_world_size(options.nproc_per_node) if config.spare == "warm" else 0
            stand_by = stack.enter_context(workers_of(options, program, copy, reserve))
            this.is_warm, this.prepare = stand_by.is_ready, stand_by.prepare
            stack.enter_context(drain.heeded())
            watchman = AgentWatch(run_id, host_id(), config.agent_timeout)
            watchman.start()
            stack.callback(watchman.stop)
            stack.enter_context(reported_progress(os.environ, run_id, lambda: notes.total))
            record(torchrun.run)(options)
            stores = notes.have(STORES)
    except ChildFailedError as error:
        assert endings is not None
        logger.error("%s", in_short(error, endings.shown))
        if is_nameless:
            lifecycle.leave(run_id)  # nobody can come back for it
        return endings.status or 1
    except OvertakenError as error:
        logger.error("%s", error)
        return OVERTAKEN
    except UnhealthyError as error:
        logger.error("%s", error)
        return UNHEALTHY
    except SignalException as error:
        return _stopped(error, endings, run_id)
    except (AssertionError, FileNotFoundError, PermissionError, ValueError) as error:
        if endings is None or endings.has_begun:
            raise
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # torch asserts some ranges without a word
        raise ConfigError(f"{reason}; `gemini run --help` names the options and their values") from error
    except RendezvousClosedError:
        logger.warning("the rendezvous is closed: the job has ended without this host; the output of the others says how")
        return ENDED_ELSEWHERE
    except RendezvousConnectionError as error:
        logger.error("the rendezvous cannot be reached: %s", error)
        return 1
    except AttributeError as error:
        # Torch 2.13 does not expect that a host which waited as a spare until the job was over has no result.
        if (error.obj, error.name) != (None, "is_failed"):
            raise
        logger.warning("the job is over, the others' output says how; this spare host was not needed")
        return 0
    if unstored := lifecycle.job_finished(run_id, stores=stores):
        logger.error(
            "the job has finished, but its last step is not stored, as far as is known, and the agents' memory is gone: %s", unstored
        )
        return NOT_STORED
    return 0


def _set_up(
    stack: ExitStack, options: argparse.Namespace, run_id: str, config: GeminiConfig
) -> tuple[LaunchingHost, Notes, HostDrain, Endings]:
    """Changes what torch's launcher does in rendezvous, stores and endings, until the stack is closed."""
    stack.enter_context(started_ahead(run_id, host_id()))
    notes = stack.enter_context(notes_of_workers())
    hosts = torchrun.parse_min_max_nnodes(options.nnodes)[1]
    options_of_health = HealthOptions(command=config.health, seconds=config.health_timeout, drains=config.straggler == "drain")
    health = HostHealth(run_id, options_of_health, notes, partial(account_of, run_id, _ACCOUNT_SECONDS))
    this = stack.enter_context(better_rendezvous(hosts, notes, partial(unheard, run_id), partial(tell_spares, run_id), health))
    stack.enter_context(surviving_stores())
    stack.enter_context(whole_rounds())
    stack.enter_context(own_log_dir(options))
    signum = None if config.drain_signal == "none" else signal.Signals[config.drain_signal]
    drain = HostDrain(run_id, config.drain_seconds, signum, partial(notes.have, PROTECTED))
    health.drain = drain.heard_once
    stack.callback(health.end)
    interval, options.monitor_interval = options.monitor_interval, min(_NO_INTERVAL, options.monitor_interval)
    seconds = _join_seconds(options)
    endings = stack.enter_context(final_endings(notes, run_id, drain, health, interval=interval, join_seconds=seconds))
    return this, notes, drain, endings


def _stopped(error: SignalException, endings: Endings | None, run_id: str) -> int:
    """Says by which signal the job has ended, and returns the exit status."""
    if endings is not None and endings.status == LEFT:
        if endings.has_drained:
            logger.warning("drained: the last step of this host is committed, and the same command goes on from there")
        else:
            logger.error("drained, but its workers have failed first (see above): the same command goes on from what was committed by then")
        return LEFT
    logger.error("stopped by %s", error.sigval.name)
    if error.sigval == signal.SIGINT:  # the user's wish; after any other signal the same command may come again
        lifecycle.leave(run_id)
    return 128 + error.sigval


def _check(options: argparse.Namespace) -> None:
    if options.run_path:
        raise ConfigError("--run-path: leave it out; forked workers do without a new interpreter, too, and the others begin in their own")
    if wrong := [name for name in options.signals_to_handle.split(",") if name.strip() not in signal.Signals.__members__]:
        raise ConfigError(f"--signals-to-handle: {', '.join(map(repr, wrong))} is no signal; give names such as SIGTERM,SIGINT")
    try:
        get_logging_handler(options.event_log_handler)
    except LookupError:
        raise ConfigError(f"--event-log-handler: {options.event_log_handler!r} is no handler of torch's; give console or null") from None
    try:
        sizes = (*torchrun.parse_min_max_nnodes(options.nnodes), torchrun.determine_local_world_size(options.nproc_per_node))
    except (RuntimeError, ValueError):
        sizes = None
    if sizes is None or max(sizes) > _MOST:
        given = f"--nnodes={options.nnodes} --nproc-per-node={options.nproc_per_node}"
        raise ConfigError(f"{given}: must be a number of hosts, or MIN:MAX, and a number of workers, or auto, cpu or gpu where it is")


def check_range(options: argparse.Namespace, config: GeminiConfig, environ: MutableMapping[str, str]) -> None:
    """Refuses stores that two sides of a network could each go on with, where each may have hosts enough.

    ``environ``: where the reason is left for workers, whose script may give the option ``elastic``.
    """
    environ.pop(NOT_ELASTIC, None)
    least, most = torchrun.parse_min_max_nnodes(options.nnodes)
    if 2 * least <= most and "," in options.rdzv_endpoint:
        environ[NOT_ELASTIC] = (
            f"--nnodes={options.nnodes} with several stores and the option elastic: both sides of a network that falls apart could go on; "
            f"give a MIN of {most // 2 + 1} or more, or one store"
        )
        config.refuse_elastic(environ)


def _check_health(options: argparse.Namespace, config: GeminiConfig) -> None:
    if config.health is not None and config.health_timeout >= (seconds := _join_seconds(options)):
        raise ConfigError(
            f"health_timeout={config.health_timeout:g}: must be less than the {seconds:g} s in which a host must have joined "
            "(--rdzv-conf join_timeout=...)"
        )


def _join_seconds(options: argparse.Namespace) -> float:
    """The time in which a host must have joined; infinite where its value is wrong, which torch's launcher says."""
    try:
        return float(_parse_rendezvous_config(options.rdzv_conf).get("join_timeout", RendezvousTimeout().join.total_seconds()))
    except ValueError:
        return math.inf


def in_short(error: ChildFailedError, shown: ProcessFailure | None) -> ChildFailedError:
    """The report of a failure that is final: one worker's, as the others have mostly failed of it or in the same way."""
    of_one = {rank: failure for rank, failure in error.failures.items() if shown is not None and failure.pid == shown.pid}
    return ChildFailedError(error.name, of_one) if of_one else error


def _refuse_second(run_id: str) -> None:
    """Raises RunAliveError if the run is at work on this host, before anything is started.

    Where a job has several hosts, the rendezvous tells whose launcher this is, and workers find out.
    """
    end = time.monotonic() + PARTING_SECONDS
    while launches := account_of(run_id).get("launches"):  # workers will look after an agent that hangs
        if time.monotonic() > end:
            raise RunAliveError(is_alive(run_id, host_id(), Launch(**launches[0], environ={})))
        time.sleep(0.1)


def _heed_signals(names: Sequence[str]) -> None:
    """Resets signals that nohup, a shell's background jobs and some supervisors leave ignored.

    Workers of torchrun are started when it handles these signals, and so ignore none of them; the fork server starts before. With
    SIGCHLD ignored, a failed worker would count as one that ended well.
    """
    for name in ("SIGCHLD", *names):
        if signal.getsignal(number := signal.Signals[name.strip()]) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def make_parser() -> argparse.ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "gemini run"
    parser.description = "Torchrun with fast and reliable restarts: takes torchrun's arguments, and those of the last group."
    ours = parser.add_argument_group("gemini")
    ours.add_argument("--run-id", "--run_id", help="name of the run (default: GEMINI_RUN_ID, or a hash of user, directory and command)")
    ours.add_argument(
        "--explain", action="store_true", help="print what the state of the job consists of, at the first snapshot and after changes"
    )
    ours.add_argument(
        "--drain-signal",
        choices=_DRAIN_SIGNALS,
        help="signal at which workers end after a step that is committed (default: GEMINI_DRAIN_SIGNAL, or SIGUSR1)",
    )
    ours.add_argument(
        "--restart",
        choices=_RESTARTS,
        help="after a failure, start all workers anew, or keep those inside gemini_ft.run that live (default: GEMINI_RESTART, or process)",
    )
    ours.add_argument(
        "--health", metavar="COMMAND", help="judges this host before it joins, and when it is suspected (default: GEMINI_HEALTH, or none)"
    )
    ours.add_argument("--cold", action="store_true", help="start every worker from nothing instead of forking it from a warm process")
    ours.add_argument(
        "--preload",
        type=lambda text: text.split(","),
        default=[],
        metavar="MODULE,...",
        help="what the warm process imports besides torch, and Lightning, DeepSpeed or transformers if the script does; nothing that "
        "starts threads or uses CUDA",
    )
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=_MAX_RESTARTS)
    for action in parser._actions:
        if action.dest == "max_restarts":
            action.help = f"restarts of the workers before the job has failed (default: {_MAX_RESTARTS}; torchrun: 0)"
    return parser


def program_of(options: argparse.Namespace) -> list[str]:
    """The script and its arguments, or ``-m``, the module's name and its arguments."""
    script: str = options.training_script
    if not (options.module or options.no_python or script == "-" or os.path.exists(script)):
        raise ConfigError(f"there is no script {script!r} in {os.getcwd()}; give its path, or -m and the name of a module")
    return [*(["-m"] if options.module else []), script, *options.training_script_args]


def workers_of(options: argparse.Namespace, program: Sequence[str], copy: Path | None, reserve: int = 0) -> AbstractContextManager[StandBy]:
    """The context in which torch's launcher starts workers as this command needs; explains where that is not the user's wish."""
    if options.cold:
        return cold_workers(copy)
    if reason := not_forkable(options, copy):
        logger.warning("starting workers cold: %s", reason)
        return cold_workers(by_python=True)
    for follow in (True, False):  # what modules beside the script import can be left to the workers
        modules = modules_to_preload(program, options.preload, copy, follow=follow)
        early = early_environment(program, modules, copy, follow=follow)
        if not early.unknown:
            return forked_workers(program, modules, early.constants, copy, reserve)
    logger.warning("starting workers cold: %s; a constant could be set for the fork server too", early.unknown)
    return cold_workers(copy)


def not_forkable(options: argparse.Namespace, copy: Path | None) -> str:
    """The reason why this command's program cannot be forked; empty if it can."""
    if options.no_python:
        return "only what 'python SCRIPT' and 'python -m MODULE' run can be forked"
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return "PYTHON_EXEC names another Python"
    script = options.training_script
    if not (options.module or copy) and (os.path.isdir(script) or zipfile.is_zipfile(script)):
        return "the script is a folder or an archive"
    return ""


def prepare(options: argparse.Namespace, program: Sequence[str]) -> str:
    """Sets what launcher and workers read from the environment, and defaults that restart reliably; returns the run id."""
    run_id: str = options.run_id or os.environ.get("GEMINI_RUN_ID") or default_run_id(program)
    os.environ["GEMINI_RUN_ID"] = run_id
    os.environ.update(slurm.settings(os.environ))
    meet(options, slurm.rendezvous(os.environ))
    os.environ[LAUNCH] = OF_RUN + uuid.uuid4().hex
    if options.drain_signal:
        os.environ["GEMINI_DRAIN_SIGNAL"] = options.drain_signal
    if options.restart:
        os.environ["GEMINI_RESTART"] = options.restart
    if options.health:
        os.environ["GEMINI_HEALTH"] = options.health
    if options.explain:
        os.environ["GEMINI_EXPLAIN"] = "1"
    os.environ["GEMINI_LAUNCHER_PID"] = str(os.getpid())
    os.environ[HOSTNAME] = socket.gethostname()
    # Every attempt gets a store of its own, on the host that is rank 0 by then: torch's shared one keeps the keys of
    # the attempt before, and is lost with the first host. (The static rendezvous does not ask; there
    # gemini_ft.init_process_group makes up for it.)
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # A restarted worker touches all of its memory again, and in pages of 4 KiB that costs four times as much.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # As torchrun does later, with a long warning: the fork server must have it before it imports torch.
    if torchrun.determine_local_world_size(options.nproc_per_node) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.standalone = options.standalone or _is_alone(options)
    _add_missing(options, **_KEEP_ALIVE)
    return run_id


def _add_missing(options: argparse.Namespace, **settings: object) -> None:
    """Adds those settings of the rendezvous that the user has not given."""
    missing = [f"{key}={value}" for key, value in settings.items() if key not in options.rdzv_conf]
    options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, *missing]))


def meet(options: argparse.Namespace, place: slurm.Rendezvous | None) -> None:
    """Lets the hosts of a SLURM step meet, where the user has not said how they do; of its nodes, those beyond ``--nnodes`` are spares."""
    if place is None or options.nnodes == "1" or options.rdzv_endpoint or not _is_default(options, _MEETING):
        return
    options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", place.endpoint, place.name
    # srun is lost with the store's node: there is nothing to wait for.
    _add_missing(options, is_host=int(place.is_host), store_timeout=10)
    if _is_default(options, ["nnodes"]):
        options.nnodes = str(place.hosts)
    logger.info("the hosts of this SLURM step meet at %s", place.endpoint)


def _is_default(options: argparse.Namespace, names: Sequence[str]) -> bool:
    parser = torchrun.get_args_parser()
    return all(getattr(options, name) == parser.get_default(name) for name in names)


def _is_alone(options: argparse.Namespace) -> bool:
    """Whether this is a job of one host without any rendezvous options.

    Torchrun's default then is the static rendezvous, in which a restart hangs if the script makes its process group itself.
    """
    return torchrun.parse_min_max_nnodes(options.nnodes) == (1, 1) and _is_default(options, _MEETING)


def _show_messages() -> None:
    """Sends this package's own messages to stderr, recognisable among those of torch and the workers."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gemini run: %(message)s"))
    ours = logging.getLogger("gemini_ft")
    ours.addHandler(handler)
    ours.propagate = False


@contextmanager
def copied_from_pipe(program: Sequence[str]) -> Iterator[Path | None]:
    """A copy of the script, if it comes through a pipe, for as long as the context lasts; else None.

    ``program``: script and arguments; ``-`` is standard input. Raises ConfigError: it cannot be read.
    """
    script = program[0]
    if script != "-" and (stat.S_ISREG(mode := os.stat(script).st_mode) or stat.S_ISDIR(mode)):
        yield None
        return
    try:
        with open(sys.stdin.fileno() if script == "-" else script, "rb", closefd=script != "-") as pipe:
            text = pipe.read()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the script {script!r} cannot be read ({error}); give the path of a file") from error
    with open(os.memfd_create("gemini-script", os.MFD_CLOEXEC), "wb", buffering=0) as copy:  # which is gone with this process
        copy.write(text)
        yield Path(f"/proc/{os.getpid()}/fd/{copy.fileno()}")
