"""Flags and plain attributes that a loop or a hook sets while it trains, and that no state dict has.

    modes = Modes(modules, {"callback.0": callback})       as the script has made them
    state = modes.collect(modules)                          for a snapshot
    modes.restore(state, modules)                           in a process in which the script has made them anew

A loop that unfreezes a layer at step 1000 does not do so again when it is resumed at step 1200. Only what differs from the beginning is
kept, so that a script may change its constants between two runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.state.fields import of_class
from gemini_ft.state.methods import set_by
from gemini_ft.state.remembered import HOOKS, MODULE_INTERNALS, Attributes, hooks_of
from gemini_ft.state.rng import generator_states, private_generators, set_generator_states
from gemini_ft.state.script import is_of_script
from gemini_ft.state.values import is_same
from gemini_ft.state.worlds import Resize

_log = logging.getLogger("gemini_ft")
_SOME = 24  # names in a warning

_FLAGS = declare(
    "`requires_grad` of parameters, `training` of modules", Fate.CAPTURED, "put back as they were, where the training had changed them"
)
_SMALL = declare(
    "small plain attributes of modules, of hooks of modules and optimizers, of callbacks and datamodules, once the training changes them",
    Fate.CAPTURED,
    "numbers, texts, tensors and arrays up to 256 KiB, containers of at most 64 of them",
)
_LARGE = declare(
    "other attributes of these that change while training",
    Fate.USERS,
    "named in a warning: make it a buffer, extra state of the module, or part of `state=` (Lightning: save it in on_save_checkpoint)",
)
_GENERATOR = declare(
    "random generators that modules, hooks, callbacks and datamodules hold", Fate.CAPTURED, "with the small state of each rank"
)
_MASKED = declare("weights that pruning has masked for the last forward pass", Fate.CAPTURED, "pruning again looks at them; copied at once")
_HOOK = declare("hooks of modules", Fate.DERIVED, "registered by the script when it starts; their small plain attributes are captured")

Modules = Mapping[str, nn.Module]
SETTABLE = {"_hparams", "_automatic_optimization"}  # of Lightning's modules: a script may change them while it trains
_OTHERS = frozenset({"lightning", "pytorch_lightning"})  # private attributes of these packages' own classes begin with an underscore


def not_users(item: Any) -> frozenset[str]:
    """Names of an object's attributes that are not the user's."""
    kind: type = type(item)
    return _internals(kind) if isinstance(item, nn.Module) else frozenset()


@of_class
def _internals(kind: type) -> frozenset[str]:
    theirs = {name for base in kind.__mro__ if base.__module__.partition(".")[0] in _OTHERS for name in set_by(base)}
    private = {name for name in theirs if name.startswith("_")} - SETTABLE
    return MODULE_INTERNALS | private if private else MODULE_INTERNALS


class Modes:
    """Flags and attributes of modules and other objects, compared with those at the time this was made.

    Args:
        others: name -> another object whose attributes count, such as a callback.
        leave: names of attributes that are not the user's, for any object.
    """

    def __init__(
        self, modules: Modules, others: Mapping[str, Any] | None = None, leave: Callable[[Any], frozenset[str]] = not_users
    ) -> None:
        self._others = dict(others or {})
        self._attributes = Attributes({**modules, **self._others}, leave, caches=False)
        self._generators = self._search(modules)
        self._seen: Modules | None = None
        self._trained = _trained(modules)
        self.named: set[str] = set()  # what has been said in this job not to be restored

    def follow(self, others: Mapping[str, Any]) -> None:
        """Takes in objects beside the modules that came later: all of their plain attributes count as changed."""
        self._others.update(others)
        self._attributes.follow(self._others)
        self._seen = None

    def collect(self, modules: Modules) -> dict[str, Any]:
        """Returns, as plain data, the flags and attributes that training has changed.

        Changed attributes that cannot be kept are named in a warning, once each.
        """
        self._follow(modules)
        kept, lost = self._attributes.changes()
        masked = _masked(modules) if lost else {}
        made = {path for path in lost if self._attributes.is_made_once(path)}
        self._name(
            [path for path in lost if path not in masked and path not in made],
            logging.WARNING,
            "%s changed while training and will not be restored after a failure: only numbers, texts, small tensors and small "
            "containers of them are. If the training depends on it, %s",
        )
        self._name(
            [f"{path} (at first)" for path in made],
            logging.INFO,
            "%s came in the place of None, and is taken for a cache, which is made again after a failure. If it cannot be made again, %s",
        )
        return {
            "attributes": kept,
            "named": sorted(self.named),
            "lost": lost,
            "generators": generator_states(self._generators),
            "masked": {path: masked[path].detach() for path in lost if path in masked},
            "trained": {
                f"{name}.{key}": param.requires_grad
                for name, module in modules.items()
                for key, param in module._parameters.items()
                if param is not None and self._trained.get(name, {}).get(key) is not param.requires_grad
            },
        }

    def restore(self, state: Mapping[str, Any], modules: Modules, *, but: Iterable[Any] = ()) -> None:
        """Puts back the result of `collect`; all else is as the script has made it. Modules that are gone are passed over.

        ``but``: objects whose attributes are put back by others.
        """
        self._follow(modules)
        # What hooks of a new process have made anew (a loader) is no worse than None. Snapshots in storage may be older.
        self._attributes.give_back(state["attributes"], but=but, replaced=state.get("lost", ()))
        self.named.update(state.get("named", ()))  # snapshots in storage may be older
        set_generator_states(self._generators, state["generators"])
        for path, value in state.get("masked", {}).items():
            name, _, key = path.rpartition(".")
            if name in modules and f"{key}_orig" in modules[name]._parameters:
                vars(modules[name])[key] = value.clone()
        for name, module in modules.items():
            for key, param in module._parameters.items():
                flag = state["trained"].get(f"{name}.{key}", self._trained.get(name, {}).get(key))
                if param is not None and param.is_leaf and flag is not None and param.requires_grad != flag:
                    param.requires_grad_(flag)

    @contextlib.contextmanager
    def naming_replaced(self, modules: Modules, resize: Resize) -> Iterator[None]:
        """Warns of attributes that this process has set, and that have another rank's values after `restore` inside."""
        self._follow(modules)
        own = self._attributes.changes().kept
        yield
        now = self._attributes.changes().kept
        found = [
            f"{path}.{name}"
            for path, values in own.items()
            if not path.startswith("(")  # attributes that have been deleted
            for name, value in values.items()
            if name not in now.get(path, {}) or not is_same(now[path][name], value)
        ]
        if found:
            _log.warning(
                "elastic='batch': %s had been set in this process, and now as on rank %d of the %d ranks before. What follows from the "
                "number of this rank or of all ranks is to be set in setup(), or asked of the Trainer when it is needed",
                ", ".join([*sorted(found)[:_SOME], *([f"and {len(found) - _SOME} more"] if len(found) > _SOME else [])]),
                resize.rank % resize.then,
                resize.then,
            )

    def findings(self, modules: Modules) -> Iterator[Finding]:
        """Lists flags and attributes of modules for the census."""
        self._follow(modules)
        frozen = sum(not flag for flags in _trained(modules).values() for flag in flags.values())
        resting = sum(not module.training for module in modules.values())
        note = f"{frozen} parameters frozen, {resting} of {len(modules)} modules in eval mode"
        yield _FLAGS.found("flags", note=note)
        changes, masked = self._attributes.changes(), _masked(modules)
        yield from (_SMALL.found(path, note=type(value).__name__) for path, value in changes.each().items())
        yield from ((_MASKED.found(path, masked[path].nbytes) if path in masked else _LARGE.found(path)) for path in changes.lost)
        yield from (_GENERATOR.found(path) for path in self._generators)
        for name, module in modules.items():
            if hooks := [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks_of(module).values()]:
                yield _HOOK.found(name, note=", ".join(hooks))

    def _name(self, paths: list[str], level: int, text: str) -> None:
        """Says once in a job, on its first rank, what becomes of attributes."""
        fresh = sorted(set(paths) - self.named)
        self.named.update(fresh)
        if fresh and not (dist.is_initialized() and dist.get_rank()):
            more = [f"and {len(fresh) - _SOME} more"] if len(fresh) > _SOME else []
            names = ", ".join([*(path.removesuffix(" (at first)") for path in fresh[:_SOME]), *more])
            _log.log(level, text, names, _LARGE.how.partition(": ")[2])

    def _follow(self, modules: Modules) -> None:
        if modules is not self._seen:  # a `ModuleTree` gives another mapping when there are other modules
            self._attributes.follow(modules)
            self._generators = self._search(modules)
            self._seen = modules

    def _search(self, modules: Modules) -> dict[str, Any]:
        return private_generators(**own_values(modules), **self._others)


def own_values(modules: Modules) -> dict[str, Any]:
    """The attributes and hooks that scripts give to modules, by the module's name and the attribute's."""
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in (*vars(module).items(), *_own_hooks(module).items())
        if key not in MODULE_INTERNALS and not isinstance(value, nn.Module)
    }


def hooks_beside(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """The script's own hooks of optimizers, and of all modules and optimizers of the process, by name.

    Without methods of these optimizers, whose attributes are captured with them.
    """
    given = set(map(id, optimizers.values()))
    tables = {
        f"{name}.{kind}": getattr(optimizer, f"_optimizer_step_{kind}", {})
        for name, optimizer in optimizers.items()
        for kind in ("pre_hooks", "post_hooks")
    }
    tables |= {"optimizers.pre_hooks": _global_optimizer_pre_hooks, "optimizers.post_hooks": _global_optimizer_post_hooks}
    tables |= {f"modules.{kind}": getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS}
    own = {  # by number of the script's own: of the package's there may be more or fewer in the process that resumes
        kind: [hook for hook in table.values() if is_of_script(hook) and id(getattr(hook, "__self__", None)) not in given]
        for kind, table in tables.items()
    }
    return {f"{kind}.{index}": hook for kind, hooks in own.items() for index, hook in enumerate(hooks)}


def _own_hooks(module: nn.Module) -> dict[str, Any]:
    """The hooks of the script's own code; those of this package lead to much that is not the script's."""
    return {name: hook for name, hook in hooks_of(module).items() if is_of_script(hook)}


def _trained(modules: Modules) -> dict[str, dict[str, bool]]:
    return {
        name: {key: param.requires_grad for key, param in module._parameters.items() if param is not None}
        for name, module in modules.items()
    }


def _masked(modules: Modules) -> dict[str, torch.Tensor]:
    """The parameters as torch.nn.utils.prune had made them when the last forward pass began."""
    found = {}
    for name, module in modules.items():
        for key, _ in module._parameters.items():  # a scripted module's cannot be iterated
            if key.endswith("_orig") and isinstance(value := vars(module).get(key.removesuffix("_orig")), torch.Tensor):
                found[f"{name}.{key.removesuffix('_orig')}"] = value
    return found
