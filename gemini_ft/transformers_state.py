"""State of transformers' Trainer that it does not save itself: the position in its batches, and attributes of subclasses and callbacks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState

from gemini_ft.loaders.ahead import FetchedAhead, base_of, no_epoch
from gemini_ft.loaders.loader import bookmark_of, make_resumable
from gemini_ft.state.codec import is_exact
from gemini_ft.state.fields import NO_FIELDS, fields_of
from gemini_ft.state.methods import set_by
from gemini_ft.state.modes import Modes
from gemini_ft.state.rng import GENERATORS, enclosed_generators, generator_states, private_generators, set_generator_states
from gemini_ft.state.script import is_of_library
from gemini_ft.state.values import ATOMS, MAPPINGS, SEQUENCES

_THEIRS = ("transformers", "accelerate")
_GIVEN = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")  # attributes of a Trainer that are the script's objects
_DEPTH = 4  # of the objects that one of these leads to
_MANY = 1000  # values in a container; one with more of them is not looked at
_LARGE = object()  # stands for a value that was small before


class TrainingData:
    """The position in the batches of a Trainer when a step begins.

    By then the batches of that step have been fetched, and accelerate has fetched the one that follows. Where rank 0 fetches the batches
    of all ranks (accelerate's ``dispatch_batches``), those of the epoch are fetched again: accelerate fills up the last one with samples of
    the first.

    ``loader``: the Trainer's own, which iterates a DataLoader or is one. ``accumulated``: the most batches that a step has.
    """

    def __init__(self, loader: Any, accumulated: int) -> None:
        self._loader, self.base, self.is_fetched_again = loader, base_of(loader), isinstance(loader, DataLoaderDispatcher)
        self._per_step = accumulated * (ranks() if self.is_fetched_again and not loader.split_batches else 1)
        self._ahead = FetchedAhead(loader, self._per_step, only_first=self.is_fetched_again, lenient=True)

    def before_step(self, steps: int) -> dict[str, Any] | None:
        """The position after ``steps`` steps of this epoch; None: this rank has fetched none of the batches that follow."""
        return self._ahead.before(steps * self._per_step)

    def rest_of(self, loader: Any, done: int, found: Mapping[str, Any] | None) -> Any:
        """Lets the loader's next iteration begin after the result of `before_step`, with the batches that had been fetched; returns it.

        Args:
            loader: the Trainer's.
            done: batches of the epoch that the training has had.
            found: the result, of as many ranks; None: only the batches that are done are left out.
        """
        if self.is_fetched_again:  # accelerate's `skip_first_batches` leaves out too few of a dataset that is indexed
            loader.skip_batches = done
        if found is not None:
            self._ahead.go_to(loader, found)
        return loader

    def settle(self) -> None:
        """Ends what `rest_of` has begun, once a step begins."""
        self._ahead.settle()
        if self.is_fetched_again:
            self._loader.skip_batches = 0


class EvaluationData:
    """The loaders of evaluations whose worker processes live from one to the next, which the Trainer keeps for that.

    ``trainer``: the Trainer, before its training begins.
    """

    def __init__(self, trainer: Any) -> None:
        arguments, data = trainer.args, trainer.eval_dataset
        lives_on = data is not None and arguments.dataloader_persistent_workers and arguments.dataloader_num_workers > 0
        names = (data if isinstance(data, dict) else [None]) if lives_on else []
        loaders = {name or "": base_of(trainer.get_eval_dataloader(name)) for name in names}
        for loader in loaders.values():
            make_resumable(loader, epoch=no_epoch, rests=True, owner=self)
        self._loaders = {name: loader for name, loader in loaders.items() if bookmark_of(loader) is not None}

    def states(self) -> dict[str, Any]:
        """The states in which the evaluations so far have left their loaders."""
        return {name: loader.state_dict() for name, loader in self._loaders.items()}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Puts back the result of `states`."""
        for name in self._loaders.keys() & found.keys():
            self._loaders[name].load_state_dict(found[name])


def why_weighed_by_ranks(trainer: Any) -> str:
    """The reason why the weight of a micro-batch may follow from the number of ranks, for a fixed number of all; empty: it does not.

    DDP divides by the ranks. So a loss has to be divided by the micro-batches of a rank, or be multiplied by the ranks, as the Trainer
    does with one that is divided by the tokens of all ranks; a loss of the script's own may be neither.
    """
    takes_tokens = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    is_multiplied = takes_tokens and trainer.args.average_tokens_across_devices
    said = trainer.loss_is_scaled_for_ga if hasattr(Trainer, "loss_is_scaled_for_ga") else None  # a Trainer before 5.19 does not ask
    is_whole = takes_tokens if said is None else said  # not divided by the micro-batches of a rank
    is_own = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    if is_own and (is_multiplied or is_whole):
        return (
            "nothing says by how much the script's own loss (compute_loss, compute_loss_func) is divided. Let it be the mean of its "
            "micro-batch, with loss_is_scaled_for_ga = False in the Trainer's class (from transformers 5.19 on) and "
            "average_tokens_across_devices=False"
        )
    if is_multiplied != is_whole:
        return (
            "a loss that is divided by the tokens of each rank alone weighs samples by the number of ranks. Give "
            "average_tokens_across_devices=True, and leave loss_is_scaled_for_ga out"
        )
    return ""


def followers(trainer: Any) -> dict[str, nn.Module]:
    """The models that follow the one that is trained, by name: the reference of TRL's Trainers (``sync_ref_model``)."""
    reference = getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None
    return {"reference": reference} if isinstance(reference, nn.Module) else {}


class OwnAttributes:
    """Plain attributes that a training changes: of a Trainer's subclass and arguments, of callbacks, and of losses and metrics of its own.

    ``trainer``: the Trainer, before its training begins.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._views: dict[str, SimpleNamespace] = {}
        self._left: dict[str, Collection[str]] = {}  # names of attributes that are not looked at
        self._small: dict[str, set[str]] = {}  # names of those that have been small and plain
        self._holding: dict[str, SimpleNamespace] = {}  # of the same objects: models that are not the one that is trained
        self._trained: tuple[Any, set[int]] = None, set()  # that one; ids of its modules, and of others that snapshots have
        self._named: set[str] = set()  # those of them that have been named
        self._looks = 0
        self._look()
        self._modes, self._models = (Modes({}, views, lambda _: frozenset()) for views in (self._views, self._holding))
        self._named, self._generators = self._models.named, private_generators(**self._holding)
        self._known = len(self._views)

    def collect(self) -> dict[str, Any]:
        """The values that have changed, as plain data; what cannot be kept is named in a warning.

        Models that are not trained are large: it looks at them when it is called the 1st, 2nd, 4th, 8th, ... time, until they are named.
        """
        self._look_again()
        found = self._modes.collect(_NO_MODULES)
        self._looks += 1
        if not self._looks & (self._looks - 1):
            self._models.collect(_NO_MODULES)
        found["generators"] |= generator_states(self._generators)
        return found | {"named": sorted({*found["named"], *self._named})}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Puts back the result of `collect`."""
        self._look_again()
        state = self._trainer.state
        planned = state.max_steps, state.num_train_epochs
        self._modes.restore(found, _NO_MODULES)
        state.max_steps, state.num_train_epochs = planned  # an object that a callback holds may lead to the Trainer
        set_generator_states(self._generators, found["generators"])
        self._named.update(found.get("named", ()))
        for name, item in self._items():
            vars(item).update(vars(self._views[name]))
        for name, item in self._behind():
            if not isinstance(item, FunctionType):
                fields_of(item).update({key: value for key, value in vars(self._views[name]).items() if value is not _LARGE})

    def _look_again(self) -> None:
        self._look()
        if len(self._views) > self._known:  # a callback was added
            self._modes.follow(self._views)
            self._models.follow(self._holding)
            self._generators |= private_generators(**self._holding)  # those of a model that has been named are gone from there
            self._known = len(self._views)

    def _look(self) -> None:
        """Brings the views up to date: of each object the attributes that are the script's and are no part of the Trainer."""
        for name, item in self._items():
            if name not in self._views:
                self._views[name], self._holding[name], self._left[name] = SimpleNamespace(), SimpleNamespace(), _not_scripts(item)
            left = self._left[name]
            found = {key: value for key, value in vars(item).items() if key not in left and not _is_theirs(value)}
            models = {key: found.pop(key) for key, value in list(found.items()) if isinstance(value, nn.Module)}
            if item is self._trainer:  # a loss that is a module, for example
                models |= {key: value for key in _GIVEN if isinstance(value := getattr(item, key, None), nn.Module)}
            if models and self._trained[0] is not (model := self._trainer.model_wrapped):
                kept = (model,) if self._trainer.is_deepspeed_enabled else (model, *followers(self._trainer).values())
                self._trained = model, {id(module) for each in kept for module in each.modules()}
            models = {
                key: value for key, value in models.items() if id(value) not in self._trained[1] and f"{name}.{key}" not in self._named
            }
            for present, values in ((self._views[name], found), (self._holding[name], models)):
                vars(present).clear()
                vars(present).update(values)
        for name, item in self._behind():
            view, small = self._views.setdefault(name, SimpleNamespace()), self._small.setdefault(name, set())
            fields = {key: value for key, value in _fields_of(item).items() if type(value) in _PLAIN or is_exact(value)}
            small |= (now := {key for key, value in fields.items() if _is_small(value)})
            vars(view).clear()
            vars(view).update({key: value if key in now else _LARGE for key, value in fields.items() if key in small})

    def _items(self) -> Iterator[tuple[str, Any]]:
        yield "trainer", self._trainer
        yield "arguments", self._trainer.args
        count = Counter[str]()
        for callback in self._trainer.callback_handler.callbacks:
            kind = type(callback)
            if not _is_of(kind, *_THEIRS, "gemini_ft"):
                yield f"callbacks.{kind.__name__}.{count[kind.__name__]}", callback
                count[kind.__name__] += 1

    def _behind(self) -> Iterator[tuple[str, Any]]:
        """The script's own functions and objects that compute losses and metrics, those whose methods do, and those in their attributes."""
        seen = {id(item) for _, item in self._items()}
        level = [(name, getattr(self._trainer, name, None)) for name in _GIVEN]
        for _ in range(_DEPTH):
            below = list[tuple[str, Any]]()
            for name, item in level:
                while isinstance(item, (functools.partial, MethodType)):
                    item = item.func if isinstance(item, functools.partial) else item.__self__
                is_code = item is None or isinstance(item, (type, ModuleType, nn.Module, Trainer))
                if is_code or type(item) in _PLAIN or id(item) in seen or is_of_library(type(item).__module__):
                    continue
                if (fields := _fields_of(item)) is not NO_FIELDS:
                    seen.add(id(item))
                    yield name, item
                    below += [(f"{name}.{key}", value) for key, value in fields.items()]
            level = below


_NO_MODULES: dict[str, Any] = {}
_PLAIN = frozenset({*ATOMS, *SEQUENCES, *MAPPINGS, *GENERATORS, torch.Tensor, np.ndarray})


def _fields_of(item: Any) -> Mapping[str, Any]:
    """The attributes of an object; of a function the generators that it encloses."""
    return enclosed_generators(item) if isinstance(item, FunctionType) else fields_of(item)


def _is_small(value: Any) -> bool:
    """Whether a value is plain, and not so large that looking at it at every step takes long."""
    left, count = [value], 0
    while left:
        item = left.pop()
        if type(item) in (*SEQUENCES, *MAPPINGS):
            count += len(item)
            if count > _MANY:
                return False
            left += item.values() if isinstance(item, dict) else item
        elif type(item) not in _PLAIN and not is_exact(item):
            return False
    return True


def _not_scripts(item: Any) -> Collection[str]:
    """Names of the attributes of a Trainer, its arguments or a callback that are not the script's, or are kept otherwise."""
    if isinstance(item, TrainingArguments):
        return {"eval_on_start"}  # which `GeminiCallback` sets
    theirs = {name for kind in type(item).__mro__ if _is_of(kind, *_THEIRS) for name in set_by(kind)}
    return theirs.union(item.state()["attributes"]) if isinstance(item, ExportableState) else theirs


def _is_theirs(value: Any) -> bool:
    return isinstance(value, Trainer) or (_is_of(type(value), *_THEIRS) and not isinstance(value, nn.Module))


def _is_of(kind: type, *packages: str) -> bool:
    return kind.__module__.partition(".")[0] in packages


def ranks() -> int:
    """The number of ranks that train."""
    return dist.get_world_size() if dist.is_initialized() else 1
