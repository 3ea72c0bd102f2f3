"""Options of the fault-tolerance core: one field, one sentence, one unit.

Precedence: keyword argument, then ``GEMINI_*`` environment variable, then the file named by
``GEMINI_CONFIG`` (JSON, or YAML where PyYAML is installed), then the default.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gemini_ft.errors import ConfigError

LEADER_TIMEOUT = 1.25  # seconds
_MOST_PROCESSORS = 2**16
_MOST = 1e9  # of any number that is not whole; seconds beyond what the kernel's clocks count would end a wait with an error
_MOST_PORT = 65535
_LONGEST_NAME = 100  # of a host; with that of its run it makes the name of a file
_SHOWN = 400  # characters of a value, or of the words about it, in an error
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
_UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: object) -> object:
    """Turns ``"8GiB"`` or ``"500 MB"`` into bytes; anything else is passed through for pydantic to judge."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = text[len(text.rstrip("abcdefghijklmnopqrstuvwxyz")) :]
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {unit!r}; use B, KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    try:
        return int(float(digits) * _UNITS[unit])
    except OverflowError:
        raise ValueError("is more than there can be") from None


LARGEST_CHUNK = 2**30  # bytes
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def _number_or(word: str, things: str) -> BeforeValidator:
    """One message for whatever is wrong, not one for each kind of value that could have been meant."""

    def read(value: object) -> object:
        try:
            number = value if value == word else int(str(value))
        except ValueError:
            number = 0
        if isinstance(number, int) and number < 1:
            raise ValueError(f"must be {word}, or a number of {things}, at least 1")
        return number

    return BeforeValidator(read)


def _patterns(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _verify(value: object) -> object:
    """One message for whatever is wrong."""
    words = {"true": True, "1": True, "false": False, "0": False, "replay": "replay"}
    if (key := str(value).strip().lower()) not in words:
        raise ValueError("must be true, false or replay")
    return words[key]


def processors(value: object) -> tuple[int, ...] | None:
    """Turns ``"0-3,8"`` into numbers, as ``taskset -c`` does."""
    if value is None:
        return None
    numbers: set[int] = set()
    for part in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) and value else ("",):
        first, dash, last = str(part).strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or not int(first) <= int(last) <= _MOST_PROCESSORS:
            raise ValueError("must be numbers of processors and ranges of them, separated by commas, for example 0-3,8")
        numbers.update(range(int(first), int(last) + 1))
    return tuple(sorted(numbers))


def _endpoint(value: object) -> object:
    """Turns a port alone into one of loopback; ``host:port`` is passed through if it is one."""
    if value is None:
        return None
    host, _, port = (text if ":" in (text := str(value).strip()) else f"127.0.0.1:{text}").rpartition(":")
    if not host or (":" in host and host[0] + host[-1] != "[]") or not port.isascii() or not port.isdecimal() or int(port) > _MOST_PORT:
        raise ValueError(f"must be host:port, [address]:port for IPv6, or a port of 127.0.0.1, from 0 to {_MOST_PORT}")
    return f"{host}:{int(port)}"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _values(self) -> Self:
        for name, value in self:
            if isinstance(value, float) and value > _MOST:
                raise ValueError(f"{name}={value:g} must be at most {_MOST:g}")
            texts = value if isinstance(value, tuple) else (value,)
            if odd := [text for text in map(str, texts) if re.search("[\ud800-\udfff]", text)]:  # bytes of a name in another encoding
                raise ValueError(f"{name}={odd[0]!r} is no text in utf-8: give another name, or set the locale (LC_ALL) that it is written in")
        return self


class StorageConfig(_Model):
    """The slow tier: where whole checkpoints go, and how often."""

    url: str = Field(description="Where checkpoints go: file:///folder or s3://bucket/prefix.")
    every_steps: int | None = Field(None, gt=0, description="Upload every this many optimizer steps.")
    every_seconds: float | None = Field(None, gt=0, description="Upload at least this often, in seconds.")
    at_end: bool = Field(True, description="Whether the last committed step is uploaded when the job ends well, and not only what was due.")
    keep_last: Annotated[int | Literal["all"], _number_or("all", "checkpoints")] = Field(2, description="Newest checkpoints to keep; all: nothing is ever deleted there, the store's own rules do that.")
    keep_every: int | None = Field(None, gt=0, description="Also keep every checkpoint whose step divides by this.")
    required: bool = Field(True, description="Whether storage that cannot be written at the start is an error, unless memory is whole; false: a warning. In both cases nothing is begun while storage cannot tell what there is.")
    endpoint_url: str | None = Field(None, description="Endpoint of an S3-compatible store; default: boto3's own choice.")
    max_bandwidth: Bytes | None = Field(None, description="Bytes per second that one host's uploads to S3 may take.")
    patience: float = Field(300.0, ge=0, description="Seconds to wait for storage that cannot say what there is to resume, and at the end of the job for the last upload.")
    history: str | None = Field(None, description="Which history to resume where storage has several that do not descend from each other: the line that went through this incarnation (2-0a1b2c3d), as far as it has come. Other histories are left aside, and named.")
    trust_pickle: bool = Field(False, description="Whether pickled objects found in storage may be loaded.")

    @property
    def kept(self) -> int | None:
        """`keep_last` as a number; None: all are kept."""
        return self.keep_last if isinstance(self.keep_last, int) else None

    @model_validator(mode="after")
    def _relations(self) -> StorageConfig:
        if not self.url.startswith(("file:///", "s3://")):
            raise ValueError(f"storage.url={self.url!r} must start with file:/// or s3://")
        if self.every_steps is None and self.every_seconds is None:
            raise ValueError("storage needs every_steps or every_seconds, otherwise nothing is ever uploaded")
        return self


class TrafficConfig(_Model):
    """Options for the way replicas travel beside the training's own traffic."""

    transport: Literal["tcp", "rdma", "collective"] = Field("tcp", description="The way that replicas travel: agents send them (tcp), agents read them from each other's memory through network cards that can (rdma), or workers carry them through sub-buffers in a process group of their own (collective).")
    when: Literal["idle", "ready"] = Field("idle", description="Send while the training's network is idle, or as soon as a chunk is ready.")
    profile_steps: int = Field(20, ge=2, description="Steps of the same order of collectives that make a profile of them.")
    gamma: float = Field(0.8, gt=0, le=1, description="Part of each idle span that is used; the rest is for jitter.")
    buffer_bytes: Bytes = Field(128 * 2**20, description="Bytes reserved on the device for replicas under way (collective).")
    sub_buffers: int = Field(4, ge=1, description="Parts of the buffer: one is received into while others are copied out (collective; 1 = no overlap).")
    lanes: int | None = Field(None, ge=1, le=64, description="Connections to one peer, each with a thread at both ends, over which replicas travel (tcp); default: a quarter of the processors that the agent may use, eight at most.")
    max_rate: Bytes | None = Field(None, description="Bytes per second that the kernel lets out to one peer (tcp); default: no limit.")
    low_priority: bool = Field(False, description="Whether replicas are marked as lower effort (DSCP LE) for switches that know it (tcp).")

    @property
    def piece_bytes(self) -> int:
        """The most that travels at a time through one sub-buffer."""
        return self.buffer_bytes // self.sub_buffers

    @model_validator(mode="after")
    def _relations(self) -> TrafficConfig:
        if self.piece_bytes < 4096:
            raise ValueError(f"buffer_bytes={self.buffer_bytes} in sub_buffers={self.sub_buffers} parts: each needs 4096 bytes")
        return self


class MemoryConfig(_Model):
    """Options for the memory in which agents keep slots."""

    folder: Path | None = Field(None, description="Folder on a tmpfs for slots as files, which the next agent on this host finds even if everything was killed at once (containers); default: memory without a name, gone with the last process that has it. Set it as a variable, where agents start.")


DEFAULT_MEMORY = MemoryConfig.model_validate({})
DEFAULT_TRAFFIC = TrafficConfig.model_validate({})


class GeminiConfig(_Model):
    """All options of the fault-tolerance core."""

    replicas: int = Field(2, ge=1, description="Copies of every shard, the owner's own host included.")
    interval: Annotated[int | Literal["auto"], _number_or("auto", "steps")] = Field("auto", description="Take a snapshot every this many optimizer steps; auto: every step, or as often as the idle network can carry.")
    storage: StorageConfig | None = Field(None, description="The slow tier, for when every copy in memory is gone.")
    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=64, description="Name of the run (letters, digits and . _ -); default: a hash of uid, working directory and command.")
    resume: Literal["auto", "never", "require", "found"] = Field("auto", description="Whether to resume a snapshot; found: the newest that can be found, even if a newer one was reported as stored, or absent hosts may have it.")
    memory_limit: Bytes | None = Field(None, description="The most bytes that one host's agent may hold; default: 60 % of the memory available to it.")
    memory: MemoryConfig = Field(DEFAULT_MEMORY, description="Where the agents' memory is.")
    agent_cpus: Annotated[tuple[int, ...] | None, BeforeValidator(processors)] = Field(None, description="Processors that agents run on, as taskset takes them (0-3,8), for example away from those that train; default: those of whatever starts them. Set it as a variable, where agents start.")
    interface: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = Field((), description="Networks for replicas, interface names or CIDRs separated by commas; messages take the first that works, and lanes are spread over all; default: the route to the master.")
    port_range: tuple[int, int] | None = Field(None, description="First and last TCP port agents may listen on; default: any.")
    metrics: Annotated[str | None, BeforeValidator(_endpoint)] = Field(None, description="Address, host:port or a port of 127.0.0.1, at which the agent of this host serves its figures to Prometheus (/metrics), to whoever reaches it; port 0: any free one, which `gemini status` names. Needs `gemini-ft[metrics]`. Set it as a variable, where agents start.")
    log_time: bool = Field(False, description="Give the loggers of Lightning's and transformers' Trainers the ledger of the run's time, every 30 s, as gemini/training_seconds and so on, gemini/goodput and gemini/restarts.")
    page_token_file: Path | None = Field(None, description="File (mode 0600) with a token of at least 16 characters: the agent serves a web page about the job as well, at / of `metrics`, and shows figures to whoever has the token. Set it as a variable, where agents start.")
    domain: str | None = Field(None, description="Failure domain of this host, for example its rack.")
    secret_file: Path | None = Field(None, description="File (mode 0600) with the run secret.")
    encrypt: bool = Field(False, description="Encrypt replicas between hosts; without it they are sealed against changes and can be read on the wire.")
    on_late: Literal["skip", "wait"] | None = Field(None, description="What to do when the previous snapshot is still uncommitted at the next update; default: wait where interval is a number, else skip.")
    copy_when: Literal["auto", "background", "at_step"] = Field("auto", description="Copy the state beside the next forward pass (background), or at once when a step ends (at_step), for loops that write it in forward; auto: at_step from when such a write has been found.")
    verify: Annotated[Literal["replay"] | bool, BeforeValidator(_verify)] = Field(False, description="true: compare each copy with the live state just before the next update. replay: every compare_every steps do so, compute the last micro-batch and the update once more, and check the replicas in memory; a rank that gets other bits is named, and the job resumes what was committed before (docs/failure_model.md).")
    compare_every: int = Field(1000, ge=1, description="Compare what all ranks must hold alike (plain data parallelism) every this many steps, and before each upload; each time takes 0.1 to 0.2 s per GB of a thread of every worker, or of the GPU. With 1, no step is committed in which they differ.")
    ignore: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = Field((), description="Names in the census (`gemini run --explain`) that are not captured because the script sees to them; patterns as for files, separated by commas.")
    chunk_bytes: Bytes = Field(8 * 2**20, le=LARGEST_CHUNK, description="Bytes that travel to a peer at a time.")
    traffic: TrafficConfig = Field(DEFAULT_TRAFFIC, description="How replicas travel beside the training's own traffic.")
    timeout: float = Field(60.0, gt=0, description="Seconds to wait for an agent or a peer before an error names it.")
    replica_timeout: float = Field(30.0, gt=0, description="Seconds after which a holder that has not acknowledged is left out of the commit.")
    agent_timeout: float = Field(10.0, ge=0, description="Seconds without an answer, or without a commit while it owes its workers answers, until a host's agent is killed and started anew with its memory; 0 = never.")
    leader_timeout: float = Field(LEADER_TIMEOUT, ge=0, description="Seconds without a sign of life from the host that leads the commits until the next one does; twice as many after each change, up to eight times; 0 = no other host ever leads.")
    start_timeout: float = Field(1800.0, ge=0, description="Seconds without progress until local workers are killed that join, restore or make their first three steps; 0 = never.")
    hang_timeout: float | None = Field(None, ge=0, description="Seconds without progress until local workers are killed; 0 = never; default: the greater of 300 s and 10 median steps.")
    straggler_factor: float = Field(1.5, ge=0, description="A rank that works this many times as long between collectives as the median of all ranks is named as slow within 30 steps (logs, events, metrics); more than 1; 0 = none is named.")
    straggler: Literal["warn", "drain"] = Field("warn", description="What `gemini run` does with a host whose rank is named as slow for 10 s: nothing more (warn), or drain it where a spare host waits (drain); at most one in ten minutes.")
    health: str | None = Field(None, min_length=1, description="Command, run by sh, that judges a host before `gemini run` joins with it, and when a rank of it was named as slow, as a hang's culprit, or as one with other results; where it fails, the host stays out of use (docs/launcher.md#hosts-that-are-not-well).")
    health_timeout: float = Field(60.0, gt=0, description="Seconds after which the health command has failed.")
    restart: Literal["process", "in_place"] = Field("process", description="After a failure, `gemini run` starts all workers anew (process), or keeps those inside `gemini_ft.run` that live, and has them begin anew in the same process (in_place).")
    elastic: Literal["batch", "exact"] | None = Field(None, description="batch: another number of hosts goes on with the same global batch and with each sample of the epoch once, under DDP or FSDP2 with samples dealt out by a DistributedSampler; exact: bit for bit, by logical ranks, in plain loops and Lightning's Trainer with GeminiStrategy (docs/elastic.md); default: the job keeps its number of hosts.")
    logical_ranks: int | None = Field(None, ge=1, description="Of a job with elastic=exact under Lightning's Trainer: how many logical ranks there are, at least as many as there will ever be workers (docs/elastic.md#with-lightning).")
    in_place_timeout: float = Field(10.0, gt=0, description="Seconds for a surviving worker to come back from the step that is given up; then it is killed, and another one started.")
    spare: Literal["cold", "warm"] = Field("cold", description="Workers of a host that waits as a spare begin when it is needed (cold), or run the script up to `gemini_ft.run` while it waits, hours before, where only imports and what neither writes, locks nor looks at the job's progress may stand (warm); that needs restart=in_place.")
    drain_signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "none"] = Field("SIGUSR1", description="Signal at which `gemini run`, or a worker, finishes its step, commits it and ends with status 85, unless the script has its own use of it.")
    drain_seconds: float = Field(25.0, gt=0, description="Seconds that a drain may take, uploads included; then `gemini run` ends its workers as at SIGTERM.")
    linger: float = Field(1800.0, ge=0, description="Seconds an agent keeps its memory after the job has crashed.")
    total_steps: int | None = Field(None, ge=0, description="Optimizer steps of the whole job, which a Kubeflow Trainer is told the progress by; default: max_steps of Lightning's Trainer, where that is given; 0 = nothing is reported.")
    max_retries: int = Field(3, ge=1, description="Failures without progress after which a snapshot is given up for an older one.")

    @property
    def fixed_interval(self) -> int | None:
        """Steps between snapshots, whatever they cost; None: as the network allows."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def waits(self) -> bool:
        """Whether an update waits for a late snapshot."""
        return self.on_late == "wait" or (self.on_late is None and self.fixed_interval is not None)

    @model_validator(mode="after")
    def _relations(self) -> GeminiConfig:
        if self.port_range and not 0 < self.port_range[0] <= self.port_range[1] < 65536:
            raise ValueError(f"port_range={self.port_range} must be (first, last) with 0 < first <= last < 65536")
        if 0 < self.straggler_factor <= 1:
            raise ValueError(f"straggler_factor={self.straggler_factor} must be 0, or more than 1: half of all ranks are slower than the median")
        if self.straggler == "drain" and not self.straggler_factor:
            raise ValueError("straggler='drain' with straggler_factor=0: no rank is ever named as slow; give a factor above 1")
        if self.spare == "warm" and self.restart != "in_place":
            raise ValueError("spare='warm' with restart='process': only workers that begin anew in their process can wait; choose restart='in_place'")
        if self.logical_ranks and self.elastic != "exact":
            raise ValueError(f"logical_ranks={self.logical_ranks} with elastic={self.elastic!r}: they are for elastic='exact'; give that, or leave them out")
        if self.chunk_bytes % 64:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must be a multiple of 64, so that no element is cut")
        if self.encrypt and (transport := self.traffic.transport) != "tcp":
            raise ValueError(f"encrypt=True with traffic.transport={transport!r}, which encrypts nothing; choose traffic.transport='tcp'")
        return self

    def refuse_elastic(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigError: ``elastic`` is given, and ``gemini run`` says that this job must not have it."""
        if self.elastic and (reason := environ.get(NOT_ELASTIC)):
            raise ConfigError(reason)


def read_options(path: str, said: str) -> Any:
    """The content of a JSON or YAML file. Raises ConfigError, which begins with ``said``: it cannot be read, or is neither."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{said}: cannot be read ({getattr(error, 'strerror', 'it is no text')}); give a JSON or YAML file") from None
    try:
        if path.endswith((".yaml", ".yml")):
            import yaml

            return yaml.safe_load(text)
        return json.loads(text)
    except Exception as error:
        raise ConfigError(f"{said}: not valid {Path(path).suffix or 'JSON'}: {_why(error)}") from None


def _from_file(path: str) -> dict[str, Any]:
    said = f"GEMINI_CONFIG={_shown(path if path.isprintable() else repr(path))}"
    loaded = read_options(path, said)
    section = loaded.get("gemini", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(section, dict) or not all(isinstance(name, str) for name in section):
        raise ConfigError(f"{said}: must hold a mapping of options, by itself or under the name gemini, got {type(section).__name__}")
    return section


def _why(error: Exception) -> str:
    """The reason why a text cannot be parsed, in one line: YAML's own shows the lines around, in which a password may be."""
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
    return _shown(str(getattr(error, "problem", None) or error).partition("\n")[0]) + where


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """``GEMINI_REPLICAS=3`` sets ``replicas``; ``GEMINI_STORAGE__EVERY_STEPS=5`` sets ``storage.every_steps``."""
    out: dict[str, Any] = {}
    fields = {"GEMINI_" + name.upper(): name for name in GeminiConfig.model_fields}
    for key, value in environ.items():
        head, _, tail = key.partition("__")
        if head not in fields:
            continue
        if tail:
            nested = out.setdefault(fields[head], {})
            if isinstance(nested, dict):
                nested[tail.lower()] = value
        elif fields[head] == "port_range":
            out["port_range"] = tuple(value.replace("-", ",").split(","))
        elif value.lstrip().startswith("{"):
            try:
                out[fields[head]] = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: not valid JSON: {_why(error)}; or set its options one by one, as {key}__NAME") from None
        else:
            out[fields[head]] = value
    return out


VARIABLES = {
    "GEMINI_CONFIG": "JSON or YAML file with options.",
    "GEMINI_RUN_ID_VARIABLES": "Names of variables, separated by commas, whose values tell jobs of the same command apart.",
    "GEMINI_HOST_ID": "Name of this host; default: the node's in a SLURM job, else the hostname with the machine's boot id.",
    "GEMINI_SECRET": "The run secret itself, where there is no secret_file.",
    "GEMINI_EVENTS": "File to which events are appended as lines of JSON.",
    "GEMINI_LOG_DIR": "Folder for the agents' logs; default: this user's own under XDG_RUNTIME_DIR or the temporary directory.",
    "GEMINI_STATE_DIR": "Folder in which a host remembers what was stored; default: gemini-ft in XDG_STATE_HOME.",
    "GEMINI_EXPLAIN": "Print what the state of the job consists of, as `gemini run --explain` does.",
    "GEMINI_WRAP": "0: leave deepspeed.initialize, transformers' Trainer and the locks of torch's builds as they are.",
    "GEMINI_REMIND": "1: fits of Lightning that nothing protects say so (docs/lightning.md).",
    "GEMINI_DATA_RESUME": "As `data_resume` of the Lightning strategies (docs/lightning.md).",
    "GEMINI_EPOCH_HOOKS": "As `epoch_hooks` of the Lightning strategies (docs/lightning.md).",
    "GEMINI_FAULTS": "Failures to inject (docs/drills.md).",
    "GEMINI_FAULTS_DIR": "Folder in which injected failures are noted, so that each happens once.",
    "GEMINI_FAULTS_FILL_LIMIT": "Most bytes that the drill of a full disk may write; default: 256MiB.",
}
NOT_ELASTIC = "GEMINI_NOT_ELASTIC"  # in the environment of workers: why this job must not have the option `elastic`
SET_BY_LAUNCHER = (
    "GEMINI_HOSTNAME",
    "GEMINI_IN_PLACE",
    "GEMINI_LAUNCH",
    "GEMINI_LAUNCHER_PID",
    "GEMINI_NOTES_FILE",
    NOT_ELASTIC,
    "GEMINI_RESERVE",
)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Warnings of ``GEMINI_*`` variables that nothing reads, each with the nearest name that is read."""
    sections: dict[str, type[BaseModel]] = {"": GeminiConfig, "STORAGE__": StorageConfig, "TRAFFIC__": TrafficConfig, "MEMORY__": MemoryConfig}
    options = [prefix + name.upper() for prefix, model in sections.items() for name in model.model_fields]
    known = {*options, *(name.removeprefix("GEMINI_") for name in (*VARIABLES, *SET_BY_LAUNCHER))}
    found = []
    for name in sorted(environ):
        said = name.removeprefix("GEMINI_")
        if said != name and said.partition("__")[0] not in known:
            near = difflib.get_close_matches(said, known, 1)
            found.append(f"{name} is not known and has no effect" + (f"; is GEMINI_{near[0]} meant?" if near else " (docs/options.md)"))
    return found


# A user and a password in a URL, also behind the single slash that a Path leaves of two, or where the scheme is missing; a password may
# hold any character, so that it reaches to the last @. The query of a URL, too, where signatures and tokens are.
PASSWORD = r"(?<=://)\S+(?=@)|(?<=:/)(?!/)\S+(?=@)|(?<![\w:/.+-])[\w.+-]+:(?!/)\S+(?=@)|(?<=\?)[^\s'\"]*=[^\s'\"]*"
_SECTIONS: dict[str, type[BaseModel]] = {"storage": StorageConfig, "traffic": TrafficConfig}


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "options"
        if item["type"] == "extra_forbidden":
            model = _SECTIONS.get(name.partition(".")[0], GeminiConfig) if "." in name else GeminiConfig
            lines.append(f"unknown option {name!r}; allowed: {', '.join(sorted(model.model_fields))}")
        elif item["type"] == "missing":  # its input is the whole section
            lines.append(f"{name} must be given")
        else:
            lines.append(f"{name}={_shown(repr(item.get('input')))}: {_shown(item['msg'])}")
    return "gemini options: " + without_passwords("; ".join(lines))


def _shown(text: str) -> str:
    """Returns a text as an error may show it: without passwords, and at most `_SHOWN` characters long."""
    text = without_passwords(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def without_passwords(text: str) -> str:
    """A text as logs may show it: without users, passwords and queries in URLs."""
    return re.sub(PASSWORD, "...", text)


def load_config(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> GeminiConfig:
    """Merges defaults, file, environment and ``overrides`` into one checked configuration.

    Raises ConfigError: an option is unknown or has a wrong value; all faults are listed at once.
    """
    env = os.environ if environ is None else environ
    if (host := env.get("GEMINI_HOST_ID", "")) and (not host.isprintable() or len(host) > _LONGEST_NAME):
        raise ConfigError(f"GEMINI_HOST_ID={_shown(repr(host))}: must be a name of up to {_LONGEST_NAME} letters, digits and signs")
    merged: dict[str, Any] = _from_file(env["GEMINI_CONFIG"]) if env.get("GEMINI_CONFIG") else {}
    for layer in (_from_environment(env), dict(overrides or {})):
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                value = {**merged[key], **value}
            merged[key] = value
    if isinstance(merged.get("storage"), str):
        merged["storage"] = {"url": merged["storage"], "every_steps": 100}
    try:
        return GeminiConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
