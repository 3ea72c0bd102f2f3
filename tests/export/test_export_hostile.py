"""`gemini export` of checkpoints that an attacker has written: a clear error, no memory for bytes that are not there, no file elsewhere."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forging import places, put_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini_ft.cli import main as cli
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.state import codec
from gemini_ft.storage.checkpoints import Manifest, checkpoint_folder, shard_key, write_manifest
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.shard import write_shard

VERSION = Version(Incarnation(1, "nonce"), 7)
NAMING = {"model": {"out of order": [], "absent": [], "keys": {"tied": "model.weight"}}}
OPTIMIZER = {
    "name": "optim0", "parameters": "optim0.model.weight", "parameters per group": [1], "groups": [{"lr": 0.1}],
    "state": {"optim0.model.weight": {"step": 1}}, "shared": {}, "other": {},
}  # fmt: skip
PLAIN = {"tensors": {"naming": NAMING, "modules": {"model": {}}, "optimizers": [OPTIMIZER]}, "extras": {"checkpoint": {"epoch": 1}}}
ABOUT = {
    "version": "0.19", "config": {}, "stage": 1, "bf16": False, "params": {"weight": ((8,), "float32", True)},
    "masters": {"master.0": ["weight"]}, "groups": [["weight"]], "keys": {"weight": "weight"}, "between": None, "clip_grad": 0.0,
    "dynamic_loss_scale": False,
}  # fmt: skip
CUT = ({"master.0": (8,)}, [("master.0", 0, "weight", 0, 8)])
ENGINE = {
    "about": ABOUT, "cut": CUT, "optimizer": "DeepSpeedZeroOptimizer", "base optimizer": "Adam", "groups": [{"lr": 0.1}], "scalers": {},
    "counters": {"global_steps": 7, "global_samples": 7, "skipped_steps": 0, "micro_steps": 7}, "values": {"master.0": {"step": 1}},
}  # fmt: skip
nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
strange = nested | st.sampled_from(
    [
        2**40,
        2**62,
        10**30,
        -1,
        0,
        1.5,
        None,
        True,
        "",
        "../../outside",
        "/../../outside",
        "manual_seed",
        "float64",
        (2**40,),
        (2**62, 2**62),
        (),
        [],
    ]
)


def store(folder: Path, extras: Any, engine: bool, shape: tuple[int, ...] = (8,)) -> str:
    """A checkpoint of one rank with these extras, every checksum of which is right; returns its URL."""
    storage, stream = LocalStorage(folder), "deepspeed-0" if engine else "main"
    layout = build_layout([TensorSpec(name="master.0" if engine else "model.weight", dtype="float32", shape=shape, group=(0,))], 0, 1)
    at = checkpoint_folder("run", stream, VERSION)
    record = write_shard(storage, shard_key(at, 0), layout, memoryview(bytes(layout.nbytes)), codec.encode(extras))
    manifest = Manifest(
        run="run", stream=stream, incarnation=VERSION.incarnation, iteration=7, world_size=1, logical_hash=layout.logical_hash,
        shards={0: record},
    )  # fmt: skip
    write_manifest(storage, manifest)
    return folder.as_uri()


def engine_extras(found: dict[str, Any]) -> dict[str, Any]:
    """As an engine's ranks give them: the facts for exports are encoded by themselves."""
    return {"tensors": {**found, **{name: codec.encode(found[name]) for name in ("about", "cut") if name in found}}}


def export(url: str, to: Path, form: str) -> int:
    return cli.main(["export", "7", "--from", url, "--to", str(to), "--format", form])


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than 2 GiB beyond what this process has mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("engine", "form"), [(False, "dcp"), (True, "safetensors")])
def test_what_is_forged_here_is_exported_when_nothing_is_changed(tmp_path: Path, engine: bool, form: str) -> None:
    url = store(tmp_path / "store", engine_extras(ENGINE) if engine else PLAIN, engine)
    assert export(url, tmp_path / "out", form) == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_small_state_with_anything_anywhere_is_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, little_memory: None, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    engine = data.draw(st.booleans())
    body = ENGINE if engine else PLAIN
    at = data.draw(st.sampled_from([place for place in places(body) if place]))
    found = put_at(body, at, data.draw(strange))
    url = store(folder / "store", engine_extras(found) if engine and isinstance(found, dict) else found, engine)
    form = data.draw(st.sampled_from(["safetensors", "dcp", *(["deepspeed"] if engine else ["lightning"])]))
    (folder / "in").mkdir()
    assert export(url, folder / "in" / "out", form) in (0, 1, 2, 70)  # any other exception fails the test; some changes are harmless
    assert {*os.listdir(folder)} <= {"store", "in"}
    assert {*os.listdir(folder / "in")} <= {"out"}


def test_a_shape_that_nothing_covers_takes_no_memory_and_no_disk(
    tmp_path: Path, little_memory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {**ABOUT, "params": {"weight": ((2**38,), "float32", True)}}
    url = store(tmp_path / "store", engine_extras({**ENGINE, "about": about}), engine=True)
    assert export(url, tmp_path / "out", "safetensors") != 0
    assert "no elements 8 to 274877906944 of weight" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [[2**40], [1] + [0] * 300_000], ids=["parameters", "groups"])
@pytest.mark.parametrize("form", ["dcp", "lightning"])
def test_more_parameters_or_groups_than_an_optimizer_has_take_no_memory_and_no_time(
    tmp_path: Path, little_memory: None, capsys: pytest.CaptureFixture[str], form: str, sizes: list[int]
) -> None:
    forged = {**OPTIMIZER, "parameters per group": sizes, "groups": [{"lr": 0.1}] * len(sizes)}
    checkpoint = {**PLAIN["extras"]["checkpoint"], "loops": {}}
    extras = {"tensors": {**PLAIN["tensors"], "optimizers": [forged]}, "extras": {**PLAIN["extras"], "checkpoint": checkpoint}}
    assert export(store(tmp_path / "store", extras, engine=False), tmp_path / "out", form) != 0
    assert "do not hold its 1 parameters" in capsys.readouterr().err


@pytest.mark.parametrize("engine", [False, True])
def test_names_of_one_tensor_without_number_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: bool) -> None:
    """A folder of torch.distributed.checkpoint has the tensor under each of them."""
    if engine:
        names = {f"tied{number}": "weight" for number in range(20_000)}
        extras = engine_extras({**ENGINE, "about": {**ABOUT, "keys": names}})
    else:
        naming = {"model": {**NAMING["model"], "keys": {f"tied{number}": "model.weight" for number in range(20_000)}}}
        extras = {"tensors": {**PLAIN["tensors"], "naming": naming}, "extras": PLAIN["extras"]}
    assert export(store(tmp_path / "store", extras, engine), tmp_path / "out", "dcp") != 0
    assert "further names of tensors, more than the 16,384 of any model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_that_were_trained_alone_have_no_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"gradients": {"names": ["gradients.outer.steps"], "values": {"gradients.outer.steps": 3}}}
    assert export(store(tmp_path / "store", engine_extras({**ENGINE, **alone}), engine=True), tmp_path / "out", "dcp") != 0
    assert "the engine's ranks were trained alone" in capsys.readouterr().err


def test_a_step_that_is_a_path_writes_nothing_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    (tmp_path / "in").mkdir()
    counters = {**ENGINE["counters"], "global_steps": "/../../../escaped"}
    url = store(tmp_path / "store", engine_extras({**ENGINE, "counters": counters}), engine=True)
    assert export(url, tmp_path / "in" / "out", "deepspeed") != 0
    assert {*os.listdir(tmp_path)} == {"store", "in"}
