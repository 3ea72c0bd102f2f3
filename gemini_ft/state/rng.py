"""States of random generators, as plain data that every codec can carry.

There are those of the process, from which training draws, those in variables of the script's modules, which count among them, and those
that a data pipeline or a module keeps for itself.
"""

from __future__ import annotations

import array
import contextlib
import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MappingProxyType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from gemini_ft import accelerator
from gemini_ft.state.fields import fields_of, is_a, of_class, parts_of
from gemini_ft.state.script import is_of_library, script_modules

# (torch's bytes, (version, words, gauss) of `random`, numpy's: (name, words, position, has_gauss, gauss) of its usual generator; where
# the script has generators, their states by name)
Randomness = tuple[Any, ...]

_CLOSED = (str, bytes, int, float, type, ModuleType, torch.Tensor, np.ndarray)
_TRACKERS = ("deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random")
_OF_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence)
GENERATORS = (torch.Generator, SobolEngine, *_OF_NUMPY, random.Random)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, classmethod, staticmethod, property, GetSetDescriptorType)
_USUAL = frozenset(map(id, (*_CODE, MappingProxyType, NoneType, bool, int, float, str, bytes, tuple, list, dict, set)))  # no generators


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator with a state; what draws from the system has none."""
    return is_a(value, GENERATORS) and not is_a(value, random.SystemRandom)


class _Place(NamedTuple):
    """A variable of a module, or an attribute of a class or an object in one."""

    module: ModuleType
    names: Sequence[str]

    @property
    def path(self) -> str:
        return ".".join([self.module.__name__, *self.names])

    @property
    def value(self) -> Any:
        found: Any = self.module
        for name in self.names:
            found = _fields(found).get(name)
        return found


class _ScriptGenerators:
    """The generators in variables of the script's modules, and in attributes of their classes and of objects in these variables."""

    def __init__(self) -> None:
        self._places: list[_Place] = []  # those that had a generator at the last look
        self._looked_through: list[ModuleType] = []  # those that were looked through

    def look(self) -> dict[str, Any]:
        self._looked_through = script_modules()
        self._places = [place for module in self._looked_through for place in _places(module)]
        return self.seen()

    def seen(self) -> dict[str, Any]:
        """Returns what is now in the variables of the last look; it looks again where the script has other modules since."""
        if self._looked_through != script_modules():
            return self.look()
        of_process = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}
        found = {place.path: place.value for place in self._places}
        return {path: value for path, value in found.items() if is_generator(value) and id(value) not in of_process}


_of_script = _ScriptGenerators()


def script_generators() -> dict[str, Any]:
    """The generators in variables of the script's modules, and in attributes of their classes and of objects in these variables, by name.

    Of objects those whose class is the script's.
    """
    return _of_script.look()


def script_states() -> dict[str, Any]:
    """The states of these generators, by name."""
    return _readable(script_generators())


def _places(module: ModuleType) -> Iterator[_Place]:
    """Where a module, the classes that it defines, and its objects of the script's classes have a generator now."""
    for name, value in [*vars(module).items()]:
        is_class = is_a(value, type)
        if id(type(value)) in _USUAL and not is_class:  # a script's modules may have 100 000 variables
            continue
        if is_generator(value):
            yield _Place(module, [name])
        if vars(value).get("__module__") == module.__name__ if is_class else _is_scripts(type(value)):
            yield from (_Place(module, [name, attribute]) for attribute, inner in [*_fields(value).items()] if is_generator(inner))


def _fields(owner: Any) -> Mapping[str, Any]:
    return vars(owner) if is_a(owner, (ModuleType, type)) else fields_of(owner)


@of_class
def _is_scripts(kind: type) -> bool:
    """Whether a class is of the script's own code."""
    return kind.__module__ != "builtins" and not is_of_library(kind.__module__)


def _readable(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators, without those that have none to give: a class of the script may draw from elsewhere."""
    found: dict[str, Any] = {}
    for path, generator in generators.items():
        with contextlib.suppress(Exception):
            found[path] = _state_of(generator)
    return found


def randomness(but: Iterable[Any] = ()) -> Randomness:
    """The states of this process's global generators and of those of the script's modules; few objects, as they are taken at every step.

    ``but``: generators of the script that are left out.
    """
    seen, out = _of_script.seen(), {*map(id, but)}
    found = _readable({path: generator for path, generator in seen.items() if id(generator) not in out} if out else seen)
    return (*process_randomness(), found) if found else process_randomness()


def process_randomness() -> Randomness:
    """The states of this process's global generators alone."""
    version, words, gauss = random.getstate()
    return torch.get_rng_state().numpy().tobytes(), (version, array.array("I", words).tobytes(), gauss), _numpy_state()


def _numpy_state() -> tuple[str, bytes, int, int, float] | dict[str, Any]:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # np.random.set_bit_generator
        return state
    return state["bit_generator"], state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


def set_randomness(state: Randomness) -> None:
    """Restores the result of :func:`randomness`."""
    torch_state, (version, words, gauss), numpy_state, *of_script = state
    for states in of_script:
        set_generator_states(script_generators(), states)
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    random.setstate((version, tuple(array.array("I", words)), gauss))
    if isinstance(numpy_state, dict):
        np.random.set_state(numpy_state)
    else:
        name, key, position, has_gauss, cached = numpy_state
        np.random.set_state((name, np.frombuffer(key, dtype=np.uint32), position, has_gauss, cached))


def rng_state() -> dict[str, Any]:
    """`randomness`, and the states of the generator of every accelerator if one is in use; safe to `encode`."""
    script_generators()
    state: dict[str, Any] = {"host": randomness()}
    if (module := accelerator.in_use()) is not None:  # before it was used, no number has been drawn there
        state["accelerator"] = {"current": module.current_device(), "states": module.get_rng_state_all()}
    return state


def set_rng_state(state: dict[str, Any], *, of_script: bool = True) -> None:
    """Restores the result of `rng_state`, the script's generators only where ``of_script`` says so.

    A rank that moved to another accelerator of its host finds the state of its old device on its new one.
    """
    set_randomness(state["host"] if of_script else state["host"][:3])
    if "accelerator" in state and torch.accelerator.is_available():
        module, states = torch.get_device_module(torch.accelerator.current_accelerator()), state["accelerator"]["states"]
        for device, value in enumerate(states[: module.device_count()]):
            module.set_rng_state(value, device)
        module.set_rng_state(states[state["accelerator"]["current"]])


def take_rng_state(state: dict[str, Any], new_rank: int | None) -> None:
    """Restores the result of `rng_state`; ``new_rank``: of a rank that had none of its own, and goes on with other numbers."""
    set_rng_state(state, of_script=new_rank is None)
    if new_rank is not None:
        branch_randomness(new_rank)


def branch_randomness(stream: int) -> None:
    """Goes on with numbers that depend on the present state and differ from those of every other ``stream``.

    For a rank that has taken over the states of another one, because there was none of its own number.
    """
    seed = int(torch.randint(2**62, (1,)).item()) ^ stream
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Restores the process's generators afterwards, whatever is drawn inside."""
    before = randomness()
    try:
        yield
    finally:
        set_randomness(before)


class GivenGenerator:
    """A generator of the script's own, with the methods of whatever is given as ``state=``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        _given.add(self)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": _state_of(self.generator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _set_state_of(self.generator, _state_of(state) if is_generator(state) else state["generator"])


_given: weakref.WeakSet[GivenGenerator] = weakref.WeakSet()


def rng_trackers() -> dict[str, Any]:
    """The trackers of generators that model-parallel layers draw from, DeepSpeed's and Megatron's, by their modules."""
    found = {name: getattr(sys.modules.get(name), "get_cuda_rng_tracker", None) for name in _TRACKERS}
    return {name: tracker() for name, tracker in found.items() if tracker is not None}


class EveryGenerator:
    """The states of all that a call of a model may draw from, as they are now: `rng_state`, tracked generators and given ones.

    ``further``: generators beside these.
    """

    def __init__(self, further: Iterable[Any] = ()) -> None:
        self._process = rng_state()
        self._tracked = [(tracker, {**tracker.get_states()}) for tracker in rng_trackers().values()]
        held = [state for _, states in self._tracked for state in states.values() if is_generator(state)]
        others = [*held, *(each.generator for each in _given), *further]
        self._others = {str(number): generator for number, generator in enumerate(others)}
        self._states = _readable(self._others)

    def put_back(self) -> None:
        """Gives them these states again."""
        set_rng_state(self._process)
        for tracker, states in self._tracked:
            if states:  # none has been added: there is nothing to draw from
                tracker.set_states({**states})
        set_generator_states(self._others, self._states)


def private_generators(levels: int = 10, /, **roots: Any) -> dict[str, Any]:
    """Generators that objects hold for themselves, by the path that leads to them from ``roots``.

    Looks into attributes, lists, tuples, mappings and partials, so many levels and two thousand objects beside the roots deep: enough for
    datasets, and chains of transforms or of torchdata's nodes. A generator that is created later, or hidden deeper, is not found. So are
    those that a function of the script encloses, or has as defaults; other objects there are not looked into.
    """
    found: dict[str, Any] = {}
    seen = {id(torch.default_generator)}
    level = list(roots.items())
    for _ in range(levels):
        below: list[tuple[str, Any]] = []
        for path, item in level:
            if id(item) in seen or len(seen) > 2000 + len(roots):
                continue
            seen.add(id(item))
            with contextlib.suppress(Exception):  # an object may raise anything when it is asked what it is
                if is_generator(item):
                    found[path] = item
                elif not is_a(item, _CLOSED):
                    parts = [*parts_of(item), *enclosed_generators(item).items()]
                    below += [(f"{path}.{name}", inner) for name, inner in parts]
        level = below
    return found


def enclosed_generators(item: Any) -> dict[str, Any]:
    """The generators that a function of the script encloses, or has as defaults of its arguments, by name; none of anything else."""
    if type(item) is not FunctionType or is_of_library(item.__module__):
        return {}
    code, defaults = item.__code__, item.__defaults__ or ()
    found = dict(zip(code.co_varnames[max(0, code.co_argcount - len(defaults)) : code.co_argcount], defaults, strict=False))
    found |= item.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, item.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has not been set yet
            found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if is_generator(value)}


def generator_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators that :func:`private_generators` found, by path."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def set_generator_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Sets the states of those generators that are still at the same path."""
    for path in generators.keys() & states.keys():
        _set_state_of(generators[path], states[path])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, SobolEngine):
        scrambled = {name: getattr(generator, name).tolist() for name in ("shift", "sobolstate")} if generator.scramble else {}
        return {"drawn": generator.num_generated, "last": generator.quasi.tolist(), **scrambled}
    if isinstance(generator, np.random.SeedSequence):
        return _comparable(generator.state)
    if isinstance(generator, np.random.RandomState):
        return _comparable(generator.get_state(legacy=False))
    bits = generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator
    seeds = _seeds_of(bits)
    return _comparable(bits.state) | ({"seeds": _comparable(seeds.state)} if seeds is not None else {})


def _seeds_of(bits: Any) -> Any:
    """The sequence that numpy's ``spawn`` takes the seeds of further generators from; None where a generator has none."""
    seeds = getattr(bits, "seed_seq", None)
    return seeds if is_a(seeds, np.random.SeedSequence) else None


def _comparable(state: Any) -> Any:
    """A state of numpy with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _comparable(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(_tuples(state))
    elif isinstance(generator, SobolEngine):
        generator.num_generated = state["drawn"]
        generator.quasi.copy_(torch.tensor(state["last"]))
        for name in ("shift", "sobolstate") if "shift" in state else ():
            getattr(generator, name).copy_(torch.tensor(state[name]))
            generator._first_point = (generator.shift / 2**generator.MAXBIT).reshape(1, -1)
    elif isinstance(generator, np.random.SeedSequence):
        made: Any = np.random.SeedSequence(**state | {"spawn_key": tuple(state["spawn_key"])})
        generator.__setstate_cython__(made.__reduce__()[2])  # as unpickling does: it cannot be set otherwise
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        bits = generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator
        bits.state = state
        if (seeds := _seeds_of(bits)) is not None and _comparable(seeds.state) != state.get("seeds", _comparable(seeds.state)):
            _set_state_of(seeds, state["seeds"])


def _tuples(state: Any) -> Any:
    return tuple(_tuples(part) for part in state) if isinstance(state, Sequence) else state
