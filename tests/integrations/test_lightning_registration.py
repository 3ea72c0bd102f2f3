"""The names are known to Lightning whatever is imported first, options are checked at once, and both packages are served."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

import gemini_ft
import gemini_ft.pytorch_lightning
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.launch.script import cold_command
from gemini_ft.lightning import compat, registration
from gemini_ft.lightning.base import heeding_signals
from gemini_ft.lightning.deepspeed import EnginesOnCpu
from gemini_ft.lightning.options import refuse_platform, sort_options

STAGES = [f"gemini_deepspeed{suffix}" for suffix in ("", "_stage_1", "_stage_2", "_stage_2_offload", "_stage_3", "_stage_3_offload")]
NAMES = {"gemini", "gemini_fsdp", "gemini_fsdp2", "gemini_deepspeed_stage_3_offload_nvme", *STAGES}
REGISTRIES = {
    "lightning.pytorch": lightning.pytorch.strategies.StrategyRegistry,
    "pytorch_lightning": pytorch_lightning.strategies.StrategyRegistry,
    "lightning.fabric": lightning.fabric.strategies.STRATEGY_REGISTRY,
    "lightning_fabric": lightning_fabric.strategies.STRATEGY_REGISTRY,
}
TRAINERS = [(lightning.pytorch, gemini_ft.lightning), (pytorch_lightning, gemini_ft.pytorch_lightning)]
FABRICS = [(lightning.fabric, gemini_ft.lightning), (lightning_fabric, gemini_ft.pytorch_lightning)]

# What is imported, in order -> the registries that must have the names, and the packages that must not be loaded.
ORDERS = {
    "gemini-first": (
        "gemini_ft, lightning.pytorch, gemini_ft.lightning",
        ["lightning.pytorch", "lightning.fabric"],
        ["pytorch_lightning", "deepspeed"],
    ),
    "lightning-first": ("lightning.pytorch, gemini_ft", ["lightning.pytorch", "lightning.fabric"], ["pytorch_lightning"]),
    "old-name": ("gemini_ft, pytorch_lightning", ["pytorch_lightning", "lightning_fabric"], ["lightning"]),
    "fabric-only": ("gemini_ft, lightning_fabric", ["lightning_fabric"], ["lightning", "pytorch_lightning"]),
}

# In an interpreter that was forked from one with torch and this package.
UNLOAD = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "gemini_ft"]:
    del sys.modules[name]
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("gemini_ft")]
"""

# Each order in a process of its own, forked from one that has loaded what is the same to all of them, and has unloaded this package.
CHECK = """
import os, traceback
import torch, torch._dynamo, torchmetrics
for name, (imports, registered, not_loaded) in {orders}.items():
    if not os.fork():
        try:
            assert not {{"gemini_ft", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed"}} & set(sys.modules)
            exec("import " + imports)
            for package in registered:
                module = sys.modules[package + ".strategies"]
                registry = module.STRATEGY_REGISTRY if "fabric" in package else module.StrategyRegistry
                missing = {names} - set(registry.available_strategies())
                assert not missing, (package, missing)
            loaded = set(not_loaded) & set(sys.modules)
            assert not loaded, loaded
            print("fine:", name, flush=True)
        except BaseException:
            print("not fine:", name, traceback.format_exc(), flush=True)
        os._exit(0)
for _ in {orders}:
    os.wait()
"""


@pytest.fixture(scope="module")
def said_in_every_order() -> str:
    script = UNLOAD + CHECK.format(orders=ORDERS, names=NAMES)
    return subprocess.run([sys.executable, "-X", "warm", "-c", script], capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("order", ORDERS)
def test_names_are_registered_in_any_order_of_imports(order: str, said_in_every_order: str) -> None:
    assert f"fine: {order}\n" in said_in_every_order.replace("not fine", "wrong"), said_in_every_order


def test_installing_again_changes_nothing() -> None:
    finders = list(sys.meta_path)
    registration.install()
    assert sys.meta_path == finders


def test_the_finder_leaves_modules_as_it_found_them() -> None:
    spec = lightning.pytorch.strategies.__spec__
    assert spec is not None
    assert type(spec.loader).__module__.startswith("_frozen_importlib")
    assert lightning.pytorch.strategies.__loader__ is spec.loader


def test_where_srun_is_installed_lightnings_hint_reaches_users_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lightning.pytorch.Trainer(barebones=True, strategy="gemini", accelerator="cpu")
    with pytest.warns(UserWarning, match="`srun` command is available"):
        lightning.pytorch.Trainer(barebones=True, strategy="gemini", accelerator="cpu")


@pytest.mark.parametrize("requeues", [True, False])
def test_lightnings_own_requeueing_keeps_its_signal(requeues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    environment = SLURMEnvironment(auto_requeue=requeues)
    assert heeding_signals(load_config(), environment).drain_signal == ("none" if requeues else "SIGUSR1")
    assert heeding_signals(load_config({"drain_signal": "SIGTERM"}), environment).drain_signal == "SIGTERM"


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_the_trainer_knows_the_name(package: Any, ours: ModuleType) -> None:
    trainer = package.Trainer(strategy="gemini", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
    assert type(trainer.strategy) is ours.GeminiStrategy
    assert isinstance(trainer.strategy, package.strategies.DDPStrategy)


class Uneven(LightningEnvironment):
    """The last of three ranks, alone on its host, as Ray may place them."""

    creates_processes_externally = True

    def world_size(self) -> int:
        return 3

    def global_rank(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


@pytest.mark.parametrize("made_by", [lightning.pytorch.Trainer, lightning.fabric.Fabric])
def test_data_is_shared_out_by_the_number_of_ranks_where_hosts_have_different_numbers_of_them(made_by: Any) -> None:
    made = made_by(strategy="gemini", accelerator="cpu", devices=1, plugins=[Uneven()])
    assert made.strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 2}


@pytest.mark.parametrize(("environment", "devices", "ranks"), [(Uneven, 1, 3), (LightningEnvironment, 2, 4)])
def test_a_mesh_without_sizes_has_all_ranks(environment: type[LightningEnvironment], devices: int, ranks: int) -> None:
    """Lightning's own environment hears the number of ranks only when the group is made."""
    hosts = 1 if environment is Uneven else 2  # nobody says a number of hosts under Ray
    trainer = lightning.pytorch.Trainer(
        strategy="gemini_fsdp2", accelerator="cpu", devices=devices, num_nodes=hosts, plugins=[environment()]
    )
    compat.fill_mesh(trainer.strategy)
    assert (trainer.strategy._data_parallel_size, trainer.strategy._tensor_parallel_size) == (ranks, 1)


@pytest.mark.parametrize("name", ["GeminiModelParallelStrategy", "GeminiFabricModelParallelStrategy"])
def test_data_is_shared_out_as_the_mesh_of_sharded_parameters_says(name: str) -> None:
    """Ranks that hold parts of the same tensors in parallel get the same data."""
    options = {"parallelize_fn": lambda model, _: model} if "Fabric" in name else {}
    strategy = getattr(gemini_ft.lightning, name)(**options)
    strategy._device_mesh = {"data_parallel": Mock(size=lambda: 2, get_local_rank=lambda: 1)}
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_the_trainer_takes_a_strategy_with_options(package: Any, ours: ModuleType) -> None:
    strategy = ours.GeminiStrategy(replicas=3, storage="file:///somewhere", find_unused_parameters=True)
    trainer = package.Trainer(strategy=strategy, accelerator="cpu", devices=1, barebones=True)
    assert trainer.strategy is strategy
    assert (strategy.gemini_config.replicas, strategy.gemini_config.storage.url) == (3, "file:///somewhere")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


@pytest.mark.parametrize(("package", "ours"), FABRICS)
def test_fabric_knows_the_name(package: Any, ours: ModuleType) -> None:
    fabric = package.Fabric(strategy="gemini", accelerator="cpu", devices=1)
    assert type(fabric.strategy) is ours.GeminiFabricStrategy
    assert isinstance(fabric.strategy, package.strategies.DDPStrategy)


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_fsdp2(package: Any, ours: ModuleType) -> None:
    strategy = package.strategies.StrategyRegistry.get("gemini_fsdp2")
    assert type(strategy) is ours.GeminiModelParallelStrategy
    assert isinstance(strategy, package.strategies.ModelParallelStrategy)


@pytest.mark.parametrize("package", REGISTRIES)
def test_every_alias_of_lightning_has_ours(package: str) -> None:
    """Each name of DDP and FSDP, with "gemini" in the place of "ddp": the same options, or refused with the name to take."""
    registry = REGISTRIES[package]
    theirs = [name for name in registry.available_strategies() if name.startswith(("ddp", "fsdp"))]
    assert "ddp_find_unused_parameters_true" in theirs
    for name in theirs:
        ours = f"gemini_{name}" if name.startswith("fsdp") else name.replace("ddp", "gemini", 1)
        if name.startswith("fsdp"):
            with pytest.raises(ConfigError, match=f"{ours}'.*use strategy='gemini_fsdp2'"):
                registry.get(ours)
        elif any(how in name for how in ("spawn", "fork", "notebook")):
            with pytest.raises(ConfigError, match=r"cannot be started again after a failure; .*`gemini run`, and use strategy='gemini"):
                registry.get(ours)
        else:
            made, model = registry.get(ours), registry.get(name)
            assert isinstance(made, type(model))
            assert made._ddp_kwargs == model._ddp_kwargs


def test_lightnings_hint_names_ours() -> None:
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    strategy = gemini_ft.lightning.GeminiStrategy()
    strategy.on_exception(error)
    assert "`strategy='gemini_find_unused_parameters_true'`" in str(error)
    assert "`strategy=GeminiStrategy(find_unused_parameters=True)`" in str(error)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_deepspeed_has_the_stages_that_lightning_has(package: Any, ours: ModuleType, name: str) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    strategy, theirs = (package.strategies.StrategyRegistry.get(of) for of in (name, name.removeprefix("gemini_")))
    assert type(strategy) is ours.GeminiDeepSpeedStrategy
    assert isinstance(strategy, package.strategies.DeepSpeedStrategy)
    assert strategy.config == theirs.config


def test_options_in_a_deepspeed_configuration(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gemini": {"replicas": 3, "interval": 5, "timeout": 7}}))
    strategy = gemini_ft.lightning.GeminiDeepSpeedStrategy(config=path, interval=2)
    assert (strategy.gemini_config.replicas, strategy.gemini_config.interval, strategy.gemini_config.timeout) == (3, 2, 7)
    assert strategy.config == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("section", "message"),
    [({"replcas": 2}, "unknown option 'replcas' .did you mean 'replicas'.. in the section"), ({"stage": 1}, "'stage'"), (2, "a mapping")],
)
def test_a_wrong_section_in_a_deepspeed_configuration(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemini_ft.lightning.GeminiDeepSpeedStrategy(config={"gemini": section})


def test_deepspeed_must_use_the_devices_that_the_trainer_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed").accelerator
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    strategy = gemini_ft.lightning.GeminiDeepSpeedStrategy(accelerator="cpu", parallel_devices=[torch.device("cpu")])
    with pytest.raises(ConfigError, match=r"uses cpu and DeepSpeed cuda; .*DS_ACCELERATOR=cpu, or use Trainer\(accelerator='gpu'\)"):
        EnginesOnCpu.setup_environment(strategy)


@pytest.mark.parametrize("package", [lightning.fabric, lightning_fabric])
def test_deepspeed_under_fabric_is_refused(package: Any) -> None:
    with pytest.raises(ConfigError, match=r"gemini_deepspeed_stage_2.*gemini_ft\.deepspeed\.initialize"):
        package.Fabric(strategy="gemini_deepspeed_stage_2", accelerator="cpu", devices=1)


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_state_on_disk_is_refused(package: Any) -> None:
    with pytest.raises(ConfigError, match="use strategy='gemini_deepspeed_stage_3_offload'"):
        package.strategies.StrategyRegistry.get("gemini_deepspeed_stage_3_offload_nvme")


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning, lightning.fabric, lightning_fabric])
def test_fsdp1_is_refused(package: Any) -> None:
    fabric = "fabric" in package.__name__
    registry = package.strategies.STRATEGY_REGISTRY if fabric else package.strategies.StrategyRegistry
    with pytest.raises(ConfigError, match="gemini_fsdp2"):
        registry.get("gemini_fsdp")


def test_fabric_needs_to_be_told_how_to_shard() -> None:
    with pytest.raises(ConfigError, match="GeminiFabricModelParallelStrategy"):
        lightning.fabric.Fabric(strategy="gemini_fsdp2", accelerator="cpu", devices=1)
    strategy = gemini_ft.lightning.GeminiFabricModelParallelStrategy(parallelize_fn=lambda model, mesh: model, replicas=1)
    assert strategy.gemini_config.replicas == 1


@pytest.mark.parametrize("name", gemini_ft.lightning.__all__)
@pytest.mark.parametrize("module", [gemini_ft.lightning, gemini_ft.pytorch_lightning])
def test_an_unknown_option_is_refused_at_once(module: ModuleType, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: unknown option 'replcas' \(did you mean 'replicas'\?\)"):
        getattr(module, name)(replcas=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameter": True}, "did you mean 'find_unused_parameters'"),
        ({"module": None}, "unknown option 'module'"),
        ({"replicas": 0}, "replicas=0"),
        ({"storage": "/somewhere"}, "file:///"),
        ({"data_resume": "guess"}, "auto, skip, replay"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemini_ft.lightning.GeminiStrategy(**options)


def test_timeout_means_the_group_or_the_agent() -> None:
    base = lightning.pytorch.strategies.DDPStrategy
    assert sort_options("S", base, {"timeout": timedelta(seconds=5)}).base == {"timeout": timedelta(seconds=5)}
    assert sort_options("S", base, {"timeout": 5}).config.timeout == 5


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_REPLICAS", "4")
    monkeypatch.setenv("GEMINI_DATA_RESUME", "replay")
    options = sort_options("S", lightning.pytorch.strategies.DDPStrategy, {})
    assert (options.config.replicas, options.data_resume) == (4, "replay")


def test_options_are_in_the_signature() -> None:
    parameters = inspect.signature(gemini_ft.lightning.GeminiStrategy).parameters
    assert {"replicas", "storage", "data_resume", "find_unused_parameters", "timeout"} <= parameters.keys()
    assert parameters["replicas"].default == 2


@pytest.mark.parametrize("module", [gemini_ft.lightning, gemini_ft.pytorch_lightning])
def test_strategies_can_be_pickled_before_they_are_used(module: ModuleType) -> None:
    kinds = [module.GeminiStrategy, *([module.GeminiDeepSpeedStrategy] if importlib.util.find_spec("deepspeed") else [])]
    for kind in kinds:
        strategy = pickle.loads(pickle.dumps(kind(replicas=3)))
        assert type(strategy) is kind
        assert strategy.gemini_config.replicas == 3


def test_every_public_name_exists_in_both_modules() -> None:
    for module in (gemini_ft.lightning, gemini_ft.pytorch_lightning):
        assert all(getattr(module, name).__module__ == module.__name__ for name in module.__all__)
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018


def test_what_a_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.advance")
    with pytest.raises(ConfigError, match=r"lacks loops.training_epoch_loop._TrainingEpochLoop.advance"):
        compat.check_lightning("lightning.pytorch")


def test_platforms_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_platform(torch.device("cpu").type)
    with pytest.raises(ConfigError, match="MPS"):
        refuse_platform("mps")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        refuse_platform("cpu")


REMINDED = """
import os, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

print("gemini" in StrategyRegistry)
for asked in ("0", "1"):
    os.environ["GEMINI_REMIND"] = asked
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", limit_val_batches=0, **quiet)
    trainer.fit(BoringModel())
    print([type(callback).__name__ for callback in trainer.callbacks])
"""


def test_an_installed_package_reminds_if_asked_and_workers_need_no_import(tmp_path: Path) -> None:
    """As the framework finds it: by the entry points of a distribution on the path."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found = tmp_path / "gemini_ft_as_installed-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: gemini-ft-as-installed\nVersion: 0\n")
    points = project["entry-points"].items()
    lines = [line for group, named in points for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))]
    (found / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "script.py").write_text(REMINDED)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "plain.py").write_text(f"{UNLOAD}import script")
    warm = (sys.executable, "-X", "warm")
    started = [
        subprocess.Popen([*warm, *line], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in (["plain.py"], cold_command([sys.executable, "-u", "script.py"])[2:])
    ]
    for process, is_known in zip(started, ("False", "True"), strict=True):
        out, err = process.communicate(timeout=200)
        known, *callbacks = out.splitlines()
        reminders = [names.count("Reminder") for names in callbacks]  # the environment's own installation may have one beside this
        assert (known, reminders[0], reminders[1] in (1, 2)) == (is_known, 0, True), err
        assert err.count("this Trainer is not protected: its strategy is SingleDeviceStrategy") == reminders[1]


def test_a_command_line_is_none_the_worse_where_the_strategies_cannot_be_had() -> None:
    """As on another platform: a script that asks for none of them goes on."""
    script = "import sys; sys.modules['gemini_ft.lightning.naming'] = None; import gemini_ft, lightning.pytorch.cli"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_an_argument_without_a_name_is_refused_in_the_name_of_the_strategy() -> None:
    with pytest.raises(TypeError, match=r"^GeminiStrategy.__init__\(\) takes 1 positional argument"):
        gemini_ft.lightning.GeminiStrategy(["cuda:0"])


COMMAND_LINE = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

cli = LightningCLI(BoringModel, save_config_callback=None)
print(f"trained {cli.trainer.global_step} by {type(cli.trainer.strategy).__name__}")
config = cli.trainer.strategy.gemini_config
print(f"options: {config.replicas}, {config.on_late}, {config.traffic.lanes}, {config.storage and config.storage.url}")
print("weights:", *(value.hex() for value in cli.model.layer.bias.tolist()))
"""


def test_the_command_line_of_lightning_takes_the_name_and_the_class_and_lists_it(tmp_path: Path) -> None:
    """Without a word of ours in the script, under `gemini run`; its help elsewhere too where the package is imported. Options that are not
    given are those of the environment. The second fit is killed, and ends with the weights of the first."""
    pytest.importorskip("jsonargparse", reason="needs jsonargparse: pip install 'jsonargparse[signatures]'")
    (tmp_path / "cli.py").write_text(COMMAND_LINE)
    (tmp_path / "imported.py").write_text(COMMAND_LINE.replace("\n\n", "\nimport gemini_ft\n", 1))
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    fit = ["cli.py", "fit", "--seed_everything=1", "--trainer.max_steps=6", "--trainer.accelerator=cpu", *quiet]
    run = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--nproc-per-node", "1"]
    env = os.environ | {"PYTHONWARNINGS": "ignore", "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_ON_LATE": "wait"}
    by_class = ["--trainer.strategy=GeminiStrategy", "--trainer.strategy.replicas=3", "--trainer.strategy.traffic={lanes: 2}"]
    by_class += [f"--trainer.strategy.storage={tmp_path.as_uri()}"]
    listed = ["gemini_ft.lightning.GeminiStrategy", "gemini_ft.lightning.GeminiModelParallelStrategy"]
    said = {
        (*run, *fit, "--trainer.strategy=gemini"): ["trained 6 by GeminiStrategy", "options: 2, wait, None, None"],
        (*run, *fit, *by_class): ["trained 6 by GeminiStrategy", f"options: 3, wait, 2, {tmp_path.as_uri()}"],
        (*run, "cli.py", "fit", "--help"): listed,
        (sys.executable, "imported.py", "fit", "--help"): listed,
    }
    started = [
        subprocess.Popen(
            line,
            env=env | {"GEMINI_RUN_ID": f"{tmp_path.name}-{number}", "GEMINI_FAULTS": "step=4:rank=0:sigkill" if number == 1 else ""},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, line in enumerate(said)
    ]
    ends = list[str]()
    for process, expected in zip(started, said.values(), strict=True):
        out, err = process.communicate(timeout=200)
        assert [text for text in expected if text not in out] == [], err
        ends += re.findall("weights: .*", out)
        assert ("resuming at iteration" in err + out) == (process is started[1]), err
    assert len(ends) == 2
    assert ends[0] == ends[1]
