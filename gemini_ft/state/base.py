"""The state that a checkpointer captures and puts back: torch modules and optimizers, or an engine around them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.core.layout import Layout, Read, TensorSpec, plan_reads, stored_specs
from gemini_ft.errors import WorldSizeError
from gemini_ft.state.hyperparameters import Given, of_groups
from gemini_ft.state.modes import Modes, hooks_beside
from gemini_ft.state.modules import Extras, apply_extras, collect_extras, destinations, findings, structure
from gemini_ft.state.pending import PendingGradients
from gemini_ft.state.placements import KnownRuns, reads_of_part, words_of
from gemini_ft.state.rebuilding import Changes, Structure, build, difference, local_shape, refuse
from gemini_ft.state.rebuilding import describe as describe_all
from gemini_ft.state.survey import Models, Survey, Surveyor
from gemini_ft.state.tensors import HOST, Live, Source, describe, every_optimizer, local, placement_words, split_state_name
from gemini_ft.state.worlds import has_common_numbers, is_number, why_fixed

declare(
    "gradients that an optimizer's step has used up",
    Fate.DERIVED,
    "given back as zeros; those that a loop never zeroes are captured, from the second step on",
)


class TrainingState(Protocol):
    """The state of one rank; all calls come from the training thread."""

    def survey(self) -> list[Live]:
        """Finds each tensor where it is now; cheap enough for every step. Returns the very list of the last call, unless the list
        or the memory of its tensors has changed."""
        ...

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        """Describes what to capture; raises UnsupportedStateError for state that cannot be captured exactly."""
        ...

    def extras(self) -> Extras:
        """The state that is no tensor, at the moment of the survey just made; it may hold live objects."""
        ...

    def check(self, extras: Extras) -> None:
        """Raises LayoutMismatchError, before anything is changed, if ``extras`` belong to another kind of state."""
        ...

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        """The tensors to fill from a snapshot; those that do not exist yet are made."""
        ...

    def apply_extras(self, extras: Extras) -> None:
        """Puts back `extras`, after the tensors have been filled on all ranks: it may be collective."""
        ...

    def findings(self) -> Iterable[Finding]:
        """Everything in it, for the census."""
        ...

    def hyperparameters(self) -> Given:
        """The hyperparameters of optimizers and engines, as the script has given them."""
        ...

    def structure(self) -> object:
        """A value that changes when the census has to be taken again; cheap enough for every step."""
        ...

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        """Does the work of ``destinations`` for a snapshot that another number of ranks has made.

        ``layouts``: rank of that job -> layout of its shard. ``extras``: rank of that job -> its extras.

        Returns:
            What to read, by owner and ascending offset; name -> tensor to fill; what to give to ``apply_extras``.
        """
        ...


def as_one_rank(
    state: TrainingState, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int
) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
    """The result of ``resized`` where a rank takes all that the one of the same number had, modulo the ranks that there were."""
    source = rank % len(layouts)
    live = state.destinations(stored_specs(source, layouts), source, len(layouts))
    reads = plan_reads([item.spec for item in live], source, layouts)
    return reads, {item.spec.name: item.tensor for item in live}, extras[source]


class BoundState(TrainingState, Protocol):
    """A state as a checkpointer is given it."""

    @property
    def models(self) -> Models: ...

    @property
    def optimizers(self) -> Sequence[Any]:
        """Torch's, by themselves or wrapped."""
        ...

    @property
    def unrepeatable(self) -> str:
        """Why its steps cannot be computed again (``verify: replay``); empty: they can."""
        ...


class PlainState:
    """Modules and optimizers as their owner sees them; see `gemini_ft.state.modules`."""

    unrepeatable = ""

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[Any],  # torch optimizers, wrapped by Lightning or Fabric or not
        replicated: bool | None = None,  # whether plain parameters hold the same bytes on all ranks; None: whether a model is a DDP one
        *,
        ignored: Callable[[str], bool] = lambda _: False,  # whether the user sees to what has this name in the census
        modes: bool = True,  # whether flags and attributes of modules are part of it (`gemini_ft.state.modes`); no: the caller keeps them
        can_rebuild: bool = False,  # whether the user's script can build what has been added while training
        before: PlainState | None = None,  # what was bound to the same Checkpointer until now
    ) -> None:
        self.models, self.optimizers, self.replicated = models, optimizers, replicated
        self._ignored, self._has_modes, self._can_rebuild = ignored, modes, can_rebuild
        self._surveyor = Surveyor(models, optimizers)
        self._found: Survey | None = None  # by the last survey
        self._modes: Modes | None = None
        self._pending: PendingGradients | None = None
        self._strides: Mapping[str, Sequence[int]] = {}  # of the snapshot that is being restored
        self._outline: object = None  # by which a change of the layout is seen
        self._described: Survey | None = None  # the survey that `_outline` was made of
        self._changes = Changes()
        self._named: set[str] = set()
        self._judged: tuple[object, ...] = ()  # by which it is seen that another number of ranks may not be able to load it any more
        self._why_fixed = ""
        self._born = Structure()
        self.remember()
        if before is not None:
            self.inherit(before)

    def remember(self) -> None:
        """Takes the present state as the one that the script builds, before any training."""
        self._born, self._outline, self._described = describe_all(self.models, self.optimizers), None, None
        self._modes = Modes(self._surveyor.tree.modules(), hooks_beside(every_optimizer(self.optimizers))) if self._has_modes else None

    def inherit(self, before: PlainState) -> None:
        """Takes over what the script had made for ``before``."""
        self._born, self._modes = before._born, before._modes

    def watch(self) -> list[Any]:
        """Looks at the optimizers' steps, so that gradients which wait for one are captured; returns the handles of the hooks."""
        self._pending = PendingGradients()
        return self._pending.watch(every_optimizer(self.optimizers).values())

    def survey(self) -> list[Live]:
        self._found = self._surveyor()
        return self._found.live

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        return describe(live, rank, world_size, self.is_replicated)

    def extras(self) -> Extras:
        found = self._found
        assert found is not None
        saved = collect_extras(found, self._ignored)
        if self._modes is not None:
            saved["modes"] = self._modes.collect(found.modules)
        if self._pending is not None:
            saved["pending"] = self._pending.collect(found.parameters)
        if changes := self._present_changes(found):
            saved["changes"] = asdict(changes)
        return saved

    def _present_changes(self, found: Survey) -> Changes:
        """Changes since the script built it; computed again when names, shapes, dtypes, modules or groups differ."""
        if found is self._described:
            return self._changes
        outline = found.structure, [(local_shape(tensor), tensor.dtype) for tensor in found.own.values()]
        if outline != self._outline:
            now = describe_all(self.models, self.optimizers)
            if self._outline is None:
                self._born = self._born.with_newcomers(now)
            changes = difference(self._born, now)
            if not self._can_rebuild:
                refuse(changes, found.modules)
            self._changes, self._outline = changes, outline
        self._described = found
        return self._changes

    def check(self, extras: Extras) -> None:
        """Follows changes of the layout; any other difference is found when the state is put back."""
        self._strides = extras["strides"]
        if "changes" in extras:
            build(self.models, self.optimizers, Changes(**extras["changes"]))

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        return destinations(self.models, self.optimizers, stored, rank, world_size, replicated=self.is_replicated, strides=self._strides)

    def apply_extras(self, extras: Extras) -> None:
        apply_extras(self.models, self.optimizers, extras)
        if self._modes is not None and "modes" in extras:
            self._modes.restore(extras["modes"], self._surveyor.tree.modules())
        if "pending" in extras and self._pending is not None:
            self._pending.restore(extras["pending"], self._surveyor().parameters)

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        """Takes this rank's part of what is sharded from the ranks that had it, what all ranks hold alike from its owners, and the rest
        from the rank of the same number, modulo the ranks that there were."""
        then, source = len(layouts), rank % len(layouts)
        stored = {spec.name: spec for spec in stored_specs(source, layouts)}
        sharded = {name for name, spec in stored.items() if words_of(spec.logical)}
        self._strides = {name: strides for name, strides in self._strides.items() if name not in sharded}
        if sharded:
            _refuse_own(self._surveyor(), stored.values(), sharded, extras[source], then)
            _refuse_parts(extras[source], then)
        elif not self.is_replicated:
            raise WorldSizeError(f"modules and optimizers of {then} ranks that differ cannot be loaded by {world_size}")
        live = {item.spec.name: item for item in self.destinations(self._placed_as_now(stored.values()), source, then)}
        now = {name: item.spec for name, item in live.items() if name in sharded and words_of(item.spec.logical)}
        as_then = {name: replace(stored[name], dtype=spec.dtype) for name, spec in now.items()}
        reads = plan_reads([as_then.get(name, item.spec) for name, item in live.items()], source, layouts)
        reads = [read for read in reads if read.name not in now]
        known: KnownRuns = {}
        for name, spec in now.items():
            reads += reads_of_part(name, layouts, words_of(spec.logical), spec.shape, spec.group, world_size, known=known)
        return sorted(reads, key=lambda read: (read.owner, read.offset)), {name: item.tensor for name, item in live.items()}, extras[source]

    def _placed_as_now(self, stored: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        """The tensors of a snapshot, with sharded ones as the present number of ranks shards them."""
        found = self._surveyor()
        params = found.parameters | {label: param for label, _, param in found.with_state}
        for spec in stored:
            param = params.get(spec.name, params.get(split_state_name(spec.name)[0]))
            if words_of(spec.logical) and isinstance(param, DTensor):
                words = f"{placement_words(spec.name, param)} {HOST if spec.logical.endswith(HOST) else ''}".strip()
                spec = replace(spec, shape=tuple(local(param).shape), logical=words)
            yield spec

    def why_fixed(self, world_size: int, has_local_steps: bool = False) -> str:
        """See `gemini_ft.state.worlds.why_fixed`; cheap enough for every step."""
        found = self._surveyor()
        attributes = [len(vars(optimizer)) for optimizer in found.optimizers.values()]
        judged = (found, self.is_replicated, world_size, has_local_steps, attributes)
        if judged != self._judged:
            self._judged, self._why_fixed = judged, why_fixed(found, self.is_replicated, world_size, has_local_steps)
        return self._why_fixed

    def findings(self) -> Iterable[Finding]:
        found = self._surveyor()
        yield from findings(found)
        if self._modes is not None:
            yield from self._modes.findings(found.modules)
        if self._pending is not None:
            yield from self._pending.findings(found.parameters)

    def hyperparameters(self) -> Given:
        found: Given = {}
        for name, optimizer in every_optimizer(self.optimizers).items():
            found |= of_groups(f"{name} ({type(optimizer).__name__})", optimizer.param_groups)
        return found

    def structure(self) -> object:
        tree = self._surveyor.tree
        modules = tree.modules().values()
        return structure(self.optimizers), [module.training for module in modules], [len(module._buffers) for module in modules], tree.walks

    @property
    def named(self) -> set[str]:
        """The names that warnings of this job have called missing from its snapshots. The set is a part of these, and may be added to."""
        return self._modes.named if self._modes is not None else self._named

    @property
    def is_replicated(self) -> bool:
        """Whether plain parameters hold the same bytes on all ranks."""
        if self.replicated is not None:
            return self.replicated
        return any(isinstance(model, DistributedDataParallel) for model in self.models.values())

    @classmethod
    def of(cls, models: nn.Module | Models, optimizers: Any, replicated: bool | None, **options: Any) -> PlainState:
        """State of one module or several, one optimizer or several; options are those of the class."""
        named = {"model": models} if isinstance(models, nn.Module) else dict(models)
        return cls(named, list(optimizers) if isinstance(optimizers, Sequence) else [optimizers], replicated, **options)


def _refuse_own(found: Survey, stored: Iterable[TensorSpec], sharded: Container[str], extras: Extras, then: int) -> None:
    """Refuses state of sharded parameters that each former rank kept for its own part: nobody knows how to share it out.

    Args:
        stored: the tensors of a former rank.
        sharded: the names of those that are parts of whole ones.
        extras: of that rank.

    Raises WorldSizeError: there is some.
    """
    parts = {id(param) for name, param in found.parameters.items() if name in sharded and isinstance(param, DTensor)}
    common = {label: has_common_numbers(optimizer) for label, optimizer, param in found.with_state if id(param) in parts}
    plain = [spec for spec in stored if spec.name not in sharded and split_state_name(spec.name)[0] in common]
    names = [spec.name for spec in plain if spec.shape or not common[split_state_name(spec.name)[0]]]
    for entry in extras.get("optimizers", ()):
        for label, values in (*entry.get("state", {}).items(), *entry.get("linked", {}).items()):
            if label in common:
                names += [f"{label}.{key}" for key, value in values.items() if not (common[label] and is_number(value))]
    if names:
        raise WorldSizeError(
            f"{', '.join(sorted(names)[:5])}: state of sharded parameters that is not sharded as they are is each rank's own; start {then} "
            "ranks"
        )


def _refuse_parts(extras: Extras, then: int) -> None:
    """Refuses what only as many ranks can load: parts of sharded parameters that are no tensors by name in the snapshot.

    Raises WorldSizeError: there are some.
    """
    if found := [*extras.get("pending", {}).get("waiting", ()), *extras.get("changes", {}).get("tensors", ())]:
        raise WorldSizeError(
            f"{', '.join(sorted(found)[:5])}: gradients that wait for an optimizer, and tensors that have changed while training, are each "
            f"rank's own where parameters are sharded; start {then} ranks"
        )
