"""Snapshots for ``torch.distributed.checkpoint``: read straight out of the hosts' memory or of storage, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gemini_ft.core.versions import Version
from gemini_ft.errors import RecoveryError, StateError
from gemini_ft.export.formats import document
from gemini_ft.export.source import Checkpoint, find, refusing_nonsense
from gemini_ft.export.state_dicts import State
from gemini_ft.export.whole_tensors import Box
from gemini_ft.export.zero import EngineStates, is_engine


class GeminiReader(StorageReader):
    """Reads a snapshot: ``torch.distributed.checkpoint.load(state_dict, storage_reader=GeminiReader("run-7"))``.

    Any number of ranks may load, into plain tensors and DTensors of any sharding, whatever the job had. Every rank reads the shards that
    hold its parts, from its own host's agent, from those of other hosts, or from storage; all ranks read the same step. A shard has to come
    to its committed root before anything of it is used, and every chunk to its checksum. A rank needs room for what it loads a second time.
    Where another rank has failed, `reset` lets go of the slots that are held. Of a DeepSpeed engine every rank reads the whole state,
    already in `read_metadata`, and again if rank 0 has found another step.

    Keys are those of ``get_state_dict``, nested or flattened: ``model.<name>``, ``optim.state.<name>.<key>``, ``optim.param_groups``.
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
            self._step = int(checkpoint_id)  # type: ignore[arg-type]
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
                model = {self._model: found["model"]} if self._model else found["model"]
                planner = DefaultSavePlanner()
                planner.set_up_planner(model | ({self._optim: found["optim"]} if self._optim is not None else {}), is_coordinator=True)
                _, metadata = planner.create_global_plan([planner.create_local_plan()])
            on_error.pop_all()
        self._values = planner.state_dict
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Remembers what the plan will be made from."""
        self._metadata = metadata

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
