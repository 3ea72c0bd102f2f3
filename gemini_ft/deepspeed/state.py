"""The training state of one rank of a DeepSpeed engine: masters, optimizer state, buffers, frozen parameters, counters.

Names: ``zero.<i>`` (partition of group or sub-group i), ``flat.<i>`` (whole fp32 copies at stage 0), ``param.<fqn>`` (stage 0
in fp32); their optimizer state is ``<master>.<key>``; ``buffer.<fqn>`` and ``frozen.<fqn>``. Nothing is gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import DummyOptim
from torch import nn

from gemini_ft.core.census import ENGINE_COUNTERS, ENGINE_TENSORS, ENGINE_WEIGHTS, Finding
from gemini_ft.core.layout import PER_RANK, Layout, Read, TensorSpec
from gemini_ft.deepspeed.partitions import (
    about,
    base_optimizer,
    is_partitioned,
    masters,
    others,
    present_cut,
    rebuild_weights,
    release_gathered,
    replay_beta_powers,
)
from gemini_ft.deepspeed.reshard import Cut, OldShards
from gemini_ft.deepspeed.versions import check_version, counters, older_schedules
from gemini_ft.errors import GeminiError, LayoutMismatchError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.attributes import AttributeReturn, AttributeWalk, held
from gemini_ft.state.gradients import lets_ranks_differ
from gemini_ft.state.hyperparameters import Given, of_groups, of_scheduler
from gemini_ft.state.modes import Modes, hooks_beside, not_users
from gemini_ft.state.rebuilding import ModuleTree
from gemini_ft.state.tensors import (
    HOST,
    Live,
    Role,
    Source,
    captured,
    describe,
    own_attributes,
    split_state_name,
    state_name,
)

_log = logging.getLogger("gemini_ft")
_WAY_OUT = "Resume with the script and configuration that made it, or start afresh with another run_id or resume='never'."
_BASE = "optimizer"  # the one inside DeepSpeed's, in names of its attributes
_SCALERS = ("loss_scaler", "loss_scale_config")


class EngineState:
    """Implements `gemini_ft.state.base.TrainingState` for an engine of DeepSpeed.

    Args:
        engine: as ``deepspeed.initialize`` returned it.
        modes: whether flags and attributes of modules are part of it (`gemini_ft.state.modes`); no: the caller keeps them.

    Raises UnsupportedStateError: the engine uses something whose state is not known here; named.
    """

    def __init__(self, engine: Any, modes: bool = True) -> None:
        self._engine = engine
        _check(engine)
        self._cut, self._others = present_cut(engine), others(engine)
        self._fixed = {"cut": codec.encode(self._cut.pack()), "about": codec.encode(about(engine))}  # once: it never changes
        self._batch = _batch(engine)
        self._held = _held(base_optimizer(engine.optimizer))
        self._is_resumed = False
        self._left_out: set[str] = set()  # what the optimizer inside has that no snapshot can have
        self._encoded: set[str] = set()  # what snapshots can have
        self._tree = ModuleTree({"module": engine.module})
        self._modes = Modes(self._tree.modules(), hooks_beside({"optim0": self.optimizers[0]}), _not_users) if modes else None
        self.resizable = engine.dp_world_size == dist.get_world_size() and is_partitioned(engine.optimizer) and not self._lets_ranks_differ

    def accumulate(self, count: int) -> None:
        """Gives the engine a number of micro-batches in a step, as if its configuration said so."""
        self._engine.set_train_batch_size(self._engine.train_micro_batch_size_per_gpu() * count * self._engine.dp_world_size)
        self._batch = _batch(self._engine)

    @property
    def models(self) -> dict[str, nn.Module]:
        return {"module": self._engine.module}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [base_optimizer(self._engine.optimizer)]

    @property
    def unrepeatable(self) -> str:
        """Why calls cannot be made again between the last backward pass and the update."""
        if isinstance(self._engine, deepspeed.PipelineEngine):
            return "a stage of a pipeline has several micro-batches under way at once"
        if self._engine.zero_optimization_partition_weights():
            return "ZeRO 3 gathers and releases parameters by the order of calls that it has recorded"
        return ""

    @property
    def named(self) -> set[str]:
        """The names that warnings of this job have called missing from its snapshots."""
        return self._modes.named if self._modes is not None else set()

    def survey(self) -> list[Live]:
        base = base_optimizer(self._engine.optimizer)
        found: list[Live] = []
        for name, master in masters(self._engine):
            found.append(Live(name, master, Role.PARAMETER))
            entries = base.state.get(master, {}).items()
            found += [Live(state_name(name, key), value, Role.STATE, master) for key, value in entries if captured(key, value)]
        found += [Live(f"buffer.{name}", buffer, Role.BUFFER) for name, buffer in self._engine.module.named_buffers()]
        return found + [Live(f"frozen.{name}", getattr(param, "ds_tensor", param), Role.PARAMETER) for name, param in self._others.items()]

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        """Describes what to capture: equal bytes are owned in equal parts, if the data-parallel ranks are all ranks of the job.

        Where they are not (pipelines), ranks need not even have tensors of the same names.
        """
        if self._engine.dp_world_size != world_size:
            sources = describe(live, rank, world_size, replicated=False)
            return [replace(source, spec=replace(source.spec, logical=_per_rank(source.spec.logical))) for source in sources]
        own, common = list[Live](), list[Live]()
        for item in live:
            (common if self._is_replicated(item) else own).append(item)
        return [*describe(own, rank, world_size, replicated=False), *describe(common, rank, world_size, replicated=True)]

    def _is_replicated(self, item: Live) -> bool:
        if item.name.startswith("frozen."):
            return not self._engine.zero_optimization_partition_weights()
        return item.role is not Role.BUFFER and not is_partitioned(self._engine.optimizer) and not self._lets_ranks_differ

    @property
    def _lets_ranks_differ(self) -> bool:
        return lets_ranks_differ(vars(self._engine).get("gradients"))

    def extras(self) -> dict[str, Any]:
        """Returns all that is not in tensors. Raises UnsupportedStateError: the optimizer holds another one, and nothing was resumed."""
        engine, base = self._engine, base_optimizer(self._engine.optimizer)
        if self._held and not self._is_resumed:
            raise UnsupportedStateError(
                f"the optimizer holds another one ({', '.join(self._held)}), whose state is not captured of engines; train without it"
            )
        common: Mapping[Any, Any] = base.state  # scripts use other keys than parameters, too
        values = {
            name: {key: value for key, value in base.state.get(master, {}).items() if not captured(key, value)}
            for name, master in masters(engine)
        }
        saved: dict[str, Any] = {
            "optimizer": type(engine.optimizer).__qualname__,
            "base optimizer": type(base).__qualname__,
            "counters": counters(engine),
            **self._fixed,
            "world size": dist.get_world_size(),
            "accumulation": engine.gradient_accumulation_steps(),
            "batch": {"then": self._batch, "now": _batch(engine)},
            "values": values,
            "attributes": self._attributes(_own(base)),
            "other": {
                key: value
                for key, value in common.items()
                if not isinstance(key, torch.Tensor) and self._can_have(f"state[{key!r}] ({type(value).__name__})", (key, value))
            },
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups],
            "scalers": {name: dict(vars(scaler)) for name, scaler in self._scalers().items()},
            "autocast": {name: scaler.state_dict() for name, scaler in self._autocast_scalers().items()},
        }
        if engine.lr_scheduler is not None:
            saved["lr_scheduler"] = engine.lr_scheduler.state_dict()
        if self._modes is not None:
            saved["modes"] = self._modes.collect(self._tree.modules())
        return saved

    def _attributes(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Takes attributes of the optimizer inside apart. Those that cannot be are named, once, and stay what they are after a failure."""
        while own:
            walk, saved = self._walk(), dict[str, Any]()
            for name, value in own.items():
                if name in self._left_out:
                    saved[name] = ["kept", None]
                    continue
                try:
                    saved[name] = walk.take(value, f"{_BASE}.{name}")
                except Exception as error:  # an object of the script may raise anything when it is looked at
                    self._leave_out(name, error)
                if name in self._left_out or not self._can_have(name, saved[name]):
                    break  # once more from the beginning: the walk may refer to parts of it
            else:
                return saved
        return {}

    def _can_have(self, name: str, value: Any) -> bool:
        """Whether snapshots can have a part of the optimizer; it is encoded when it is there for the first time."""
        if name not in self._encoded | self._left_out:
            try:
                codec.encode(value)
                self._encoded.add(name)
            except GeminiError as error:
                self._leave_out(name, error)
        return name not in self._left_out

    def _leave_out(self, name: str, error: Exception) -> None:
        self._left_out.add(name)
        if dist.get_rank() == 0:
            _log.warning("%s of the optimizer is in no snapshot, and begins anew after a failure: %s", name, error)

    def _walk(self) -> AttributeWalk:
        """The walk for attributes of the optimizer inside, which may refer to masters, to their state and to the module."""
        base, module = base_optimizer(self._engine.optimizer), self._engine.module
        owned = [base.param_groups, base.state, base.defaults, *base.param_groups, *module.parameters(), *module.modules()]
        owned += _inner(base)
        return AttributeWalk({item.name: item.tensor for item in self.survey()}, map(id, owned))

    def findings(self) -> Iterator[Finding]:
        for item in self.survey():
            yield ENGINE_TENSORS.found(item.name, item.tensor.nbytes)
        yield ENGINE_COUNTERS.found("counters, scalers and scheduler")
        yield ENGINE_WEIGHTS.found("weights in 16 bits")
        if self._modes is not None:
            yield from self._modes.findings(self._tree.modules())

    def hyperparameters(self) -> Given:
        engine, base = self._engine, base_optimizer(self._engine.optimizer)
        scheduler = engine.lr_scheduler
        return of_groups(f"the engine's {type(base).__name__}", base.param_groups) | (
            of_scheduler(f"the engine's {type(scheduler).__name__}", scheduler) if scheduler is not None else {}
        )

    def structure(self) -> object:
        return None

    def check(self, extras: dict[str, Any]) -> None:
        """Implements `TrainingState.check`; partitions need not have the sizes that they had.

        Raises LayoutMismatchError: the snapshot is of another optimizer, scheduler or configuration.
        """
        self._is_resumed = True
        engine, base = self._engine, base_optimizer(self._engine.optimizer)
        facts = {
            "optimizer": (extras["optimizer"], type(engine.optimizer).__qualname__),
            "base optimizer": (extras["base optimizer"], type(base).__qualname__),
            "number of parameter groups": (len(extras["groups"]), len(base.param_groups)),
            "engine's LR scheduler": ("lr_scheduler" in extras, engine.lr_scheduler is not None),
            "autocast scalers": (sorted(extras["autocast"]), sorted(self._autocast_scalers())),
            "loss scalers": (sorted(extras["scalers"]), sorted(self._scalers())),
        }
        for what, (then, now) in facts.items():
            if then != now:
                raise LayoutMismatchError(f"{what}: {now!r} now and {then!r} in the snapshot. {_WAY_OUT}")
        if extras["world size"] == dist.get_world_size() and extras["cut"] != self._fixed["cut"]:
            raise LayoutMismatchError(
                "the partitions consist of other parameters now, or of the same in another order: the model, its parameter groups, "
                f"what is frozen, or round_robin_gradients, parameter_alignment or sub_group_size have changed. {_WAY_OUT}"
            )

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        release_gathered(self._engine)
        base = base_optimizer(self._engine.optimizer)
        wanted: dict[str, dict[str, TensorSpec]] = {}
        for spec in stored:
            label, key = split_state_name(spec.name)
            wanted.setdefault(label, {})[key] = spec
        for name, master in masters(self._engine):
            base.state.pop(master, None)
            if new := {key: _room(spec, master) for key, spec in wanted.get(name, {}).items()}:
                base.state[master] = new
        return self.describe(self.survey(), rank, world_size)

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, dict[str, Any]], rank: int, world_size: int
    ) -> tuple[list[Read], dict[str, torch.Tensor], dict[str, Any]]:
        """Fills masters and their state from the old ranks that had parts of them; buffers are those of one old rank."""
        owner = rank % len(layouts)
        release_gathered(self._engine)
        old = OldShards(layouts, {of: Cut.unpack(codec.decode(value["cut"])) for of, value in extras.items()})
        tensors, reads, values = self._resized_masters(old, {of: value["values"] for of, value in extras.items()})
        for item in self.survey():
            if item.name.startswith("frozen."):
                tensors[item.name] = item.tensor.detach()
                for piece in self._cut.of(item.name):
                    _same_dtype(item.name, item.tensor, old.dtype(piece.param, ""))
                reads += [read for piece in self._cut.of(item.name) for read in old.reads(piece, "", item.name)]
            elif item.role is Role.BUFFER:
                tensors[item.name] = item.tensor
                reads.append(_whole(layouts[owner], owner, item))
        reads = [read for read in reads if read.nbytes]
        return sorted(reads, key=lambda read: (read.owner, read.offset)), tensors, extras[owner] | {"values": values}

    def _resized_masters(
        self, old: OldShards, values: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[str, torch.Tensor], list[Read], dict[str, Any]]:
        base = base_optimizer(self._engine.optimizer)
        tensors, reads, own = dict[str, torch.Tensor](), list[Read](), dict[str, Any]()
        for name, master in masters(self._engine):
            tensors[name] = master.detach().zero_()  # elements that no fragment covers are padding
            fragments = self._cut.of(name)
            model = fragments[0].param if fragments else next(iter(old.masters))  # the optimizer keeps the same for all parameters
            of_shape, shared = old.state_of(model)
            base.state.pop(master, None)
            if of_shape or shared:
                base.state[master] = {key: _room(replace(spec, shape=tuple(master.shape)), master) for key, spec in of_shape.items()}
                base.state[master] |= {key: _room(spec, master) for key, spec in shared.items()}
                tensors |= {state_name(name, key): value for key, value in base.state[master].items()}
            _same_dtype(name, master, old.dtype(model, ""))
            for key in ["", *of_shape]:
                target = state_name(name, key) if key else name
                reads += [read for fragment in fragments for read in old.reads(fragment, key, target)]
            reads += [read for key in shared for read in old.shared(model, key, state_name(name, key))]
            owner, then = old.masters[model]
            own[name] = values[owner].get(then, {})
        return tensors, reads, own

    def apply_extras(self, extras: dict[str, Any]) -> None:
        """Puts back `extras`. Collective where weights are partitioned: they are rebuilt from the masters."""
        engine, base = self._engine, base_optimizer(self._engine.optimizer)
        for name, master in masters(engine):
            if values := extras["values"].get(name):
                base.state.setdefault(master, {}).update(values)
        for group, saved in zip(base.param_groups, extras["groups"], strict=True):
            group.update(saved)
        base.state.update(extras.get("other", {}))  # snapshots in storage may be older
        self._put_back_attributes(base, extras.get("attributes", {}))
        rebuild_weights(engine)
        replay_beta_powers(engine)
        for name, value in extras["counters"].items():
            setattr(engine, name, value)
        batch = extras.get("batch")  # snapshots in storage may be older
        if batch and batch["now"] != batch["then"] == self._batch:  # a configuration that has changed since is obeyed
            engine.set_train_micro_batch_size(batch["now"]["micro"])  # the training has changed it, and does not do so again
            engine.set_train_batch_size(batch["now"]["micro"] * batch["now"]["accumulation"] * engine.dp_world_size)
        if (now := engine.gradient_accumulation_steps()) != (then := extras["accumulation"]):
            engine.micro_steps = engine.micro_steps // then * now  # a boundary stays one
        for name, saved in extras["scalers"].items():
            vars(getattr(engine.optimizer, name)).update(saved)
        for name, scaler in self._autocast_scalers().items():
            scaler.load_state_dict(extras["autocast"][name])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(extras["lr_scheduler"])
        if self._modes is not None and "modes" in extras:
            self._modes.restore(extras["modes"], self._tree.modules())

    def _put_back_attributes(self, base: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Puts back attributes of the optimizer inside. What cannot be, and what it holds of other optimizers, is named."""
        if self._held and dist.get_rank() == 0:
            _log.warning("the optimizer holds another one (%s), whose state is in no snapshot: it begins anew", ", ".join(self._held))
        if not saved:
            return
        back = AttributeReturn({item.name: item.tensor for item in self.survey()})
        for name, value in saved.items():
            try:
                back.attributes(base, {name: value}, _BASE)
            except Exception as error:  # whatever a load_state_dict of the script's raises
                self._leave_out(name, error)
        self._left_out.clear()  # they may be whole in the next snapshot

    def _scalers(self) -> dict[str, Any]:
        found = {name: getattr(self._engine.optimizer, name, None) for name in _SCALERS}
        return {name: scaler for name, scaler in found.items() if scaler is not None}

    def _autocast_scalers(self) -> dict[str, Any]:
        found = {
            "zero": getattr(self._engine.optimizer, "torch_autocast_gradscaler", None),
            "plain": getattr(self._engine, "torch_autocast_z0_gradscaler", None),
        }
        return {name: scaler for name, scaler in found.items() if scaler is not None}


def _batch(engine: Any) -> dict[str, int]:
    return {"micro": engine.train_micro_batch_size_per_gpu(), "accumulation": engine.gradient_accumulation_steps()}


def _own(base: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of the optimizer inside that training may depend on; DeepSpeed's own optimizers have none."""
    return {} if type(base).__module__.startswith("deepspeed.") else own_attributes(base)


def _held(base: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizers that one holds, apart from those that have no state but its own."""
    return [type(each).__name__ for each in _inner(base) if each.state is not base.state]


def _inner(base: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that one holds, and those that they hold."""
    found = [base]
    for outer in found:  # it grows
        for name, value in _own(outer).items():
            found += [each for _, each in held(value, name) if all(each is not other for other in found)]
    return found[1:]


def _not_users(item: Any) -> frozenset[str]:
    """The attributes that DeepSpeed gives to modules, which are not the user's."""
    return not_users(item) | {name for name in getattr(item, "__dict__", ()) if name.startswith(("ds_", "_ds_", "applied_pre_backward"))}


def _per_rank(words: str) -> str:
    return words if words.startswith(PER_RANK) else f"{PER_RANK} {words}".strip()


def _whole(layout: Layout, owner: int, item: Live) -> Read:
    """The read that fills a whole buffer."""
    piece, shape = layout.piece(item.name), tuple(item.tensor.shape)
    if piece is None or piece.shape != shape:
        then = "is missing from the snapshot" if piece is None else f"has shape {shape} now and {piece.shape} in the snapshot"
        raise LayoutMismatchError(f"{item.name} {then}. {_WAY_OUT}")
    _same_dtype(item.name, item.tensor, piece.dtype)
    return Read.of(owner, piece, item.name)


def _same_dtype(name: str, tensor: torch.Tensor, then: str) -> None:
    if (now := str(tensor.dtype).removeprefix("torch.")) != then:
        raise LayoutMismatchError(f"{name} has dtype {now} now and {then} in the snapshot. {_WAY_OUT}")


def _room(spec: TensorSpec, master: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if spec.logical.endswith(HOST) else master.device
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def _check(engine: Any) -> None:
    """Refuses by name any state that cannot be captured exactly."""
    check_version()
    if engine.optimizer is None or isinstance(engine.optimizer, DummyOptim):
        raise UnsupportedStateError("this engine has no optimizer, so it has no training state; give one to deepspeed.initialize")
    kinds = (deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine)
    if not any(kind in (type(engine), *type(engine).__bases__) for kind in kinds):
        raise UnsupportedStateError(f"a {type(engine).__name__} cannot be captured; supported: DeepSpeedEngine and PipelineEngine")
    if why := next((why for found, why in unsupported(engine) if found), None):
        raise UnsupportedStateError(why)


def unsupported(engine: Any) -> Iterator[tuple[bool, str]]:
    """The reason why an engine's setting is refused, or None."""
    for name, settings in (("offload_optimizer", engine.zero_offload_optimizer()), ("offload_param", engine.zero_offload_param())):
        nvme = settings is not None and settings.device == "nvme"
        yield nvme, f"zero_optimization.{name}.device='nvme': state on disk cannot be captured; use 'cpu'"
    for name, value in (("zenflow", engine.zenflow_config()), ("offload_optimizer.super_offload", engine.super_offload())):
        yield bool(value), f"zero_optimization.{name} updates weights while the next step runs; switch it off"
    hpz = engine.zero_hpz_partition_size()
    yield hpz > 1, f"zero_optimization.zero_hpz_partition_size={hpz} keeps second partitions that are not rebuilt; use 1"
    extra = [name for name, part in engine.module.named_modules() if type(part).get_extra_state is not nn.Module.get_extra_state]
    yield bool(extra), f"module {', '.join(extra[:1])!r} has extra state (get_extra_state), which is not captured of engines; use a buffer"
    sampled = engine.random_ltd_enabled() or engine.curriculum_learning_enabled()
    yield sampled, "data_efficiency (random-LTD, curriculum learning) has state of its own that is not captured; switch it off"
    for name in older_schedules(engine):
        yield True, f"{name} has state of its own that is not captured; switch it off, or install deepspeed>=0.19, which does without it"
    muon = any(getattr(engine.optimizer, "sub_groups_using_muon", ()))
    yield muon, "Muon at stage 3 writes its momentum during backward, while it would be copied; use stage 1 or 2"
    yield bool(engine.has_moe_layers), "mixtures of experts (MoE) are not supported: experts are partitioned over groups of their own"
    yield engine.autotp_size() > 1, f"tensor_parallel.autotp_size={engine.autotp_size()} is not supported; use 1"
