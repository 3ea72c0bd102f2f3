"""Options of traffic: what is allowed, what follows from what, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from gemini_ft.agent.lifecycle import log_path
from gemini_ft.config import GeminiConfig, MemoryConfig, StorageConfig, TrafficConfig, load_config, unknown_variables
from gemini_ft.errors import ConfigError, SecretError, StorageError
from gemini_ft.events import EventLog
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.s3errors import explained
from gemini_ft.wire.trust import read_secret


def load(*, environ: dict[str, str] | None = None, **options: Any) -> GeminiConfig:
    return load_config(options, environ or {})


class TestInterval:
    @pytest.mark.parametrize(("given", "expected"), [({}, "auto"), ({"interval": "auto"}, "auto"), ({"interval": 3}, 3)])
    def test_is_a_number_or_auto(self, given: dict[str, Any], expected: object) -> None:
        assert load(**given).interval == expected

    @pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("3", 3)])
    def test_may_come_from_the_environment(self, given: str, expected: object) -> None:
        assert load(environ={"GEMINI_INTERVAL": given}).interval == expected

    @pytest.mark.parametrize("given", [0, -1, 1.5, "often", "", None])
    def test_is_nothing_else(self, given: object) -> None:
        with pytest.raises(ConfigError, match=r"interval.*=") as raised:
            load(interval=given)
        assert repr(given) in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "waits"),
        [
            ({}, False),
            ({"interval": "auto"}, False),
            ({"interval": 1}, True),
            ({"interval": 1, "on_late": "skip"}, False),
            ({"on_late": "wait"}, True),
        ],
    )
    def test_that_the_user_has_chosen_is_kept_even_if_the_training_must_wait(self, options: dict[str, Any], waits: bool) -> None:
        assert load(**options).waits == waits


class TestStorage:
    @pytest.mark.parametrize(("given", "kept"), [("3", 3), ("all", None)])
    def test_keeps_so_many_or_all(self, given: str, kept: int | None) -> None:
        storage = load(environ={"GEMINI_STORAGE__KEEP_LAST": given}, storage={"url": "file:///x", "every_steps": 1}).storage
        assert storage is not None
        assert storage.kept == kept

    @pytest.mark.parametrize("given", [0, "none", None])
    def test_keeps_nothing_else(self, given: object) -> None:
        with pytest.raises(ConfigError, match=r"storage\.keep_last.*=") as raised:
            load(storage={"url": "file:///x", "every_steps": 1, "keep_last": given})
        assert repr(given) in str(raised.value)


class TestTraffic:
    def test_takes_units_and_the_environment(self) -> None:
        config = load(environ={"GEMINI_TRAFFIC__BUFFER_BYTES": "8MiB", "GEMINI_TRAFFIC__WHEN": "ready"}, traffic={"sub_buffers": 2})
        assert (config.traffic.buffer_bytes, config.traffic.when, config.traffic.piece_bytes) == (2**23, "ready", 2**22)

    def test_names_the_options_of_the_section_when_one_is_unknown(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown option 'traffic\.gama'; allowed: ") as raised:
            load(traffic={"gama": 0.5})
        assert str(raised.value).endswith(", ".join(sorted(TrafficConfig.model_fields)))

    def test_names_what_is_missing_and_not_what_was_given_beside_it(self) -> None:
        with pytest.raises(ConfigError, match=r"options: storage\.url must be given; unknown option 'storage\.evry'; allowed: "):
            load(storage={"evry": 5})

    @pytest.mark.parametrize(
        "wrong",
        [
            {"gamma": 0},
            {"gamma": 1.01},
            {"transport": "nccl"},
            {"when": "never"},
            {"sub_buffers": 0},
            {"profile_steps": 1},
            {"max_rate": 0},
        ],
    )
    def test_names_the_option_whose_value_is_wrong(self, wrong: dict[str, Any]) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=rf"traffic\.{name}={value!r}: "):
            load(traffic=wrong)

    def test_needs_room_for_a_page_in_each_sub_buffer(self) -> None:
        assert load(traffic={"buffer_bytes": 4 * 4096}).traffic.piece_bytes == 4096
        with pytest.raises(ConfigError, match="buffer_bytes=16383 in sub_buffers=4 parts: each needs 4096 bytes"):
            load(traffic={"buffer_bytes": 4 * 4096 - 1})


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "hun@ter2"])
def test_a_password_in_an_address_is_in_no_error(password: str) -> None:
    """Neither in the value that is wrong nor in the words about it, and wherever the address ends up."""
    url = f"https://bob:{password}@host"
    words = {
        "'https://...@host'}: Value error, storage needs every_steps": lambda: load(storage={"url": "s3://bucket", "endpoint_url": url}),
        "storage.url='https://...@host' must start with": lambda: load_config({}, {"GEMINI_STORAGE__URL": url}),
        "unknown option 'https://...@host'": lambda: load_config({url: 1}, {}),
        "storage.url='https://...@host': must be": lambda: open_storage(url),
        "storage.url='s3://...@host': give credentials to boto3": lambda: open_storage(f"s3://key:{password.replace('/', '')}@host"),
        "storage.endpoint_url='...@host': ": lambda: open_storage("s3://bucket", f"bob:{password}@host"),
        "storage.endpoint_url='https://...@host': ": lambda: open_storage("s3://bucket", f"https://[bob:{password}@host"),
    }
    for text, call in words.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert text in str(caught.value)
        assert "ter2" not in str(caught.value)


@pytest.mark.parametrize(
    "given", ["https://bob:hunter2@host/key", "/mnt/https:/bob:hunter2@host", "hunter2", "aGVs/hunter2=", "/key?sig=hunter2"]
)
def test_a_secret_given_in_place_of_its_file_is_in_no_error(given: str) -> None:
    with pytest.raises(SecretError, match=r"secret_file=.*: No such file or directory; give the path of a file") as caught:
        read_secret(load_config({}, {"GEMINI_SECRET_FILE": given}))
    assert "hunter2" not in str(caught.value)


def test_a_signed_address_is_in_no_error() -> None:
    with pytest.raises(ConfigError) as wrong:
        load_config({}, {"GEMINI_CONFIG": "https://host/x?X-Amz-Signature=hunter2"})
    with pytest.raises(StorageError) as broken, explained("s3://b", "cannot write x", 1.0):
        raise EndpointConnectionError(endpoint_url="https://bob:hunter2@host/x")
    assert "hunter2" not in f"{wrong.value} {broken.value}"


VALUES = ["{", "{" * 9999, '{"a":' * 99999, f'{{"a": {"9" * 5000}}}', "9" * 5000, "\udcff", "nan", "inf", "1e99", "a\nb", "x" * 9999]
OPTIONS = [f"GEMINI_{name.upper()}" for name in GeminiConfig.model_fields] + [
    f"GEMINI_{section.upper()}__{name.upper()}"
    for section, model in (("storage", StorageConfig), ("traffic", TrafficConfig), ("memory", MemoryConfig))
    for name in model.model_fields
]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_variable_with_anything_in_it_is_taken_or_refused_in_one_line_that_is_not_long(option: str) -> None:
    password = ["https://bob:hunter2@host", '{"url": "https://bob:hunter2@host"', '{"a": "https://bob:hunter2@host"}']
    for value in [*VALUES, *password]:
        try:
            load_config(None, {option: value}).model_dump_json()  # as it travels between the ranks
        except ConfigError as error:
            text = str(error)
            assert text.isprintable(), value[:40]
            assert len(text) < 2000, value[:40]
            assert "hunter2" not in text


@pytest.mark.parametrize("value", ["nan", "inf", "1e99"])
def test_a_time_that_no_clock_can_count_is_refused(value: str) -> None:
    for name, field in GeminiConfig.model_fields.items():
        if "float" in str(field.annotation):
            with pytest.raises(ConfigError, match=f"{name}="):
                load_config(None, {f"GEMINI_{name.upper()}": value})


@pytest.mark.parametrize("factor", [0.5, 1])
def test_a_straggler_factor_by_which_half_of_all_ranks_would_be_slow_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=rf"straggler_factor={float(factor)} must be 0, or more than 1"):
        load(straggler_factor=factor)
    assert [load(straggler_factor=allowed).straggler_factor for allowed in (0, 1.01)] == [0, 1.01]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff\xfe", b"\0", b"null", b"[1]", b'{"gemini": 5}', b'{"gemini": "ab"}', b'{"gemini": null}', b"1: 2"),
        *(b"traffic: &a {x: *a}", b'{"a":' * 9999, b"!!python/object/apply:os.system ['id']"),
        *(b'{"storage": "s3://bob:hunter2@x", "a":', b"- //bob:hunter2@h\n: :"),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_with_anything_in_it_is_refused_in_one_line(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"options.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^(GEMINI_CONFIG=.*options\.{suffix}|gemini options): ") as caught:
        load_config(None, {"GEMINI_CONFIG": str(path)})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\udcff", "x" * 101])
def test_a_host_has_a_name_that_logs_and_files_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^GEMINI_HOST_ID=.*: must be a name of up to 100 letters") as caught:
        load_config(None, {"GEMINI_HOST_ID": name})
    assert str(caught.value).isprintable()
    assert load_config(None, {"GEMINI_HOST_ID": "host 1, rack/2"})


def test_a_secret_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_SECRET", "\udcff secret")
    assert read_secret(load()) == b"\xff secret"


def test_a_folder_for_logs_that_cannot_be_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "logs"):
        monkeypatch.setenv("GEMINI_LOG_DIR", str(folder))
        with pytest.raises(ConfigError, match=rf"^GEMINI_LOG_DIR={folder}: (File exists|Not a directory); name a folder"):
            log_path("run", "a")


def test_a_file_that_is_named_with_a_password_is_not_shown_with_it() -> None:
    with pytest.raises(ConfigError, match=r"^GEMINI_CONFIG=https://...@host/x: cannot be read"):
        load_config(None, {"GEMINI_CONFIG": "https://bob:hunter2@host/x"})


def test_what_process_groups_carry_is_not_said_to_be_encrypted() -> None:
    with pytest.raises(ConfigError, match=r"transport='collective', which encrypts nothing; choose traffic\.transport='tcp'"):
        load(encrypt=True, traffic={"transport": "collective"})
    assert load(encrypt=True).traffic.transport == "tcp"


def test_variables_that_nothing_reads_are_named_with_the_nearest_that_is_read() -> None:
    environ = {
        "GEMINI_REPLICSA": "3",
        "GEMINI_STORAGE__URL": "file:///x",
        "GEMINI_STORAGE_URL": "",
        "GEMINI_QQQQQQ": "",
        "GEMINI_EVENTS": "",
        "PATH": "",
    }
    assert unknown_variables(environ) == [
        "GEMINI_QQQQQQ is not known and has no effect (docs/options.md)",
        "GEMINI_REPLICSA is not known and has no effect; is GEMINI_REPLICAS meant?",
        "GEMINI_STORAGE_URL is not known and has no effect; is GEMINI_STORAGE__URL meant?",
    ]


def test_events_that_cannot_be_written_are_a_wrong_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"GEMINI_EVENTS={tmp_path}: cannot be written \(Is a directory\); name a file"):
        EventLog()
