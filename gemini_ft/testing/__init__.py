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

from gemini_ft.testing.hosts import DrillError as DrillError
from gemini_ft.testing.hosts import EmulatedHosts as EmulatedHosts
from gemini_ft.testing.hosts import assert_identical as assert_identical
from gemini_ft.testing.hosts import digest as digest
from gemini_ft.testing.hosts import first_difference as first_difference
from gemini_ft.testing.network import Network as Network
from gemini_ft.testing.network import NetworkError as NetworkError
from gemini_ft.testing.s3_proxy import S3Fault as S3Fault
from gemini_ft.testing.s3_proxy import S3Proxy as S3Proxy
from gemini_ft.testing.s3_proxy import S3Request as S3Request
