"""Snapshots for ``torch.distributed.checkpoint``: read from the hosts' memory or from storage, on any number of ranks, and written."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from gemini_ft.checkpointer import Checkpointer
from gemini_ft.config import load_config
from gemini_ft.core.layout import PER_RANK
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, ConfigError, RecoveryError, StateError
from gemini_ft.export.formats import document
from gemini_ft.export.source import Checkpoint, find, refusing_nonsense
from gemini_ft.export.state_dicts import WRITTEN, State
from gemini_ft.export.whole_tensors import Box
from gemini_ft.export.zero import EngineStates, is_engine
from gemini_ft.state.base import PlainState
from gemini_ft.state.placements import part_places, words_of
from gemini_ft.state.survey import is_out_of_order
from gemini_ft.state.tensors import Live, Role, Source, describe

_STAGED = "gemini_ft.staged"  # key of what `GeminiWriter.stage` returns: the step that has been copied
_OF_WRITERS: Mapping[str, Any] = {  # options: the agents see a worker make a step only when it saves
    "elastic": None,
    "interval": 1,
    "on_late": "wait",
    "hang_timeout": 0,
    "max_retries": 10**9,  # a job may fail many times between two saves, and what it goes on from is not to blame
    "start_timeout": 0,
    "straggler": "warn",
    "straggler_factor": 0,
}
_POLL = 0.01  # seconds
_log = logging.getLogger("gemini_ft")


class GeminiReader(StorageReader):
    """Reads a snapshot: ``torch.distributed.checkpoint.load(state_dict, storage_reader=GeminiReader("run-7"))``.

    Any number of ranks may load, into plain tensors and DTensors of any sharding, whatever the job had. Every rank reads the shards that
    hold its parts, from its own host's agent, from those of other hosts, or from storage; all ranks read the same step. A shard has to come
    to its committed root before anything of it is used, and every chunk to its checksum. A rank needs room for what it loads a second time.
    Where another rank has failed, `reset` lets go of the slots that are held. Of a DeepSpeed engine every rank reads the whole state,
    already in `read_metadata`, and again if rank 0 has found another step.

    Keys are those of ``get_state_dict``, nested or flattened: ``model.<name>``, ``optim.state.<name>.<key>``, ``optim.param_groups``.
    What a `GeminiWriter` has saved has the keys that it was given; ``model``, ``optim`` and ``flat`` say nothing there.
    Errors come as torch's ``CheckpointException``; they name the options of ``gemini export``, which the arguments here are called after.

    Args:
        source: a run id, to read the memory of this machine's agents, or the configured storage where they have none; or a URL of storage.
        step: which one; None: the newest. So does ``checkpoint_id`` of ``load``.
        run_id: which run, where a storage has several.
        stream: which line of snapshots, where a run has several: ``main``, ``fit-0``.
        model: the key under which the state dict has the model; empty: the names of parameters are keys themselves.
        optim: the key of the optimizer, None: weights alone are read.
        flat: the optimizer's state dict is flat, as ``StateDictOptions(flatten_optimizer_state_dict=True)`` and torchtitan make it.
        trust_pickle: load pickles from storage that are not signed with the run's secret.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        step: int | None = None,
        run_id: str | None = None,
        stream: str | None = None,
        model: str = "model",
        optim: str | None = "optim",
        flat: bool = False,
        endpoint_url: str | None = None,
        trust_pickle: bool = False,
    ) -> None:
        url = source if source is not None and "://" in source else None
        self._step, self._from = step, (run_id if url else source or run_id, stream, url, endpoint_url, trust_pickle)
        self._model, self._optim, self._flat = model, optim, flat
        self._checkpoint: Checkpoint | None = None
        self._values: dict[str, Any] = {}  # key -> value, or a tensor on the device "meta" that is still to be read

    @property
    def version(self) -> Version | None:
        """The version that is read, once the metadata have been."""
        return self._checkpoint.version if self._checkpoint is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Lets the next reading find its checkpoint anew. ``checkpoint_id``: the number of a step."""
        if checkpoint_id is not None:
            self._step = _as_step(checkpoint_id)
        self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the number of a step."""
        return str(checkpoint_id).isdecimal()

    def read_metadata(self) -> Metadata:
        """Finds the checkpoint, and what it holds. It is kept open, in memory with its slots, until it has been read.

        All tensors of a DeepSpeed engine are read here: what a parameter's state is becomes known as its partitions are put together.

        Raises:
            GeminiError: there is none, it is damaged, or of another format.
        """
        return self._open(self._step)

    def _open(self, step: int | None) -> Metadata:
        self._close()
        checkpoint = self._checkpoint = find(step, *self._from)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._close)
            with refusing_nonsense(checkpoint):
                with_optimizers, kind = self._optim is not None, EngineStates if is_engine(checkpoint) else State
                self._state = State(checkpoint, with_optimizers, declared=True) if kind is State else kind(checkpoint, with_optimizers)
                found = document(self._state, with_optimizers, self._flat)
                if not (isinstance(self._state, State) and self._state.is_written):
                    model = {self._model: found["model"]} if self._model else found["model"]
                    found = model | ({self._optim: found["optim"]} if self._optim is not None else {})
                planner = DefaultSavePlanner()
                planner.set_up_planner(found, is_coordinator=True)
                _, metadata = planner.create_global_plan([planner.create_local_plan()])
            on_error.pop_all()
        self._values = planner.state_dict
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Remembers what the plan will be made from; warns on a rank that has looked for the newest step by itself."""
        self._metadata = metadata
        rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")
        if is_coordinator and self._step is None and rank != "0":
            _log.warning(
                "GeminiReader: rank %s reads %s, the newest that it finds by itself. Where other ranks load without a process group in "
                "common (no_dist=True, or before init_process_group), they may find another one: give step=",
                rank,
                self.version,
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the version that this rank has found."""
        return replace(plan, storage_data=self.version)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Lets all ranks read what the coordinator has found: a job that runs may have committed another step meanwhile."""
        return [replace(plan, storage_data=plans[0].storage_data) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, and closes the checkpoint.

        Raises:
            GeminiError: the step is not there any more, or is damaged.
        """
        if (version := plan.storage_data) is not None and version != self.version:
            found = self._open(version.iteration)
            if self.version != version:
                raise RecoveryError(f"rank 0 reads {version}, which is not here; this rank has found {self.version}")
            if found.state_dict_metadata != self._metadata.state_dict_metadata:
                raise StateError(f"{version} has other tensors than a step that was committed just before; load once more")
        assert self._checkpoint is not None
        try:
            with refusing_nonsense(self._checkpoint):
                tensors = self._read([item for item in plan.items if item.type == LoadItemType.TENSOR and item.lengths.numel()])
        finally:
            self._close()
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                blob = io.BytesIO()
                torch.save(self._values[key], blob)
                blob.seek(0)
                planner.load_bytes(item, blob)
                continue
            target = planner.resolve_tensor(item).detach()
            if target.numel():
                part = tensors[key]
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: list[ReadItem]) -> dict[str, torch.Tensor]:
        """Key -> whole tensor, of which the parts that are asked for have been read."""
        names = {id(tensor): name for name, tensor in self._state.declared.items()} if isinstance(self._state, State) else {}
        boxes: dict[str, list[Box]] = {}
        values = {item.storage_index.fqn: self._values[item.storage_index.fqn] for item in items}
        for item in items:
            if (name := names.get(id(values[item.storage_index.fqn]))) is not None:
                boxes.setdefault(name, []).append((item.storage_offsets, item.lengths))
        found = self._state.tensors.read(boxes) if isinstance(self._state, State) else {}
        return {key: found.get(names.get(id(value), ""), value) for key, value in values.items()}

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None


class WrittenState(PlainState):
    """The state dict that is being saved, as the state that a Checkpointer records. Nothing is loaded through it."""

    def __init__(self, replicated: bool) -> None:
        super().__init__({}, (), replicated, modes=False)
        self.flat: Mapping[str, Any] = {}  # key -> tensor or value

    def survey(self) -> list[Live]:
        return [Live(f"{WRITTEN}.{key}", value, Role.PARAMETER) for key, value in self.flat.items() if isinstance(value, torch.Tensor)]

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        """Describes plain tensors, unless they are replicated, as this rank's own: other ranks may have others, or none.

        Raises UnsupportedStateError: a DTensor is not placed on a mesh of all ranks, in their order.
        """
        plain = "" if self.is_replicated else PER_RANK
        found = describe(live, rank, world_size, self.is_replicated)
        for spec in (item.spec for item in found):  # whoever reads must be able to put it together
            part_places(spec.name, words_of(spec.logical), spec.shape, spec.group, world_size)
        return [replace(item, spec=replace(item.spec, frozen=False, logical=item.spec.logical or plain)) for item in found]

    def extras(self) -> dict[str, Any]:
        strange = sorted(key for key, value in self.flat.items() if is_out_of_order(value))
        values = {key: value for key, value in self.flat.items() if not isinstance(value, torch.Tensor)}
        return {"naming": {WRITTEN: {"keys": {}, "absent": [], "out of order": strange}}, "values": values}


class GeminiWriter(StorageWriter, AsyncStager):
    """Keeps in the hosts' memory what a script saves every so many steps.

        writer = GeminiWriter()  # one, before the loop, on all ranks
        dcp.async_save(state, storage_writer=writer.at(step), no_dist=True)  # or dcp.save(state, storage_writer=writer.at(step))

    Making one joins the run: collective over the default process group. Each save is collective too, made by the training thread, and
    returns when the state dict has been copied into the slots of this host's agent; ``result()`` of the future, when the hosts have
    committed it. ``storage`` uploads from memory. `reader` reads it back, or any `GeminiReader`, under the keys that it was saved with.

    Tensors that are not DTensors are each rank's own, and rank 0's are read back; where only some ranks have a key, those of the first of
    them. No rank is looked at for hanging, or for being slow, as its steps are not seen.

    Args:
        replicated: plain tensors hold the same bytes on all ranks, buffers too: each rank keeps its part of them, and they are compared.
        name: of the stream.
        **options: fields of ``GeminiConfig``.

    Raises:
        ConfigError: an option is wrong, or is the writer's own.
        GeminiError: see `Checkpointer.open`.

    Attributes:
        newest: the newest step that is committed, at first by an earlier attempt or launch of the run; None: there is none. Later ones
            must be greater.
    """

    _synchronize_after_execute = False

    def __init__(self, *, replicated: bool = False, name: str = "dcp", **options: Any) -> None:
        if given := sorted(options.keys() & _OF_WRITERS.keys()):
            raise ConfigError(f"GeminiWriter sets {', '.join(given)} itself, as it saves what and when the script says; leave it out")
        self._state, self._thread = WrittenState(replicated), threading.current_thread()
        traffic = options.get("traffic", {})
        traffic = {"when": "ready", **traffic} if isinstance(traffic, Mapping) else traffic
        config = load_config({**options, "traffic": traffic, **_OF_WRITERS})
        self._checkpointer = Checkpointer(config=config, name=name, resizable=True)
        self._checkpointer.bind_state(self._state)
        found = self._checkpointer.open()
        self._stored = found.iteration if found is not None and found.source == "storage" else None  # and not in memory
        self._last = self.newest or 0  # step that was recorded last, committed or not
        self._asked = threading.local()  # async_save names the step to another thread, after it has had the state dict staged

    @property
    def newest(self) -> int | None:
        return self._checkpointer.stats.committed

    def reader(self) -> GeminiReader:
        """Returns a reader of the newest step, from where it was found."""
        run, stream, storage, newest = self._checkpointer.run, self._checkpointer.name, self._checkpointer.config.storage, self.newest
        if storage is None or newest is None or newest != self._stored:
            return GeminiReader(run, stream=stream, step=newest)
        where: dict[str, Any] = {"endpoint_url": storage.endpoint_url, "trust_pickle": storage.trust_pickle}
        return GeminiReader(storage.url, run_id=run, stream=stream, step=newest, **where)

    def at(self, step: int) -> GeminiWriter:
        """Returns the writer, which will save the state dict of this step next, by this thread; another number takes its place."""
        self._asked.step = step
        return self

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the number of a step, as `at` does."""
        if checkpoint_id is not None:
            self.at(_as_step(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the number of a step."""
        return str(checkpoint_id).isdecimal()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies a state dict into the agent's memory, on the training thread; returns what stands for it in the thread that saves."""
        return {_STAGED: self._record(state_dict)}

    def synchronize_staging(self) -> None:
        """Does nothing: what `stage` returns has been copied."""

    def _record(self, state_dict: dict[str, Any]) -> int:
        step = self._take_step()
        if threading.current_thread() is not self._thread:
            raise ConfigError("GeminiWriter stages state dicts itself, on the thread that made it; leave out async_stager")
        if step is None:
            raise ConfigError("which step is it? async_save(..., storage_writer=writer.at(step)), and the same for save")
        newest = self.newest or 0
        if step <= max(self._last, newest):
            known = f"run {self._checkpointer.run!r} has step {newest} already"
            if self._last > newest:
                known = f"step {self._last} was begun before it, though it was given up, or is not committed yet"
            raise StateError(
                f"step {step} cannot be saved: {known}, and steps count from 1 and grow. Load what there is, with writer.reader(), and "
                "go on from there, or begin anew with another run id"
            )
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict, is_coordinator=False)
        self._state.flat = planner.state_dict
        self._checkpointer.save(step, {})
        self._last = step
        with self._checkpointer.mutate():  # it has been copied
            return step

    def _take_step(self) -> int | None:
        """The step that this thread was told, once."""
        step: int | None = vars(self._asked).pop("step", None)
        return step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run was joined when the writer was made."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Waits until the hosts have committed what was staged; what was not is copied first.

        Raises:
            AgentError: it was given up, or not committed in time; what was saved before is still there.
            GeminiError: the agents have found something that must stop the job.
        """
        state_dict = getattr(planner, "state_dict", None)
        if state_dict is None:
            raise ConfigError(f"GeminiWriter needs the state dict, which {type(planner).__name__} does not show; leave out planner")
        if (step := state_dict.get(_STAGED)) is None:
            step = self._record(state_dict)
            self._checkpointer.flush()
        elif (asked := self._take_step()) not in (None, step):
            raise ConfigError(f"step {step} was staged by writer.at({step}), and checkpoint_id={asked} was given; leave out the latter")
        end = time.monotonic() + self._checkpointer.config.timeout
        while (committed := self._checkpointer.is_committed(step)) is None and time.monotonic() < end:
            self._checkpointer.raise_fatal()
            time.sleep(_POLL)
        if not committed:
            time.sleep(_POLL)  # what must stop the job is told just after the end of the step to which it has led
            self._checkpointer.raise_fatal()
            why = self._checkpointer.stats.aborted.get(step, "the logs say why")
            what = "not committed in time" if committed is None else "given up"
            raise AgentError(f"step {step} was {what}: {why}. What was saved before is still there")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the commit was between the agents."""

    def close(self) -> None:
        """Leaves the run, at the end of a script that has succeeded."""
        self._checkpointer.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("GeminiWriter cannot go to another process; save in the one that trains, as AsyncCheckpointerType.THREAD does")


def _as_step(checkpoint_id: str | os.PathLike[str]) -> int:
    if not str(checkpoint_id).isdecimal():
        raise ConfigError(f"checkpoint_id={str(checkpoint_id)!r}: must be the number of a step")
    return int(str(checkpoint_id))
