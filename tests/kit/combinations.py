"""Combinations of traits, drawn by a seed, run three ways in forked ranks, and shrunk where a way differs from plain DDP."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_kit import preload
from rank_kit import Failed, World
from three_ways import Cell, differing, recorded

preload("combinations_case")

# Trait -> its values. The first one is the plainest, to which a difference is shrunk.
VALUES: dict[str, list[Any]] = {
    "loop": ["trainer", "by hand", "plain", "fabric"],
    "loader": ["torch", "stateful", "iterator", "combined", "shortest", "longest"],
    "data": ["table", "private", "told", "stream", "noise", "drawing", "cursor"],
    "workers": ["0", "2", "persistent"],
    "sampler": ["in order", "shuffle", "generator", "weighted", "weighted generator", "subset", "numpy", "own epochs", "batches"],
    "collate": ["none", "mixing"],
    "reload": [0, 1, 2],
    "accumulate": [1, 2, 3],
    "model": ["plain", "spectral", "recurrent", "counting", "embedding"],
    "optimizer": ["sgd", "adamw", "rmsprop", "nadam", "rprop", "lbfgs", "asgd"],
    "optimizers": [1, 2],
    "schedule": ["none", "step", "cosine", "one cycle", "sequence", "chained", "lambda", "plateau"],
    "interval": ["step", "epoch"],
    "average": [False, True],
    "precision": ["32-true", "bf16-mixed"],
    "limit": [1.0, 3, 4],
    "validation": ["none", "table", "private", "noise"],
    "limit_validation": [2, 1.0],
    "sanity": [0, 1, 2],
    "interval_of_validation": [1.0, 2],
    "validated_epochs": [1, 2],
    "flush": [1, 3, 100],
    "ranks": [1, 2],
}
RARE = {"ranks": 0.15, "workers": 0.25, "loader": 0.3, "reload": 0.3, "optimizers": 0.4, "limit": 0.4}  # how often it is not the first one
CALLBACKS = ["best", "often", "all", "each epoch", "patient", "inheriting", "shaking", "weighing", "rates", "accumulating", "stopping"]
CALLBACKS += ["swa", "ema", "pruning"]
HABITS = ["gradient noise", "scaled gradients", "clamped", "skipped", "history", "metrics", "drawn", "hyperparameters", "saved"]
HABITS += ["kept by the trainer", "drawn at setup", "asks for steps", "drawn at the start", "dropout", "frozen", "resting", "shifted"]
HABITS += ["seeded", "fresh moments", "longer", "clipped", "momentum", "noise", "rate by hand", "left early", "looks", "stopped"]
HABITS += ["drawn in validation", "lowered by validation", "drawn at the end", "rates at the end"]
TOGETHER = ("combined", "shortest", "longest")  # several loaders
MOMENTS = ["training_step", "on_train_batch_end", "validation_step", "on_train_epoch_end"]  # of each loop, and then of the Trainer
MOMENTS += ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_validation_start", "on_validation_epoch_end"]
MOMENTS += ["on_train_epoch_start", "on_train_batch_start"]

_PATIENCE = 180.0  # seconds for which ranks may do nothing, also where others have the machine
REFUSALS = ("UnsupportedStateError", "StateError", "ConcurrentWriteError", "ConfigError")  # what a script may be refused with

# What seeds have found, shrunk: trait -> value, beside the plainest ones.
FOUND: dict[str, dict[str, Any]] = {
    "a validation in the middle of a step of Fabric": {"loop": "fabric", "validation": "table", "kills": [[0, "validation_step", 8]]},
    "an attribute of the data that workers were started without": {
        "data": "told",
        "workers": "persistent",
        "kills": [[0, "training_step", 9]],
    },
    "a sized loader beside one of unknown length": {"loader": "combined", "kills": [[0, "on_after_backward", 10]]},
    "a loader that ends before one of unknown length": {"loader": "longest", "kills": [[0, "training_step", 9]]},
    "a sampler of the script inside of Lightning's": {"sampler": "own epochs", "kills": [[0, "training_step", 9]]},
}


def plainest() -> dict[str, Any]:
    """The combination of which every trait is the plainest."""
    return {name: values[0] for name, values in VALUES.items()} | {"callbacks": [], "habits": [], "kills": []}


def draw(seed: int) -> dict[str, Any]:
    """A combination, in which whatever does not go together has been left out."""
    rng = random.Random(seed)
    traits = {
        name: rng.choice(values[1:]) if rng.random() < RARE.get(name, 1 - 1 / len(values)) else values[0] for name, values in VALUES.items()
    }
    traits["callbacks"] = rng.sample(CALLBACKS, rng.choice([0, 1, 2, 3]))
    traits["habits"] = rng.sample(HABITS, rng.choice([0, 1, 2, 3, 4]))
    traits["kills"] = [_kill(rng, rng.choice(MOMENTS), traits["ranks"]) for _ in range(rng.choice([1, 1, 2, 3]))]
    return legal(traits)


def _kill(rng: random.Random, moment: str, ranks: int) -> list[Any]:
    """A kill of one of the ranks at the nth time at which its process comes to a moment."""
    is_rare = "epoch" in moment or moment == "on_validation_start"
    return [rng.randrange(ranks), moment, rng.randint(2, 3) if is_rare else rng.randint(5, 14)]


def with_other_kills(traits: dict[str, Any], number: int, seed: int) -> list[dict[str, Any]]:
    """The combination, and others that differ from it in their kills alone: one each, at different moments."""
    rng = random.Random(f"kills of {seed}")
    moments = rng.sample(_reached(traits), min(number, len(_reached(traits))))
    return [traits, *(traits | {"kills": [_kill(rng, moment, traits["ranks"])]} for moment in moments)]


def _reached(traits: dict[str, Any]) -> list[str]:
    """The moments that a process of this combination may come to."""
    of_loop = MOMENTS if traits["loop"] in ("trainer", "by hand") else MOMENTS[:4]
    return [moment for moment in of_loop if traits["validation"] != "none" or "validation" not in moment]


def legal(traits: dict[str, Any]) -> dict[str, Any]:
    """The same without what cannot go together, and without traits that the loop does not have."""
    is_trainer = traits["loop"] in ("trainer", "by hand")
    traits = dict(traits)

    def leave(*names: str) -> None:
        traits.update({name: VALUES[name][0] for name in names})

    if not is_trainer:
        leave("reload", "limit", "limit_validation", "sanity", "interval_of_validation", "validated_epochs", "flush", "interval")
        traits["callbacks"] = []
        traits["habits"] = [habit for habit in traits["habits"] if habit in ("drawn", "clipped", "left early")]
        if traits["loader"] in TOGETHER or (traits["loader"] == "iterator" and traits["loop"] == "fabric"):
            leave("loader")
        if traits["loop"] == "plain":  # left right after step(), which no snapshot of that step can know (docs/plain_loop.md)
            traits["habits"] = [habit for habit in traits["habits"] if habit != "left early"]
    else:
        leave("average")
    if traits["optimizer"] == "lbfgs":
        leave("accumulate", "optimizers", "precision")
        traits["loop"] = "trainer" if traits["loop"] == "by hand" else traits["loop"]
        traits["habits"] = [habit for habit in traits["habits"] if habit not in ("clipped", "skipped", "momentum")]
        traits["callbacks"] = [each for each in traits["callbacks"] if each != "accumulating"]
    if traits["loop"] == "trainer":
        leave("optimizers")
    if traits["loop"] == "by hand":
        traits["habits"] = [habit for habit in traits["habits"] if habit not in ("clipped", "skipped")]
        traits["callbacks"] = [each for each in traits["callbacks"] if each not in ("accumulating", "swa")]
    is_table = traits["data"] in ("table", "private", "told")
    if traits["loader"] == "iterator":
        leave("workers", "collate", "sampler")
        traits |= {"data": "stream", "limit": 4}
    elif not is_table:
        leave("sampler")
    if traits["data"] == "cursor":
        traits["loader"] = "stateful"
    if traits["data"] == "private" and traits["workers"] == "persistent":
        leave("workers")
    if traits["ranks"] == 2:  # Lightning would put another sampler in
        if traits["schedule"] == "plateau":  # it follows each rank's own loss, so that ranks drift apart under plain DDP too (seed 7032)
            leave("schedule")
        if traits["loader"] != "torch":
            leave("sampler")
        if traits["data"] in ("told", "table", "private") and traits["loader"] == "stateful" and is_trainer:
            leave("loader")
        traits["habits"] = [habit for habit in traits["habits"] if habit not in ("frozen", "stopped", "left early")]
    if {"swa", "ema"} <= set(traits["callbacks"]) or ("swa" in traits["callbacks"] and traits["schedule"] in ("plateau", "chained")):
        traits["callbacks"] = [each for each in traits["callbacks"] if each != "swa"]
    if "accumulating" in traits["callbacks"]:
        leave("accumulate")
    if "patient" in traits["callbacks"] and traits["validation"] == "none":
        traits["callbacks"] = [each for each in traits["callbacks"] if each != "patient"]
    if traits["loop"] == "fabric" and traits["sampler"] == "batches":  # Fabric cannot make such a loader anew
        leave("sampler")
    if traits["model"] == "counting":  # a buffer that grows: torch's average cannot follow it
        leave("average")
        traits["callbacks"] = [each for each in traits["callbacks"] if each not in ("swa", "ema")]
    reached = _reached(traits)
    traits["kills"] = [[rank, moment if moment in reached else "training_step", number] for rank, moment, number in traits["kills"]]
    if traits["interval_of_validation"] == 2:
        leave("validated_epochs")
    return traits


def run(traits: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Runs a combination three ways.

    Returns:
        "same", "different", "refused", "failed" (one way only), or "impossible" where plain DDP fails; and what differs or was said.
    """
    return run_several([traits], folder)[0]


def run_several(combinations: list[dict[str, Any]], folder: Path) -> list[tuple[str, list[str]]]:
    """Runs combinations that differ in their kills alone, and so share the two ways without; returns for each what `run` does.

    The kills of the nth one are below ``folder / f"killed{n}"``, those of the first below ``folder / "killed"``.
    """
    traits, ways = combinations[0], {"ddp": "ddp", "undisturbed": "undisturbed"}  # name -> way
    killed_ways = [f"killed{number or ''}" for number in range(len(combinations))]
    ways |= dict.fromkeys(killed_ways, "killed")
    kills = {name: [":".join(map(str, kill)) for kill in each["kills"]] for name, each in zip(killed_ways, combinations, strict=True)}
    folders = {name: folder / name for name in ways}
    said: dict[str, Any] = {}
    with contextlib.ExitStack() as worlds:
        attempts = {}
        for way in ways:
            folders[way].mkdir(parents=True)
            environ: dict[str, Any] = {"GEMINI_ON_LATE": "wait", "GEMINI_MAX_RETRIES": "50", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
            environ |= {"LOCAL_WORLD_SIZE": str(traits["ranks"])}
            world = worlds.enter_context(World(folders[way], hosts=["host"] * traits["ranks"], **environ))
            world.has_agents = ways[way] != "ddp"
            ranks = [{"LOCAL_RANK": str(rank)} for rank in range(traits["ranks"])]
            attempts[way] = _attempts(world, (folders[way] / "cell", ways[way], traits, kills.get(way, [])), ranks)
        running = dict(attempts)
        while running:
            for way, steps in [*running.items()]:
                if (found := next(steps)) is not None:
                    said[way] = found
                    del running[way]
    fixed = {way: said[way] for way in ("ddp", "undisturbed")}
    return [_compared(traits, fixed | {"killed": said[way]}, folders | {"killed": folders[way]}) for way in killed_ways]


def _compared(traits: dict[str, Any], said: dict[str, Any], folders: dict[str, Path]) -> tuple[str, list[str]]:
    """The verdict on three ways, by what their ranks have said and recorded."""
    verdict, told = judged(said)
    if verdict == "failed" and all("ReplicaDivergedError" in text for text in told) and drifts(folders["ddp"] / "cell", told[0]):
        verdict = "refused"
    if verdict != "done":
        return verdict, told
    found = differing(folders, "cell", Cell(), traits["ranks"])
    if "nothing to resume yet" in (folders["killed"] / "cell" / "output-0").read_text().partition("nothing to resume yet")[2]:
        found = [each for each in found if ": end " not in each]  # began anew, as plain DDP would have: files of its first start are there
    return ("different" if found else "same"), found


def drifts(folder: Path, told: str) -> bool:
    """Whether two ranks of plain DDP have ended with different values of what ``told`` names."""
    first, second = (recorded(folder / f"rank-{rank}")[0] for rank in (0, 1))
    return any(key.rpartition("/")[2] in told and second.get(key) != value for key, value in first.items() if key.startswith("final["))


def judged(said: dict[str, Any]) -> tuple[str, list[str]]:
    """Judges what the ranks of each way have returned or raised: a verdict of `run`, or "done"; and what was said.

    Where a rank of a way is refused by name, the others may die without a word. Where all of them do, that is a fault.
    """
    if any(each != "done" for each in said["ddp"]):
        return "impossible", [repr(said["ddp"])[:300]]
    others = {way: [each for each in said[way] if each != "done"] for way in ("undisturbed", "killed")}
    told = [f"{way}: {type(each).__name__} {each}"[:600] for way, each_of in others.items() for each in each_of]
    if not told:
        return "done", []
    is_named = all(any(map(_is_refusal, ranks)) for ranks in others.values() if ranks)
    is_refusal = is_named and all(_is_refusal(each) or isinstance(each, Failed) for ranks in others.values() for each in ranks)
    return ("refused" if is_refusal else "failed"), told


def _is_refusal(said: Any) -> bool:
    """Whether a rank was refused by name: by an error that is about the script."""
    return str(said).startswith(tuple(f"refused: {name}: " for name in REFUSALS))


def _attempts(world: World, arguments: Any, ranks: Any) -> Iterator[Any]:
    """Restarts ranks that were killed; yields None while they run, and in the end what each has returned or raised."""
    for number in range(8):
        kills = len(list(arguments[0].glob("killed-*")))
        attempt = world.start(_train, *arguments, per_rank=ranks, TORCHELASTIC_RESTART_COUNT=str(number))
        yield None
        while not attempt.wait(_PATIENCE):
            if any(isinstance(each, Exception) for each in attempt.said.values()):
                break
        if len(list(arguments[0].glob("killed-*"))) == kills:
            yield [attempt.said.get(rank) for rank in range(len(ranks))]
        attempt.kill()  # the other ranks have failed, or wait for the one that was killed
    yield [RuntimeError("it was killed eight times")]


def _train(*arguments: Any) -> str:
    from combinations_case import train

    return train(*arguments)


def killed(folder: Path, number: int = 0) -> int:
    """How many kills of the nth combination have happened."""
    return len(list(folder.glob(f"killed{number or ''}/cell/killed-*")))


def shrunk(traits: dict[str, Any], folder: Path, verdict: str) -> dict[str, Any]:
    """The combination after each trait that the verdict does not need was set to its plainest value, or taken away."""
    count = 0

    def stays(other: dict[str, Any]) -> bool:
        nonlocal count
        count += 1
        where = folder / f"shrunk-{count}"
        try:
            return run(other, where)[0] == verdict
        finally:
            shutil.rmtree(where, ignore_errors=True)

    for name in ("kills", "callbacks", "habits"):
        for part in [*traits[name]]:
            other = legal(traits | {name: [each for each in traits[name] if each != part]})
            if other != traits and (name != "kills" or other["kills"]) and stays(other):
                traits = other
    for name, values in VALUES.items():
        if traits[name] != values[0] and (other := legal(traits | {name: values[0]})) != traits and stays(other):
            traits = other
    return traits


def shown(traits: dict[str, Any]) -> dict[str, Any]:
    """The traits that are not at their plainest, and the loop."""
    return {name: value for name, value in traits.items() if name not in VALUES or value != VALUES[name][0] or name == "loop"}
