"""Jobs of traits that a seed draws, each under plain DDP, under gemini undisturbed, and under gemini and killed: what differs?

`tests/kit/combinations.py` draws loop x loader x data x workers x sampler x reload x accumulation x model x optimizers x callbacks x habits
x moments of kills, runs the three ways side by side, and compares batches, losses and final states in every bit. Up to ``--kills``
combinations of a seed differ in their kills alone: plain DDP and gemini undisturbed run once for them. Each verdict is added to
``--results`` at once, from which a later call goes on: seeds that are there are not run again, and ``--report`` writes the tables of all.

A seed that differs is shrunk to the traits that it needs by `COMBINATIONS=SEED:SEED+1 make soak PART=combinations`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # combinations are those of the tests

VERDICTS = ("same", "refused", "impossible", "different", "failed")
Result = dict[str, Any]


def read(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(options: argparse.Namespace) -> None:
    """Runs every ``jobs``-th seed in this process, in worlds whose ranks and agents are forked."""
    from combinations import draw, killed, run_several, with_other_kills
    from warm_python import launchers

    done, end = {result["seed"] for result in read(options.results)}, time.monotonic() + options.seconds
    with launchers(forked=True):
        for seed in range(options.first + options.worker, options.first + options.seeds, options.jobs):
            if seed in done or time.monotonic() > end:
                continue
            folder, begin = Path(tempfile.mkdtemp(prefix="gemini-combination-")), time.monotonic()
            several = with_other_kills(draw(seed), options.kills - 1, seed)
            try:
                verdicts = run_several(several, folder / "drawn")
            except AssertionError as error:  # a way has come to no end
                verdicts = [("failed", [str(error)])] * len(several)
            seconds = round((time.monotonic() - begin) / len(several), 2)
            with open(options.results, "a") as file:
                for number, (traits, (verdict, told)) in enumerate(zip(several, verdicts, strict=True)):
                    found = {
                        "seed": seed,
                        "verdict": verdict,
                        "told": [text[:600] for text in told[:5]],
                        "kills": killed(folder / "drawn", number),
                    }
                    file.write(json.dumps(found | {"seconds": seconds, "traits": traits}) + "\n")
            shutil.rmtree(folder)


def campaign(options: argparse.Namespace) -> None:
    """Runs the seeds in several processes."""
    with tempfile.TemporaryDirectory(prefix="gemini-state-") as state:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GEMINI_", "TORCHELASTIC_"))}
        environ |= {**common.one_thread(), "GEMINI_STATE_DIR": state}
        commands = [[sys.executable, *sys.argv, "--worker", str(number)] for number in range(options.jobs)]
        workers = [subprocess.Popen(command, env=environ) for command in commands]
        for worker in workers:
            worker.wait()


def summary(results: Iterable[Result]) -> dict[str, Any]:
    results = [*results]
    verdicts = Counter(result["verdict"] for result in results)
    disturbed = [result for result in results if result["verdict"] == "same" and result["kills"]]
    return {
        "combinations": len(results),
        "seeds": _ranges(sorted({result["seed"] for result in results})),
        **{verdict: verdicts[verdict] for verdict in VERDICTS},
        "same_after_a_kill": len(disturbed),
        "kills": sum(result["kills"] for result in results),
        "seconds_of_each": round(sum(result["seconds"] for result in results) / max(1, len(results)), 2),
    }


def _ranges(seeds: list[int]) -> str:
    """Numbers as ranges: 1 to 5, 8."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][1] == seed - 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in parts)


def by_trait(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Rows of trait, value, and how many combinations with it came to each verdict."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        traits = result["traits"] | {"kill at": [moment for _, moment, _ in result["traits"]["kills"]]}
        del traits["kills"]
        for name, value in traits.items():
            for each in dict.fromkeys(value) if isinstance(value, list) else [value]:
                counts.setdefault((name, str(each)), Counter())[result["verdict"]] += 1
    order = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in counts))}
    keys = sorted(counts, key=lambda key: (order[key[0]], -counts[key].total()))
    return [(name, value, *(str(counts[name, value][verdict]) for verdict in VERDICTS)) for name, value in keys]


def _reason(told: str) -> str:
    """The refusal without the names of the job's own objects and numbers, so that equal ones are counted together."""
    return told.partition(": ")[2].removeprefix("str ").removeprefix("refused: ")[:150].splitlines()[0]


def report(results: list[Result]) -> str:
    figures = summary(results)
    reasons = Counter(_reason(result["told"][0]) for result in results if result["verdict"] == "refused")
    bad = [result for result in results if result["verdict"] in ("different", "failed")]
    from combinations import shown

    return "\n".join(
        [
            f"{figures['combinations']} combinations of the seeds {figures['seeds']} ran three ways each; those of one seed differ in "
            f"their kills, and share the two ways without. {figures['kills']} ranks were killed.",
            "",
            common.table(("verdict", "combinations"), [(verdict, str(figures[verdict])) for verdict in VERDICTS]),
            "",
            f"*Same*: all batches, losses and final states of all three ways are equal in every bit; in {figures['same_after_a_kill']} "
            "of them ranks were killed. *Refused*: by an error that names what cannot be resumed. *Impossible*: plain "
            "DDP itself ends in an error.",
            "",
            *(["Differing or failed:", ""] if bad else []),
            *(f"- seed {each['seed']} ({each['verdict']}): `{shown(each['traits'])}`: {'; '.join(each['told'])[:400]}" for each in bad),
            "",
            "Refusals:",
            "",
            *(f"- {number} times: {reason}" for reason, number in reasons.most_common()),
            "",
            "## Traits",
            "",
            common.table(("trait", "value", *VERDICTS), by_trait(results)),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--kills", type=int, default=4, help="combinations of each seed, which differ in their kills")
    parser.add_argument("--jobs", type=int, default=2, help="combinations at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this time")
    parser.add_argument("--results", type=Path, default=Path("build/combinations.jsonl"), help="lines of JSON, to which is added")
    parser.add_argument("--report", action="store_true", help="write the report of all that is in --results, and run nothing")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.worker >= 0:
        work(options)
        return 0
    if not options.report:
        campaign(options)
    results = sorted(read(options.results), key=lambda result: int(result["seed"]))
    if options.report:
        packages = common.versions(("gemini-ft", "torch", "lightning"))
        path = common.write_report("combinations", "Generated combinations of traits, three ways each", report(results), packages)
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    figures = summary(results)
    processor = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["processor_seconds_of_drivers"] = round(processor.ru_utime + processor.ru_stime, 1)
    common.print_result("combinations", figures, {"same": common.ratio(figures["same"], figures["combinations"])})
    return int(bool(figures["different"] or figures["failed"]))


if __name__ == "__main__":
    sys.exit(main())
