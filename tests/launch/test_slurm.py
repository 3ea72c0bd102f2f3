"""The settings that follow from SLURM's variables, as `srun` of SLURM 22.05 has set them; real jobs are in tests/jobs/test_job_slurm.py."""

from __future__ import annotations

import pytest

from gemini_ft.hosts import host_id
from gemini_ft.launch import launcher, slurm

STEP = {
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_TOPOLOGY_ADDR": "top.rack7.n2",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    "SLURM_STEP_RESV_PORTS": "12000-12003",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n3", "n3"), ("n3,n4", "n3"), ("n[03-16,20],m1", "n03"), ("n[7]", "n7"), ("a[1,3]-ib,c", "a1-ib"), ("r[1-2]n[3-4]", "r1n3")],
)
def test_the_first_of_a_node_list_is_found(nodes: str, first: str) -> None:
    assert slurm.first_node(nodes) == first


def test_domain_and_ports_come_from_topology_and_reservation_unless_the_user_says_otherwise() -> None:
    assert slurm.settings(STEP) == {"GEMINI_DOMAIN": "rack7", "GEMINI_PORT_RANGE": "12000-12003"}
    assert slurm.settings(STEP | {"GEMINI_DOMAIN": "mine"}) == {"GEMINI_PORT_RANGE": "12000-12003"}
    assert slurm.settings({"SLURM_TOPOLOGY_ADDR": "n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == {}
    assert slurm.settings({}) == {}


def test_hosts_of_a_step_meet_on_its_first_node_and_steps_that_share_nodes_do_not() -> None:
    found = slurm.rendezvous(STEP, lambda name: True)
    assert found == slurm.Rendezvous(hosts=3, endpoint=f"n1:{20000 + 77 * 16 + 1}", name="77.1", is_host=False)
    other = slurm.rendezvous(STEP | {"SLURM_STEP_ID": "2", "SLURM_NODEID": "0"}, lambda name: False)
    assert other == slurm.Rendezvous(hosts=3, endpoint=f"10.0.0.1:{20000 + 77 * 16 + 2}", name="77.2", is_host=True)


@pytest.mark.parametrize("change", [{"SLURM_STEP_NUM_NODES": "1"}, {"SLURM_STEP_NUM_TASKS": "6"}, {"SLURM_PROCID": None}])
def test_single_nodes_tasks_that_are_workers_and_batch_scripts_meet_nowhere(change: dict[str, str | None]) -> None:
    environ = {name: value for name, value in (STEP | change).items() if value is not None}
    assert slurm.rendezvous(environ, lambda name: True) is None


def test_gemini_run_takes_the_rendezvous_unless_the_user_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_HOST_ID", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert host_id() == "n2"
    place = slurm.rendezvous(STEP, lambda name: True)
    for given, hosts in (([], "3"), (["--nnodes=2"], "2")):
        options = launcher.make_parser().parse_args([*given, "train.py"])
        launcher.meet(options, place)
        assert (options.nnodes, options.rdzv_endpoint, options.rdzv_conf) == (hosts, "n1:21233", "is_host=0,store_timeout=10")
    for given in (["--nnodes=1"], ["--standalone"], ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=there:1"]):
        options = launcher.make_parser().parse_args([*given, "train.py"])
        before = vars(options).copy()
        launcher.meet(options, place)
        assert vars(options) == before
