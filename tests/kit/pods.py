"""The life of a Job's pods, played by processes from the job's own manifest: commands, environment, volumes, probes, policies, names.

A pod is a host of a `Network`; a container is a process, and all that it starts, with the pod's hostname, host table and volumes in a mount
namespace of its own. Not played are images, users, limits and devices; all containers see each other's processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gemini_ft.testing import Network

_POLL = 0.05  # seconds
_END_SECONDS = 20.0  # for processes that were sent SIGKILL
_MARK = "PLAYED_CONTAINER"
# Mounts the volumes over /mnt, which is empty in a namespace of its own, and becomes the container's command.
_ENTER = """
set -e
hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs tmpfs /mnt; shift 2
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


class Container:
    """One container of a pod: its command may be started again and again."""

    def __init__(self, pod: Pod, spec: Mapping[str, Any]) -> None:
        self.pod, self.spec, self.name = pod, spec, str(spec["name"])
        self.mark = f"{_MARK}={secrets.token_hex(8)}"
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = -1

    @property
    def is_sidecar(self) -> bool:
        return self.spec.get("restartPolicy") == "Always"

    def start(self) -> bool:
        """Starts it, and waits for its startup probe; whether that has succeeded before the container has ended."""
        self.restarts += 1
        self.kill()
        self.process = self._run([*self.spec["command"], *self.spec.get("args", [])])
        if (probe := self.spec.get("startupProbe")) is None:
            return True
        for _ in range(probe["failureThreshold"]):
            if self.probe("startupProbe"):
                return True
            if self.status() is not None:
                return False
            time.sleep(probe["periodSeconds"])
        raise AssertionError(f"{self.pod.name}: {self.name} did not start")

    def probe(self, kind: str) -> bool:
        """Whether one of its probes succeeds."""
        return self._run(self.spec[kind]["exec"]["command"]).wait(60) == 0

    def status(self) -> int | None:
        """Its exit code, 128 + n for signal n; None while it runs."""
        code = self.process.poll() if self.process is not None else None
        return 128 - code if code is not None and code < 0 else code

    def kill(self) -> None:
        """Kills all of its processes at once, as the kernel does when a container has used up its memory."""
        until = time.monotonic() + _END_SECONDS
        while (pids := _marked(self.mark)) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        if self.process is not None:
            self.process.wait(_END_SECONDS)

    def environment(self) -> dict[str, str]:
        """Its variables, with references to earlier ones and to fields of the pod resolved."""
        found: dict[str, str] = {}
        for entry in self.spec.get("env", []):
            path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[entry["name"]] = self.pod.field(path) if path else expanded(entry["value"], found)
        return found

    def _run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment, (name, value) = self.environment(), self.mark.split("=")
        mounts = [part for mount in self.spec.get("volumeMounts", []) for part in (self.pod.volumes[mount["name"]], mount["mountPath"])]
        words = ["--", *(expanded(word, environment) for word in command)]
        job = self.pod.job
        with open(job.folder / f"{self.pod.name}.log", "ab") as log:
            return job.network.run(
                self.pod.host,
                ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh", self.pod.name, str(job.hosts_file), *mounts, *words],
                env={**job.image, **environment, name: value},
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Pod:
    """One pod of a job, with the volumes that live as long as it does."""

    def __init__(self, job: Job, index: int, attempt: int) -> None:
        self.job, self.index = job, index
        self.name, self.host = f"{job.prefix}-{index}", f"pod{index}.{attempt}"
        self.labels = {
            "jobset.sigs.k8s.io/jobset-name": job.name,
            "batch.kubernetes.io/job-completion-index": str(index),
            "topology.kubernetes.io/zone": f"zone-{index % 2}",
        }
        self.spec = job.template["spec"]
        self.volumes = {volume["name"]: str(self._volume(volume)) for volume in self.spec["volumes"]}
        self.setup = [Container(self, spec) for spec in self.spec["initContainers"]]
        self.main = [Container(self, spec) for spec in self.spec["containers"]]
        self.is_deleted = False
        job.network.add(self.host)
        job.name_hosts(self)

    def start(self) -> None:
        """Starts all containers in their order; plain init containers have to end well before the next one begins."""
        for container in (*self.setup, *self.main):
            assert container.start(), f"{self.name}: {container.name} has ended at once"
            if container in self.setup and not container.is_sidecar:
                assert container.process is not None
                assert container.process.wait(60) == 0, container.name

    def restart_all(self) -> None:
        """All containers are killed and started again; the pod, and its volumes, stay."""
        self.job.network.kill(self.host)
        for container in (*self.setup, *self.main):
            container.kill()
        self.start()

    def delete(self) -> None:
        """Begins the pod's deletion: the main containers get SIGTERM, and only later the sidecars."""
        self.is_deleted = True
        for container in self.main:
            assert container.process is not None
            container.process.terminate()

    def lose(self) -> None:
        """The pod's node loses its power: packets vanish, and nobody says goodbye."""
        self.is_deleted = True
        self.job.network.cut(self.host)
        self.job.network.kill(self.host)
        for container in (*self.setup, *self.main):
            container.kill()

    def look(self) -> int | None:
        """Restarts containers as their policies say; returns the pod's exit code once it has ended."""
        for container in self.setup:
            if container.is_sidecar and container.status() is not None and not self.is_deleted:
                container.start()  # one that ends at once is started again at the next look, as the agent is at the end of the job
        codes = {container: container.status() for container in self.main}
        for container, code in codes.items():
            if code is not None and not self.is_deleted and _restarts(container.spec, code):
                container.start()
                codes[container] = None
        if None in codes.values():
            return None
        for container in self.setup:
            if container.process is not None:
                container.process.terminate()
        self.job.network.kill(self.host)
        for container in (*self.setup, *self.main):
            container.kill()
        return max(code or 0 for code in codes.values())

    def field(self, path: str) -> str:
        """The value of a field, as the downward API gives it."""
        if found := re.fullmatch(r"metadata\.labels\['(.*)'\]", path):
            return self.labels[found[1]]
        assert path == "metadata.name", path
        return self.name

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        folder = self.job.memory / self.host / str(volume["name"])
        folder.mkdir(parents=True)
        if "secret" in volume:
            mode = volume["secret"]["defaultMode"]
            for key, value in self.job.secrets[volume["secret"]["secretName"]].items():
                (folder / key).write_text(value)
                (folder / key).chmod(mode | 0o040)  # as it looks with an fsGroup
        else:
            assert volume["emptyDir"]["medium"] == "Memory"
            folder.chmod(0o2777)  # as kubelet makes it with an fsGroup
        return folder


class Job:
    """A Job of a JobSet: makes pods, and new ones in the place of lost ones, by its policies. A context manager.

    Args:
        name: of the JobSet.
        replicated: one of its replicatedJobs.
        folder: the working directory of the image, and the place for logs.
        image: environment that the image has.
        secrets: of the namespace, by name.
        values: variables of containers that are given other values.
        pods: in place of the manifest's number.
        network: for its pods.
    """

    def __init__(
        self,
        name: str,
        replicated: Mapping[str, Any],
        folder: Path,
        *,
        image: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
        values: Mapping[str, str],
        pods: int,
        network: Network,
    ) -> None:
        self.name, self.prefix = name, f"{name}-{replicated['name']}-0"
        self.spec, self.template = replicated["template"]["spec"], replicated["template"]["spec"]["template"]
        self.folder, self.image, self.secrets, self.network = folder, image, secrets, network
        for container in (*self.template["spec"]["initContainers"], *self.template["spec"]["containers"]):
            for entry in container.get("env", []):
                entry.update({"value": values[entry["name"]]} if entry["name"] in values else {})
        self.memory = Path("/dev/shm", f"pods-{_token()}")
        self.memory.mkdir(mode=0o755)
        self.hosts_file = folder / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        self._addresses: dict[str, str] = {}
        self.codes: list[tuple[int, int]] = []  # (index, exit code) of pods that have ended
        self.wanted = int(values["HOSTS"])  # pods that have to succeed
        self.pods = {index: Pod(self, index, 0) for index in range(pods)}

    def __enter__(self) -> Job:
        for pod in self.pods.values():
            pod.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pod in self.pods.values():
            self.network.kill(pod.host)
            for container in (*pod.setup, *pod.main):
                container.kill()
        shutil.rmtree(self.memory)

    def name_hosts(self, pod: Pod) -> None:
        """Publishes a pod's address under its name, as the headless service does; containers read the file in place."""
        self._addresses[pod.name] = self.network.address(pod.host)
        lines = [f"{address} {name}.{self.name} {name}\n" for name, address in self._addresses.items()]
        self.hosts_file.write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def look(self) -> None:
        """Does what kubelets and the Job's controller do when they look at pods.

        Raises:
            AssertionError: the policy fails the job.
        """
        for index, pod in list(self.pods.items()):
            if (code := pod.look()) is None:
                continue
            del self.pods[index]
            self.codes.append((index, code))
            if code == 0:
                continue
            action = self.action_for(code)
            assert action != "FailJob", f"pod {index} has ended with {code}{self.tails()}"
            self.pods[index] = Pod(self, index, len(self.codes))
            self.pods[index].start()

    def action_for(self, code: int) -> str:
        """The action of the podFailurePolicy for an exit code."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {"operator": "In", "values": []})
            if (code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"

    @property
    def is_over(self) -> bool:
        """Whether enough pods have succeeded."""
        return sum(code == 0 for _, code in self.codes) >= self.wanted

    def wait_for(self, reached: Callable[[], bool], seconds: float = 120.0) -> None:
        """Plays on until ``reached`` is true."""
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, f"the awaited event did not happen within {seconds:g} s{self.tails()}"
            self.look()
            time.sleep(_POLL)

    def tails(self) -> str:
        return "".join(f"\n--- {log.stem}:\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self.folder.glob("*.log")))


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """A text with $(NAME) replaced, as kubelet does it: names that are not known stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _restarts(spec: Mapping[str, Any], code: int) -> bool:
    for rule in spec.get("restartPolicyRules", []):
        if (code in rule["exitCodes"]["values"]) == (rule["exitCodes"]["operator"] == "In"):
            return bool(rule["action"] == "Restart")
    return bool(spec["restartPolicy"] == "Always")


def _token() -> str:
    return secrets.token_hex(6)


def _marked(mark: str) -> list[int]:
    """Processes that have a mark in their environment; a forked one has that of its server, which is in the same container."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
