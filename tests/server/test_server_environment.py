"""Tests of environment variables: misspelled names, unknown names, and the API key, which has no flag."""

import asyncio
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.commands import cli
from encserve_server import healthcheck
from encserve_server.__main__ import main
from encserve_server.environment import check_environment, distance
from encserve_server.settings import SECTIONS, Settings
from encserve_server.telemetry import logs

SETTINGS = {f"ENCSERVE_{name.upper()}" for name in Settings.__dataclass_fields__}
# If a namespace has services encserve and encserve-http, Kubernetes sets these variables in each pod there.
KUBERNETES = {
    "ENCSERVE_SERVICE_HOST": "10.0.0.1",
    "ENCSERVE_SERVICE_PORT": "50051",
    "ENCSERVE_SERVICE_PORT_GRPC": "50051",
    "ENCSERVE_PORT": "tcp://10.0.0.1:50051",
    "ENCSERVE_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "ENCSERVE_PORT_50051_TCP_PROTO": "tcp",
    "ENCSERVE_PORT_50051_TCP_PORT": "50051",
    "ENCSERVE_PORT_50051_TCP_ADDR": "10.0.0.1",
    "ENCSERVE_HTTPS_PORT": "tcp://10.0.0.1:443",
    "ENCSERVE_HTTP_SERVICE_HOST": "10.0.0.1",
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Starts":
    return Starts(tmp_path, monkeypatch)


class Starts:
    """A callable that runs the server's command, and records the settings instead of starting a server."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: list[Settings] = []
        self._directory = directory

        async def serve(settings: Settings, _log: object) -> int:
            self.settings.append(settings)
            await asyncio.sleep(0)
            return 0

        monkeypatch.setattr("encserve_server.__main__.serve", serve)
        monkeypatch.setattr("encserve_server.__main__.exit_process", lambda status: None)
        monkeypatch.setattr(logs, "configure", lambda *_: None)

    def __call__(self, *flags: str, **environment: str) -> Result:
        arguments = ["--model-repository", str(self._directory), *flags]
        return CliRunner().invoke(main, arguments, env=environment, catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("ENCSERVE_MAX_QUEUE_TOKEN", "ENCSERVE_MAX_QUEUE_TOKENS"),
        ("ENCSERVE_GPRC_PORT", "ENCSERVE_GRPC_PORT"),
        ("ENCSERVE_MODELS", "ENCSERVE_MODEL"),
        ("ENCSERVE_APIKEY", "ENCSERVE_API_KEY"),
        ("ENCSERVE_API_KEYS", "ENCSERVE_API_KEY"),
        ("ENCSERVE_METRICS_PORTS", "ENCSERVE_METRICS_PORT"),
    ],
)
def test_a_name_close_to_a_setting_stops_the_start(start: Starts, name: str, setting: str) -> None:
    result = start(**{name: "a-secret-value"})
    assert result.exit_code == 2
    assert name in result.output
    assert setting in result.output
    assert "a-secret-value" not in result.output
    assert not start.settings


def test_unknown_variables_are_logged_once(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    """One log line names all unknown variables, and the server still starts.

    ENCSERVE_PORT is unknown. The name differs from ENCSERVE_HOST in two letters, but is not a misspelling.
    """
    assert start(ENCSERVE_NONSENSE="1", ENCSERVE_PORT="8080").exit_code == 0
    (line,) = [it for it in caplog.records if "unknown environment variables" in it.getMessage()]
    assert set(vars(line)["variables"]) == {"ENCSERVE_NONSENSE", "ENCSERVE_PORT"}


def test_a_flag_overrides_the_environment_and_the_environment_the_default(start: Starts) -> None:
    environment = {
        "ENCSERVE_GRPC_PORT": "1234",
        "ENCSERVE_METRICS_PORT": "4321",
        "ENCSERVE_MODEL": "a b@2",
        "ENCSERVE_REFLECTION": "false",
    }
    assert start("--grpc-port", "999", **environment).exit_code == 0
    (settings,) = start.settings
    assert (settings.grpc_port, settings.metrics_port, settings.max_request_sequences) == (999, 4321, 2048)
    assert (settings.model, settings.reflection) == (("a", "b@2"), False)


def test_the_repository_is_required_and_may_be_a_variable(start: Starts, tmp_path: Path) -> None:
    missing = CliRunner().invoke(main, [])
    assert (missing.exit_code, "Missing option '--model-repository'" in missing.output) == (2, True)
    CliRunner().invoke(main, [], env={"ENCSERVE_MODEL_REPOSITORY": str(tmp_path)}, catch_exceptions=False)
    assert [it.model_repository for it in start.settings] == [tmp_path]


def test_variables_of_kubernetes_are_ignored() -> None:
    assert check_environment(KUBERNETES | {"PATH": "/bin", "ENCSERVE_REQUIRE_CHROMIUM": "1"}, SETTINGS) == []


@pytest.mark.parametrize("port", ["grpc", "http", "metrics"])
def test_a_service_with_the_name_of_a_port(start: Starts, port: str, caplog: pytest.LogCaptureFixture) -> None:
    """The server ignores a port variable that Kubernetes has set for a service, and logs a line about the variable.

    For a service named encserve-http, Kubernetes sets ENCSERVE_HTTP_PORT in every pod of the namespace.
    """
    variable = f"ENCSERVE_{port.upper()}_PORT"
    assert start(**{variable: "tcp://10.0.0.1:80"}).exit_code == 0
    (settings,) = start.settings
    assert (settings.grpc_port, settings.http_port, settings.metrics_port) == (50051, None, 9464)
    (line,) = [it for it in caplog.records if "service links" in it.getMessage()]
    assert vars(line)["variables"] == [variable]


def test_the_health_check_ignores_a_service_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCSERVE_GRPC_PORT", "tcp://10.0.0.1:80")
    assert healthcheck.own_target() == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("flags", "variables", "problem"),
    [
        ([], {"ENCSERVE_GRPC_PORT": "abc"}, "ENCSERVE_GRPC_PORT"),
        ([], {"ENCSERVE_MAX_PADDING_FRACTION": "2"}, "<= 1; was 2.0 (set by ENCSERVE_MAX_PADDING_FRACTION)"),
        (["--max-padding-fraction", "2"], {}, "<= 1; was 2.0 (set by --max-padding-fraction)"),
        ([], {"ENCSERVE_PRECISION": "bfloat16"}, "of the bundle (set by ENCSERVE_PRECISION)"),
        (["--http-port", "9464"], {}, "must differ; both were 9464 (set by --http-port)"),
        (["--device", "gpu"], {}, "'cpu', 'cuda'. Did you mean 'cuda'?"),
        ([], {"ENCSERVE_LOG_LEVEL": "warn"}, "Did you mean 'warning'?"),
        (["--device", "nonsense"], {}, "'nonsense' is not one of 'auto', 'cpu', 'cuda'.\n"),
        (["--max-queue-tokens", "many"], {}, "'many' is not a valid integer"),
    ],
)  # fmt: skip
def test_an_error_names_the_flag_or_the_variable(
    start: Starts, flags: list[str], variables: dict[str, str], problem: str
) -> None:
    result = start(*flags, **variables)
    assert result.exit_code == 2
    assert problem in result.output


def test_the_beginning_of_a_name_is_close_to_a_setting() -> None:
    result = CliRunner().invoke(main, [], env={"ENCSERVE_MODEL_REPO": "models"})
    assert result.exit_code == 2
    assert "ENCSERVE_MODEL_REPO is not a setting; did you mean ENCSERVE_MODEL_REPOSITORY?" in result.output


def test_variables_of_the_command_line_client_are_ignored() -> None:
    context = click.Context(cli, info_name="encserve", auto_envvar_prefix="ENCSERVE")
    commands = [(context, cli), *((click.Context(it, context, name), it) for name, it in cli.commands.items())]
    names = {_variable(context, param) for context, it in commands for param in it.params}
    assert len(names) > 40
    assert check_environment(dict.fromkeys(names, "1"), SETTINGS) == []


def _variable(context: click.Context, param: click.Parameter) -> str:
    return f"{context.auto_envvar_prefix}_{(param.name or '').upper()}"


@given(one=st.text("abc", max_size=6), other=st.text("abc", max_size=6))
def test_the_distance_is_a_metric(one: str, other: str) -> None:
    assert (distance(one, other) == 0) == (one == other)
    assert distance(one, other) == distance(other, one) <= max(len(one), len(other))
    for i in range(len(one)):
        assert abs(distance(one[:i] + one[i + 1 :], other) - distance(one, other)) <= 1


def test_the_key_has_no_flag_and_is_never_shown(start: Starts) -> None:
    key = "encserve-a-key"
    assert start(ENCSERVE_API_KEY=key).exit_code == 0
    (settings,) = start.settings
    assert settings.api_key == key
    assert key not in repr(settings)
    assert key not in str(settings.in_force())
    assert start("--api-key", key).exit_code == 2


@pytest.mark.parametrize("flag", ["--api-key-file", "--callers"])
def test_a_key_and_a_file_exclude_each_other(start: Starts, flag: str) -> None:
    result = start(flag, "file", ENCSERVE_API_KEY="encserve-a-key")
    assert result.exit_code == 2
    assert "must not be set together" in result.output
    assert "encserve-a-key" not in result.output


def test_logged_settings_hide_the_user_of_a_url(tmp_path: Path) -> None:
    settings = Settings(model_repository=tmp_path, trace_endpoint="https://user:secret@collector:4317")
    assert settings.in_force()["trace_endpoint"] == "https://collector:4317"


def test_the_help_lists_the_options_under_headings() -> None:
    """The ten most common options come first. Each setting with a flag is under one heading, within 80 columns."""
    shown = CliRunner().invoke(main, ["--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    places = [shown.index(f"\n{title}:\n") for title in SECTIONS]
    assert places == sorted(places)
    first = re.findall(r"^  (--[\w-]+)", shown[: places[1]], re.MULTILINE)
    assert len(first) == 10 + len(["--version", "--help"])
    flags = {f"--{name.replace('_', '-')}" for name in Settings.__dataclass_fields__ if name != "api_key"}
    found = re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE)
    assert sorted(found) == sorted([*flags, "--version", "--help"])
