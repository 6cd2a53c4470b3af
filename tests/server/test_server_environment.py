"""Environment variables that are nearly settings, or somebody else's; and the key, which has no flag."""

import asyncio
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.commands import cli
from encserve_server.__main__ import main
from encserve_server.environment import check_environment, distance
from encserve_server.settings import Settings
from encserve_server.telemetry import logs

SETTINGS = {f"ENCSERVE_{name.upper()}" for name in Settings.__dataclass_fields__}
# As a pod has them beside services called encserve and encserve-http.
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
    """Starts the command, which ends before it serves; keeps the settings that it had."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: list[Settings] = []
        self._directory = directory

        async def serve(settings: Settings) -> int:
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
    ("name", "meant"),
    [
        ("ENCSERVE_MAX_QUEUE_TOKEN", "ENCSERVE_MAX_QUEUE_TOKENS"),
        ("ENCSERVE_GPRC_PORT", "ENCSERVE_GRPC_PORT"),
        ("ENCSERVE_MODELS", "ENCSERVE_MODEL"),
        ("ENCSERVE_APIKEY", "ENCSERVE_API_KEY"),
        ("ENCSERVE_API_KEYS", "ENCSERVE_API_KEY"),
        ("ENCSERVE_METRICS_PORTS", "ENCSERVE_METRICS_PORT"),
    ],
)
def test_a_near_miss_stops_the_start_and_names_both(start: Starts, name: str, meant: str) -> None:
    result = start(**{name: "a-secret-value"})
    assert result.exit_code == 2
    assert f"{name} is no setting; is {meant} meant?" in result.output
    assert "a-secret-value" not in result.output
    assert not start.settings


def test_others_are_told_once(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    assert start(ENCSERVE_NONSENSE="1", ENCSERVE_FURTHER_NONSENSE="1").exit_code == 0
    (line,) = [it for it in caplog.records if "are no settings" in it.getMessage()]
    assert set(vars(line)["variables"]) == {"ENCSERVE_NONSENSE", "ENCSERVE_FURTHER_NONSENSE"}


def test_a_port_is_no_near_miss(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    """It differs from ENCSERVE_HOST in two letters, and nobody means that."""
    assert start(ENCSERVE_PORT="8080").exit_code == 0
    (line,) = [it for it in caplog.records if "are no settings" in it.getMessage()]
    assert vars(line)["variables"] == ["ENCSERVE_PORT"]


def test_what_kubernetes_sets_is_ignored() -> None:
    assert check_environment(KUBERNETES | {"PATH": "/bin", "ENCSERVE_REQUIRE_CHROMIUM": "1"}, SETTINGS) == []


def test_what_the_command_reads_is_ignored() -> None:
    context = click.Context(cli, info_name="encserve", auto_envvar_prefix="ENCSERVE")
    commands = [(context, cli), *((click.Context(it, context, name), it) for name, it in cli.commands.items())]
    names = {_variable(context, param) for context, it in commands for param in it.params}
    assert len(names) > 40
    assert check_environment(dict.fromkeys(names, "1"), SETTINGS) == []


def _variable(context: click.Context, param: click.Parameter) -> str:
    return f"{context.auto_envvar_prefix}_{(param.name or '').upper()}"


@given(one=st.text("abc", max_size=6), other=st.text("abc", max_size=6))
def test_the_distance_is_one(one: str, other: str) -> None:
    assert (distance(one, other) == 0) == (one == other)
    assert distance(one, other) == distance(other, one) <= max(len(one), len(other))
    for i in range(len(one)):
        assert abs(distance(one[:i] + one[i + 1 :], other) - distance(one, other)) <= 1


def test_the_key_has_no_flag_and_is_shown_nowhere(start: Starts) -> None:
    key = "encserve-a-key"
    assert start(ENCSERVE_API_KEY=key).exit_code == 0
    (settings,) = start.settings
    assert settings.api_key == key
    assert key not in repr(settings)
    assert key not in str(settings.in_force())
    assert start("--api-key", key).exit_code == 2


@pytest.mark.parametrize("flag", ["--api-key-file", "--callers"])
def test_a_key_and_a_file_do_not_go_together(start: Starts, flag: str) -> None:
    result = start(flag, "file", ENCSERVE_API_KEY="encserve-a-key")
    assert result.exit_code == 2
    assert "must not be given together" in result.output
    assert "encserve-a-key" not in result.output


def test_settings_in_force_name_no_user_of_a_url(tmp_path: Path) -> None:
    settings = Settings(model_repository=tmp_path, trace_endpoint="https://user:secret@collector:4317")
    assert settings.in_force()["trace_endpoint"] == "https://collector:4317"
