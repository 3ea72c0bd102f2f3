"""A kit for your own tests and drills: several hosts on one machine, and states compared to the last bit.

with EmulatedHosts(4, ["train.py", "--steps", "100"], folder) as hosts:
    hosts.wait_for(lambda: any(event["iteration"] >= 20 for event in hosts.events("step")))
    hosts.kill("host2")
    hosts.add()
    hosts.finish()
assert_identical(torch.load(folder / "final.pt"), torch.load("undisturbed/final.pt"))

`Network` puts the hosts behind links that can be slowed down and cut; `S3Proxy` stands in front of their storage and fails on command.
"""

from __future__ import annotations

from gemini_ft.public_names import show_names as _show_names

_show_names(__name__)
