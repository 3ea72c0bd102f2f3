"""A fixed number of logical ranks, of which each worker carries some (``elastic: exact``), in a plain loop.

    ranks = checkpointer.logical_ranks(4, loader_of)
    checkpointer.resume()
    for epoch in range(checkpointer.scalars.get("epoch", 0), epochs):
        for turn in ranks.batches(epoch):
            for rank, batch in turn:
                with rank:
                    loss_of(model, batch).backward()
            ranks.reduce()
            optimizer.step()
            checkpointer.step(epoch=epoch)

Inside ``with rank:`` the process has that rank's random generators, buffers and gradients. Outside the generators are the job's, which draw
the same numbers on all workers, and buffers those of the first logical rank that the worker carries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from gemini_ft import accelerator
from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.errors import ConfigError, LayoutMismatchError, StateError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.logical_sums import carried_by, reduce_in_order
from gemini_ft.state.loop import keepable
from gemini_ft.state.modes import not_users, own_values
from gemini_ft.state.rebuilding import modules_of
from gemini_ft.state.remembered import Attributes
from gemini_ft.state.rng import (
    GivenGenerator,
    branch_randomness,
    generator_states,
    private_generators,
    rng_state,
    rng_trackers,
    set_generator_states,
    set_rng_state,
)
from gemini_ft.state.tensors import every_optimizer, version_of

_LOGICAL = declare("logical ranks", Fate.CAPTURED, "generators, buffers and position of each, found by its number")
_OUT = "(docs/elastic.md#bit-for-bit)"
Loaders = Callable[[int], Any]


class LogicalRank:
    """One of a fixed number of ranks.

    ``number``: from 0. ``loader``: its own, if there are any.
    """

    def __init__(self, ranks: LogicalRanks, number: int) -> None:
        self.number = number
        self.loader: Any = None
        self._ranks = ranks
        self._generators: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._grads: list[torch.Tensor | None] = []

    def __enter__(self) -> LogicalRank:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self.holding())
            entered.enter_context(self.drawing())
            self._entered = entered.pop_all()
        return self

    def holding(self) -> contextlib.AbstractContextManager[None]:
        """Puts its buffers and gradients in place meanwhile."""
        return self._ranks._holding(self)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Puts its generators in place meanwhile."""
        return self._ranks._drawing(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)


class LogicalRanks:
    """The logical ranks of a job; iterating gives those that this worker carries.

    Args:
        count: of all, on all workers together.
        models: name -> module, without wrappers.
        optimizers: those that train them.
        given: generators of the script, by name, which each logical rank has states of its own of.
        loader_of: makes a logical rank's resumable loader, from its number.

    Attributes:
        common: gives further values, by name, that must be the same on all workers in each step; its owner may put a function here.

    Raises:
        ConfigError: something cannot be carried; named.
    """

    def __init__(
        self,
        count: int,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Any],
        given: Mapping[str, Any],
        loader_of: Loaders | None = None,
    ) -> None:
        self.count = count
        self._workers, self._worker = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self._models, self._given = models, {name: item for name, item in given.items() if isinstance(item, GivenGenerator)}
        self.common: Callable[[], dict[str, Any]] = dict
        self._params = _parameters_of(models)
        self._refuse(optimizers)
        modules = modules_of(models)
        self._attributes = Attributes(modules, not_users, caches=False)
        self._held = private_generators(**own_values(modules))
        self._active: LogicalRank | None = None
        self._place: tuple[int, int] = (0, 0)
        self._means: list[int] = [0] * len(self._params)  # addresses of what `reduce` has made
        self._ranks = [LogicalRank(self, number) for number in carried_by(self._worker, self._workers, count)]
        for rank in self._ranks:
            rank._generators = self.generators()
            with self._drawing(rank):
                branch_randomness(rank.number)
                rank.loader = self._checked(loader_of(rank.number), rank.number) if loader_of is not None else None
            rank._buffers, rank._grads = self._copied(), [None] * len(self._params)
        self._refuse_shared_data()
        self._at_rest = self._versions()

    def __iter__(self) -> Iterator[LogicalRank]:
        return iter(self._ranks)

    @property
    def loaders(self) -> dict[str, Any]:
        """The loaders on this worker, by names for messages."""
        return {f"loader of logical rank {rank.number}": rank.loader for rank in self._ranks if rank.loader is not None}

    # -- the loop

    def batches(self, epoch: int) -> Iterator[list[tuple[LogicalRank, Any]]]:
        """An epoch's batches from the position on: in each turn one for each logical rank that this worker carries.

        Raises StateError: some of them have no more batches, and others have; while they are taken.
        """
        sources = []
        for rank in self._ranks:
            if rank.loader is None:
                raise ConfigError(
                    f"logical_ranks({self.count}) was given no loaders; give logical_ranks({self.count}, loader_of), or go through them by "
                    "`for rank in ranks`"
                )
            with self._drawing(rank):
                for sampler in _samplers_of(rank.loader):
                    getattr(sampler, "set_epoch", id)(epoch)  # some have none
                sources.append(iter(rank.loader))
        return self._turns(epoch, sources, self._ranks[0].loader.batches_done)

    def _turns(self, epoch: int, sources: Sequence[Iterator[Any]], turns: int) -> Iterator[list[tuple[LogicalRank, Any]]]:
        while True:
            turn = []
            for rank, source in zip(self._ranks, sources, strict=True):
                with self._drawing(rank), contextlib.suppress(StopIteration):
                    turn.append((rank, next(source)))
            if not turn:
                return
            if len(turn) < len(self._ranks):
                have = [rank.number for rank, _ in turn]
                raise StateError(f"elastic='exact': of the logical ranks here only {have} have batches left; give all of them as many")
            turns += 1
            self._place = epoch, turns
            yield turn

    def reduce(self) -> None:
        """Sets the gradients of all parameters to the mean of the logical ranks', summed from the first to the last. Collective.

        Raises:
            StateError: workers differ in what is the job's; named.
        """
        self._refuse_inside("reduce()")
        self._refuse_strangers()
        if [*map(id, _parameters_of(self._models))] != [*map(id, self._params)]:
            raise StateError(
                "elastic='exact': the models have other parameters than when logical_ranks() was called; change them before that"
            )
        outside = self.generators()
        if (devices := outside["process"].get("accelerator")) is not None:  # the other ones of the host are other workers'
            outside["process"] = outside["process"] | {"accelerator": devices["states"][devices["current"]]}
        common = {"the position in the data": self._place, "random generators outside of logical ranks": outside}
        blobs = {name: codec.encode(value) for name, value in (common | self.common()).items()}
        means = reduce_in_order(self._params, [rank._grads for rank in self._ranks], self.count, blobs)
        for param, mean in zip(self._params, means, strict=True):
            param.grad = mean
        self._means = [mean.data_ptr() if mean is not None else 0 for mean in means]
        for rank in self._ranks:
            rank._grads = [None] * len(self._params)

    # -- snapshots

    def state_dict(self) -> dict[str, Any]:
        """The logical ranks of this worker, by number."""
        self._refuse_inside("step()")
        if waiting := [rank.number for rank in self._ranks if any(grad is not None for grad in rank._grads)]:
            raise StateError(
                f"step() was called while gradients of the logical ranks {waiting} wait; call ranks.reduce() before the optimizer"
            )
        self._refuse_written()
        found = {}
        for rank in self._ranks:
            with self._drawing(rank):
                loader = rank.loader.state_dict() if rank.loader is not None else None
            found[str(rank.number)] = {"generators": rank._generators, "buffers": rank._buffers, "loader": loader}
        return {"facts": self.facts(has_begun=True), "ranks": found}

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes the states of this worker's logical ranks from those of the workers of a snapshot, after all else has been put back.

        Raises LayoutMismatchError: the snapshot has other logical ranks, buffers or hardware.
        """
        self.compare(self.facts(has_begun=True), [each["facts"] for each in saved])
        ranks = {number: state for each in saved for number, state in each["ranks"].items()}
        for rank in self._ranks:
            state = ranks[str(rank.number)]
            if (rank.loader is None) != (state["loader"] is None):
                raise LayoutMismatchError(
                    "the snapshot's logical ranks and this job's do not both have loaders; give the same logical_ranks"
                )
            if rank.loader is not None:
                with self._drawing(rank):
                    rank.loader.load_state_dict(state["loader"])
            rank._generators, rank._buffers = state["generators"], state["buffers"]
        for param in self._params:
            param.grad = None  # `reduce` makes them anew
        self._put_buffers(self._ranks[0])
        self._at_rest = self._versions()

    def facts(self, *, has_begun: bool) -> dict[str, Any]:
        """All that has to be the same on all workers, and in the snapshot: before the first step the model is, too."""
        found = {"the number of logical ranks": self.count, "the hardware": self.hardware()}
        model = [[*self._params], self._present()]
        return found if has_begun else found | {"the model before the first step": xxhash.xxh3_64_hexdigest(codec.encode(model))}

    def compare(self, ours: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
        """Compares `facts` with those of other workers, or of the workers that made a snapshot. Raises LayoutMismatchError: they differ."""
        for name, now in ours.items():
            for then in (each[name] for each in others if each[name] != now):
                raise LayoutMismatchError(
                    f"elastic='exact': {name}: {now} here, and {then} on another worker or in the snapshot, so that the bits could not be "
                    "kept; give all workers the same (a seed before the model is made, OMP_NUM_THREADS for threads), or begin anew with "
                    f"another run_id {_OUT}"
                )

    def hardware(self) -> dict[str, Any]:
        """Returns the properties of the device and of torch on which the bits of a kernel may depend."""
        device = self._params[0].device
        found: dict[str, Any] = {"torch": torch.__version__, "device": device.type, "matmul": torch.get_float32_matmul_precision()}
        if device.type != "cpu":
            return found | {"name": getattr(torch.get_device_module(device), "get_device_name", str)(device)}
        return found | {"cpu": [torch.backends.cpu.get_cpu_capability(), _processor()], "threads": torch.get_num_threads()}

    def findings(self) -> Iterator[Finding]:
        """The logical ranks here, for the census."""
        for rank in self._ranks:
            nbytes = sum(buffer.nbytes for buffer in rank._buffers.values())
            yield _LOGICAL.found(f"logical rank {rank.number} of {self.count}", nbytes)

    # -- inside

    @contextlib.contextmanager
    def _holding(self, rank: LogicalRank) -> Iterator[None]:
        self._refuse_inside("with rank")
        self._refuse_written()
        self._refuse_strangers()
        before = self._look()
        self._put_buffers(rank)
        for param, grad in zip(self._params, rank._grads, strict=True):
            param.grad = grad
        self._means = [0] * len(self._params)
        self._active = rank
        try:
            yield
        finally:
            rank._grads, rank._buffers = [param.grad for param in self._params], self._copied()
            for param in self._params:
                param.grad = None
            self._active = None
            self._put_buffers(self._ranks[0])
            self._at_rest = self._versions()
        after = self._look()
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            raise UnsupportedStateError(
                f"elastic='exact': {', '.join(changed[:8])} changed inside a logical rank, and would be one for all that a worker carries; "
                f"make it a buffer of the module, or write it outside {_OUT}"
            )
        if any(grad is not None and grad.layout != torch.strided for grad in rank._grads):
            raise UnsupportedStateError("elastic='exact' sums dense gradients, and these are sparse; give sparse=False to the embedding")

    @contextlib.contextmanager
    def _drawing(self, rank: LogicalRank) -> Iterator[None]:
        outside = self.generators()
        self.set_generators(rank._generators)
        try:
            yield
        finally:
            rank._generators = self.generators()
            self.set_generators(outside)

    def generators(self) -> dict[str, Any]:
        """The states of all generators, as they are."""
        given = {name: item.state_dict() for name, item in self._given.items()}
        return {"process": rng_state(), "given": given, "held": generator_states(self._held)}

    def set_generators(self, state: Mapping[str, Any]) -> None:
        """Puts the states of all generators back."""
        if ("accelerator" in state["process"]) != (accelerator.in_use() is not None):
            raise StateError(
                "elastic='exact': the accelerator came into use after logical_ranks(); put the model on its device before that"
            )
        set_rng_state(state["process"])
        for name, item in self._given.items():
            item.load_state_dict(state["given"][name])
        set_generator_states(self._held, state["held"])

    def _present(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": buffer for name, model in self._models.items() for key, buffer in model.named_buffers()}

    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._present().items()}

    def _put_buffers(self, rank: LogicalRank) -> None:
        present = self._present()
        now, then = ({name: (buffer.shape, buffer.dtype) for name, buffer in each.items()} for each in (present, rank._buffers))
        if names := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
            raise LayoutMismatchError(f"elastic='exact': the buffers {', '.join(names)} differ in shape or dtype between logical ranks")
        with torch.no_grad():
            for name, buffer in present.items():
                buffer.copy_(rank._buffers[name])

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (buffer.data_ptr(), version_of(buffer)) for name, buffer in self._present().items()}

    def _look(self) -> dict[str, Any]:
        """The parameters, the attributes of modules that are no buffers, and what is the job's, as they are now."""
        changes = self._attributes.changes()
        found: dict[str, Any] = {path: codec.encode(value) for path, value in changes.each().items()}
        params = {f"{name}.{key}": version_of(param) for name, model in self._models.items() for key, param in model.named_parameters()}
        given = {name: codec.encode(value) for name, value in self.common().items()}
        return found | params | given | {path: b"" for path in changes.lost if not self._attributes.is_made_once(path)}

    def _checked(self, loader: Any, number: int) -> Any:
        keepable(loader, f"loader_of({number})")
        if not hasattr(loader, "_gemini"):
            raise ConfigError(f"loader_of({number}) gave a {type(loader).__qualname__}; give gemini_ft.resumable(loader)")
        for sampler in _samplers_of(loader):
            if isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) != (self.count, number):
                raise ConfigError(
                    f"loader_of({number}) gave a DistributedSampler of rank {sampler.rank} of {sampler.num_replicas}; give "
                    f"DistributedSampler(data, {self.count}, number), as the workers' own number changes"
                )
        if getattr(loader, "num_workers", 0):
            raise ConfigError(f"loader_of({number}) gave a loader with num_workers={loader.num_workers}; logical ranks take 0 {_OUT}")
        return loader

    def _refuse_inside(self, what: str) -> None:
        if self._active is not None:
            raise StateError(f"{what} inside of `with rank:` of the logical rank {self._active.number}; leave that first")

    def _refuse_written(self) -> None:
        now = self._versions()
        if written := sorted(name for name in now.keys() | self._at_rest.keys() if now.get(name) != self._at_rest.get(name)):
            raise UnsupportedStateError(
                f"elastic='exact': {', '.join(written[:8])} was written outside of the logical ranks, of which each has its own; write it "
                "inside `with rank:`, and evaluate with model.eval()"
            )

    def _refuse_strangers(self) -> None:
        grads = [param.grad.data_ptr() if param.grad is not None else 0 for param in self._params]
        if any(grad not in (0, mean) for grad, mean in zip(grads, self._means, strict=True)):
            raise StateError(
                "elastic='exact': a parameter has a gradient that no logical rank has made, and that would be lost; call backward() "
                "inside `with rank:`, and zero_grad() after the optimizer's step"
            )

    def _refuse_shared_data(self) -> None:
        seen: set[int] = set()
        for loader in self.loaders.values():
            parts = {"dataset": getattr(loader, "dataset", None), "generator": getattr(loader, "generator", None)}
            samplers = {type(sampler).__name__: sampler for sampler in _samplers_of(loader)}
            found = private_generators(**parts, **samplers, collate_fn=getattr(loader, "collate_fn", None))
            if shared := [path for path, generator in found.items() if id(generator) in seen]:
                raise ConfigError(f"logical ranks share generators of their data ({', '.join(shared)}); make one for each in loader_of")
            seen |= set(map(id, found.values()))

    def _refuse(self, optimizers: Sequence[Any]) -> None:
        """Refuses by name what logical ranks cannot carry."""
        if not 0 < self._workers <= self.count:
            raise ConfigError(f"logical_ranks({self.count}) for {self._workers} workers; give at least as many, or start fewer workers")
        known = {id(param) for param in self._params}
        groups = [group for optimizer in every_optimizer(optimizers).values() for group in optimizer.param_groups]
        modules = [module for model in self._models.values() for module in model.modules()]
        why = {
            "a model in DistributedDataParallel": any(isinstance(module, DistributedDataParallel) for module in modules),
            "a model that torch.compile has wrapped": any(
                type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None for module in modules
            ),
            "sharded parameters": any(isinstance(param, DTensor) for param in self._params),
            "no parameters, or on several devices": len({param.device for param in self._params}) != 1,
            "parameters of an optimizer that are in no model": any(id(param) not in known for group in groups for param in group["params"]),
            "SyncBatchNorm, whose sums follow from the workers": any(isinstance(module, nn.SyncBatchNorm) for module in modules),
            "a module with extra state": any(type(module).get_extra_state is not nn.Module.get_extra_state for module in modules),
            "generators of model-parallel layers": any(tracker.get_states() for tracker in rng_trackers().values()),
            "kernels that may differ (call torch.use_deterministic_algorithms(True))": torch.get_deterministic_debug_mode() < 2,
            "kernels that are chosen by measuring (torch.backends.cudnn.benchmark)": torch.backends.cudnn.benchmark,
        }
        if found := [name for name, is_so in why.items() if is_so]:
            raise ConfigError(f"elastic='exact' is for plain models with logical ranks, and this job has {'; '.join(found)} {_OUT}")


def _parameters_of(models: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return list({id(param): param for model in models.values() for param in model.parameters()}.values())


def _samplers_of(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


@cache
def _processor() -> str:
    """The line of /proc/cpuinfo that names the processor; empty: there is none. Read once, as each snapshot has it."""
    with contextlib.suppress(OSError):
        return next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return ""
