"""Steps of 16 to 10 000 hosts of 8 ranks, their joining, and the start after hosts were lost, with the agents' and workers' own code.

Steps run on a simulated clock and an in-memory network (`scale_simulation`); what sockets and TLS cost is measured with real connections on
loopback (`scale_real`); a rank joins among the prepared words of all others (`scale_joining`). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Mapping

import common
from gemini_ft.agent.lifecycle import raise_descriptor_limit
from gemini_ft.core.placement import describe, place
from gemini_ft.core.tree import FAN_IN
from scale_joining import joining
from scale_plot import Panel, draw
from scale_real import real
from scale_simulation import REPLICAS, changed, simulated

LINKS = {"10us": 10e-6, "100us": 100e-6}  # seconds that a frame takes
LOST = 1, 10, 100  # hosts at a time
AIMS = {
    "leader_ms_1000x8": 20,
    "leader_ms_10000x8": 100,
    "collector_ms_10000x8": 100,
    "commit_ms_1000x8": 100,
    "leader_change_s_1000x8": 2,
    "joining_s_1000x8": 2,
}
_MOST_CHANGED = 4000  # hosts of which another one leads: beyond that the simulation takes minutes
Figures = dict[str, float]


def placing(hosts: int) -> float:
    """Milliseconds in which rank 0 places the hosts, 32 to a rack, and describes what that survives."""
    names = [f"host-{i:05}" for i in range(hosts)]
    racks = {name: f"rack-{i // 32}" for i, name in enumerate(names)}
    begin = time.process_time()
    describe(place(names, REPLICAS, racks), racks)
    return 1e3 * (time.process_time() - begin)


class Sockets:
    """The cost of real connections beyond the simulation, found by three sizes, of which the second is predicted from the first.

    Args:
        small, large: hosts without collectors, each in a process of its own.
        collected: hosts with collectors, of which one process plays all but the leader.
        steps: of each.
    """

    def __init__(self, small: int, large: int, collected: int, steps: int) -> None:
        self.large = large
        fan_ins = {small: small, large: large, collected: FAN_IN}
        self.measured = {hosts: real(hosts, steps, fan_in, 1 if hosts == collected else hosts - 1) for hosts, fan_in in fan_ins.items()}
        self.beside = {hosts: simulated(hosts, steps, LINKS["10us"], fan_in) for hosts, fan_in in fan_ins.items()}
        # A message in and one out, through TLS and the kernel; then the bytes, as collectors' messages are long.
        self.per_way = (self.measured[small]["leader_ms"] - self.beside[small]["leader_ms"]) / (small - 1)
        of_bytes = (
            self.measured[collected]["leader_ms"]
            - self.beside[collected]["leader_ms"]
            - self.per_way * self.beside[collected]["leader_messages"]
        )
        self.per_byte = max(0.0, of_bytes / self.beside[collected]["leader_bytes"])
        self.predicted = self.beside[large]["leader_ms"] + self.per_way * (large - 1)

    def add(self, figures: Figures) -> None:
        """Adds the estimates with sockets; bytes count where they are many, at a leader with collectors."""
        for who in ("leader", "collector"):
            by_bytes = self.per_byte * figures["leader_bytes"] if who == "leader" and figures["collectors"] else 0.0
            figures[f"{who}_ms_with_sockets"] = figures[f"{who}_ms"] + self.per_way * figures[f"{who}_messages"] + by_bytes

    def table(self) -> str:
        header = ["hosts", "collectors", "leader, ms of processor per step", "of which simulated", "commit, ms"]
        rows = [
            [
                str(hosts),
                f"{self.beside[hosts]['collectors']:.0f}",
                f"{found['leader_ms']:.2f}",
                f"{self.beside[hosts]['leader_ms']:.2f}",
                f"{found['latency_ms']:.1f}",
            ]
            for hosts, found in self.measured.items()
        ]
        return (
            f"{common.table(header, rows)}\n\n"
            f"A message in and one out cost {1e3 * self.per_way:.0f} us in TLS, asyncio and the kernel beyond what is simulated, by the "
            f"smallest of these; with it the one of {self.large} hosts is predicted to take {self.predicted:.2f} ms. With "
            f"collectors there are {1e6 * self.per_byte:.1f} ms beyond that for each megabyte of their messages."
        )


STEPS = {
    "collectors": ("collectors", 0),
    "leader_ms": ("leader, ms of processor per step", 2),
    "leader_ms_with_sockets": ("with sockets (estimated)", 1),
    "collector_ms": ("busiest collector, ms", 2),
    "collector_ms_with_sockets": ("with sockets (estimated)", 1),
    "leader_messages": ("leader's messages in", 0),
    "leader_sent": ("out", 0),
    "leader_kb": ("kB", 0),
    "collector_messages": ("that collector's in", 0),
    "collector_sent": ("out", 0),
    "collector_kb": ("kB", 0),
    "host_messages": ("any other host's, in and out", 1),
    "host_kb": ("kB", 2),
    "latency_ms_10us": ("commit after the last copy, ms (10 us)", 2),
    "latency_ms_100us": ("(100 us)", 2),
    "joining_ms": ("connecting, ms", 1),
}
TROUBLE = {
    "leader_ms": ("all well: leader, ms", 1),
    "leader_ms_late": ("a host's copies late", 1),
    "leader_ms_left_out": ("a host's copies left out", 1),
    "leader_ms_skipped": ("no rank has a snapshot", 1),
    "collector_ms": ("all well: busiest collector, ms", 1),
    "collector_ms_late": ("copies late", 1),
    "collector_ms_left_out": ("left out", 1),
    "collector_ms_skipped": ("no snapshot", 1),
}
STARTS = {
    "rank_0_s": ("rank 0, s of processor", 2),
    "other_rank_s": ("any other rank", 2),
    "agent_s": ("the leader's agent", 2),
    "busiest_host_s": ("busiest host", 2),
    "exchanges": ("exchanges", 0),
    "heard_per_rank_mb": ("each rank hears, MB", 2),
    "session_mb": ("session, MB", 2),
    "placing_ms": ("placing in racks, ms", 1),
    "leader_mib": ("memory of the leader, MiB", 1),
    "collector_mib": ("of a collector", 1),
    "member_mib": ("of any other agent", 1),
}
CHANGES = {
    "seconds_killed": ("first leader killed: seconds to the next one's first decision, at the last host", 2),
    "leader_ms_killed": ("next leader, ms of processor", 1),
    "seconds_hung": ("first leader hangs: seconds", 2),
    "leader_ms_hung": ("next leader, ms", 1),
    "collector_seconds_killed": ("a collector killed: seconds until a decision has come from below it to all", 2),
    "collector_seconds_hung": ("hangs: seconds", 2),
}
LOSSES = {
    "survived": ("survived, if drawn by chance", 4),
    "busiest_host_s": ("busiest host, s of processor", 2),
    "heard_per_rank_mb": ("each rank hears, MB", 2),
    "copies_missing": ("copies to rebuild", 0),
    "sent_by_busiest_host": ("shards sent by the busiest host", 0),
}


def table(columns: Mapping[str, tuple[str, int]], first: str, found: Mapping[int, Figures]) -> str:
    rows = [
        [str(number), *(f"{figures[key]:.{digits}f}" if key in figures else "" for key, (_, digits) in columns.items())]
        for number, figures in found.items()
    ]
    return common.table([first, *(title for title, _ in columns.values())], rows)


def panels(steps: Mapping[int, Figures], starts: Mapping[int, Figures]) -> list[Panel]:
    def curve(key: str, found: Mapping[int, Figures] = steps) -> dict[int, float]:
        return {hosts: figures[key] for hosts, figures in found.items()}

    return [
        Panel(
            "processor time per step with sockets, ms",
            {"leader": curve("leader_ms_with_sockets"), "busiest collector": curve("collector_ms_with_sockets")},
            (10000, float(AIMS["leader_ms_10000x8"])),
        ),
        Panel(
            "commit after the last copy, ms",
            {"links of 10 us": curve("latency_ms_10us"), "links of 100 us": curve("latency_ms_100us")},
            (1000, float(AIMS["commit_ms_1000x8"])),
        ),
        Panel(
            "leader in a step with trouble, ms",
            {
                "all well": curve("leader_ms"),
                "copies late": curve("leader_ms_late"),
                "copies left out": curve("leader_ms_left_out"),
                "no rank has a snapshot": curve("leader_ms_skipped"),
            },
            (10000, float(AIMS["leader_ms_10000x8"])),
        ),
        Panel(
            "joining, s of processor",
            {"busiest host": curve("busiest_host_s", starts), "one rank": curve("other_rank_s", starts)},
            (1000, float(AIMS["joining_s_1000x8"])),
        ),
        Panel(
            "memory of agents, MiB",
            {"leader": curve("leader_mib", starts), "collector": curve("collector_mib", starts), "any other": curve("member_mib", starts)},
        ),
        Panel("bytes in and out per step, kB", {"leader": curve("leader_kb"), "busiest collector": curve("collector_kb")}),
    ]


def steps_of(hosts: int, steps: int) -> Figures:
    figures = simulated(hosts, steps, LINKS["10us"], FAN_IN, trouble=True)
    slower = simulated(hosts, steps, LINKS["100us"], FAN_IN)
    kilobytes = {f"{who}_kb": figures[f"{who}_bytes"] / 1e3 for who in ("leader", "collector", "host")}
    return figures | kilobytes | {"latency_ms_10us": figures["latency_ms"], "latency_ms_100us": slower["latency_ms"]}


def start_of(hosts: int) -> Figures:
    return joining(hosts) | {"placing_ms": placing(hosts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 to 1000 hosts, 16, 32 and 200 real ones; writes no report")
    parser.add_argument("--sizes", type=int, nargs="+", help="hosts (default: 16 to 10 000)")
    parser.add_argument(
        "--real", type=int, nargs=2, help="a smaller and a larger number of real hosts, without collectors (default: 32, 256)"
    )
    parser.add_argument("--real-collected", type=int, help="real hosts with collectors (default: 1000)")
    parser.add_argument("--steps", type=int, default=0, help="per size (default: 6; --quick: 3)")
    options = parser.parse_args()
    common.clean_up_on_sigterm()
    raise_descriptor_limit()
    logging.getLogger("gemini_ft").setLevel(logging.ERROR)  # ranks that join announce what they resume
    sizes = options.sizes or ([16, 128, 1000] if options.quick else [16, 64, 128, 512, 1000, 4000, 10000])
    count = options.steps or (3 if options.quick else 6)
    small, large = options.real or ((16, 32) if options.quick else (32, 256))
    steps = {hosts: steps_of(hosts, count) for hosts in sizes}
    changes = {hosts: changed(hosts, LINKS["100us"], FAN_IN) for hosts in sizes if hosts <= _MOST_CHANGED}
    starts = {hosts: start_of(hosts) for hosts in sizes}
    losing = min(1000, max(sizes))
    lost = {number: joining(losing, number) for number in LOST if 2 * number <= losing}
    sockets = Sockets(small, large, options.real_collected or (200 if options.quick else 1000), 3 * count)
    for figures in steps.values():
        sockets.add(figures)

    def of(found: Mapping[int, Figures], name: str, hosts: int) -> float | None:
        return round(found[hosts][name], 2) if hosts in found else None

    growth = steps[1000]["leader_ms"] / 1000 / (steps[128]["leader_ms"] / 128) if {128, 1000} <= steps.keys() else None
    ratios = {
        "leader_ms_1000x8": of(steps, "leader_ms_with_sockets", 1000),
        "leader_ms_10000x8": of(steps, "leader_ms_with_sockets", 10000),
        "collector_ms_10000x8": of(steps, "collector_ms_with_sockets", 10000),
        "leader_ms_left_out_10000x8": of(steps, "leader_ms_left_out", 10000),
        "commit_ms_1000x8": of(steps, "latency_ms_100us", 1000),
        "leader_change_s_1000x8": of(changes, "seconds_hung", 1000),
        "joining_s_1000x8": of(starts, "busiest_host_s", 1000),
        "growth_128_to_1000": round(growth, 2) if growth else None,
        "simulated_vs_real": common.ratio(sockets.predicted, sockets.measured[large]["leader_ms"]),
    }
    body = "\n\n".join(
        [
            table(STEPS, "hosts x 8", steps),
            "Steps with trouble, without sockets:",
            table(TROUBLE, "hosts x 8", steps),
            "Another leader, and another collector, at the default timeouts (simulated):",
            table(CHANGES, "hosts x 8", changes),
            "Joining, and what agents keep:",
            table(STARTS, "hosts x 8", starts),
            f"The start after some of {losing} hosts were replaced, of which a copy of every shard was left:",
            table(LOSSES, "lost at a time", lost),
            "Real connections on loopback, the leader in a process of its own:",
            sockets.table(),
            "Aims, where there is one:",
            common.table(
                ["ratio", "value", "at most"],
                [[name, "" if value is None else f"{value:.2f}", str(AIMS.get(name, ""))] for name, value in ratios.items()],
            ),
        ]
    )
    print(body)
    if not options.quick:
        path = common.write_report(
            "scale", "Steps, joining and losses at 16 to 10 000 hosts", body, common.versions(["msgpack", "pydantic"])
        )
        draw(panels(steps, starts), path.with_suffix(".svg"))
        path.write_text(f"{path.read_text()}\n![curves]({path.stem}.svg)\n")

    common.print_result(
        "scale",
        {
            "steps": steps,
            "changes": changes,
            "starts": starts,
            "lost": lost,
            "real": sockets.measured,
            "us_per_message_in_sockets": round(1e3 * sockets.per_way, 1),
        },
        ratios,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
