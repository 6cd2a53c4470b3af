"""Tests of the package `encserve_client`: its public names, its imports and its settings."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import encserve_client
from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InvalidInputError,
    Tls,
)
from encserve_client._grpc.channel import channel_options


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.system
def test_the_package_imports_its_dependencies_only() -> None:
    unwanted = "{'click', 'rich', 'google.rpc', 'grpc_status', 'onnxruntime', 'torch', 'tokenizers'}"
    done = in_a_new_process(f"import sys, encserve_client; print(sorted({unwanted} & set(sys.modules)))")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_public_names_exist() -> None:
    assert encserve_client.__all__ == sorted(encserve_client.__all__)
    assert all(hasattr(encserve_client, name) for name in encserve_client.__all__)
    assert (Path(encserve_client.__file__).parent / "py.typed").exists()


def test_the_client_for_threads_is_generated(tmp_path: Path) -> None:
    made = tmp_path / "client.py"
    script = Path(__file__).parents[2] / "scripts/generate_sync_client.py"
    subprocess.run([sys.executable, script, made], check=True, timeout=60)
    assert made.read_text() == Path(inspect.getfile(EncoderClient)).read_text(), "run `make sync-client`"


def test_the_docstring_lists_every_exception() -> None:
    """The tree in the docstring of `exceptions` has every exception of the module, and no other exception.

    The package exports all these exceptions.
    """
    from encserve_client import exceptions

    classes = {
        name
        for name, it in vars(exceptions).items()
        if isinstance(it, type) and issubclass(it, encserve_client.EncserveError)
    }
    tree = (exceptions.__doc__ or "").split("`grpc.RpcError`")[0]
    assert classes == {word for word in tree.replace("(", " ").split() if word.endswith("Error")} - {
        "ValueError)",
        "TypeError)",
    }
    assert classes <= set(encserve_client.__all__)


def test_both_clients_have_the_same_methods() -> None:
    """The public methods of both clients have the same names, arguments and defaults."""

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    def parameters(kind: type, name: str) -> dict[str, tuple[Any, Any]]:
        found = inspect.signature(getattr(kind, name)).parameters.values()
        return {it.name: (it.kind, it.default) for it in found}

    assert public(EncoderClient) == public(AsyncEncoderClient)
    for name in (public(EncoderClient) | {"__init__"}) - {"target"}:
        assert parameters(EncoderClient, name) == parameters(AsyncEncoderClient, name), name


def test_channel_options() -> None:
    """The caller's `channel_arguments` override the gRPC channel options of the client."""
    options = dict(
        channel_options("encoder:1", 5, Tls(server_name="encoder"), {"grpc.max_send_message_length": 7, "x": "y"})
    )
    assert options["grpc.max_receive_message_length"] == 5
    assert options["grpc.max_send_message_length"] == 7
    assert (options["grpc.ssl_target_name_override"], options["x"]) == ("encoder", "y")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"target": 5}, "target must be a str such as 'localhost:50051', or a list of addresses; was int"),
        ({"target": ""}, "target must be host:port, such as 'localhost:50051' or .*; was empty"),
        ({"tls": "ca.pem"}, "tls must be a Tls or a bool; was str"),
        ({"tls": Tls(ca="/nowhere/ca.pem")}, "^tls.ca cannot be read: /nowhere/ca.pem: No such file or directory$"),
        ({"tls": True, "credentials": grpc.ssl_channel_credentials()}, "tls or credentials, not both"),
        ({"credentials": "ca.pem"}, "credentials must be grpc.ChannelCredentials or None; was str"),
        ({"api_key": 5}, "api_key must be a str or None; was int"),
        ({"metadata": 5}, "metadata must be a dict or a list of pairs; was int"),
        ({"metadata": ["ab"]}, r"metadata must be a dict or a list of \(key, value\) pairs"),
        ({"metadata": {5: "x"}}, "a metadata key must be a str; was int"),
        ({"metadata": {"Upper": "x"}}, "metadata must have names of a-z, .* was 'Upper'"),
        ({"metadata": [("x", "ü")]}, "metadata must have values of printable ASCII; the value of 'x' has other"),
        ({"metadata": {"x": 5}}, "metadata must have values of printable ASCII"),
        ({"timeout_seconds": "5"}, "timeout_seconds must be a number; was str"),
        ({"timeout_seconds": None}, "timeout_seconds must be a number; was NoneType"),
        ({"timeout_seconds": 0}, "timeout_seconds must be > 0; was 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be > 0; was nan"),
        ({"max_message_bytes": 1e6}, "max_message_bytes must be an int; was float"),
        ({"max_concurrent_messages": True}, "max_concurrent_messages must be an int; was bool"),
        ({"max_message_bytes": 0}, "max_message_bytes must be >= 1; was 0"),
        ({"max_concurrent_messages": 0}, "max_concurrent_messages must be >= 1; was 0"),
        ({"on_outage": 1}, "on_outage must be a function or None; was int"),
        ({"expected_fingerprint": 7}, "expected_fingerprint must be a str or None; was int"),
        ({"expected_space_id": 7}, "expected_space_id must be a str or None; was int"),
        ({"retry": 3}, "retry must be a RetryPolicy; was int"),
        ({"retry": 0}, "retry must be a RetryPolicy; was int"),
        ({"channel_arguments": [("a", 1)]}, "channel_arguments must be a dict; was list"),
        ({"channel_arguments": {"a": None}}, r"channel_arguments\['a'\] must be a str or an int; was NoneType"),
    ],
)
@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
def test_wrong_settings_are_refused(client: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        client(**settings)


def test_a_certificate_needs_a_key() -> None:
    with pytest.raises(InvalidInputError, match="cert and key go together"):
        Tls(cert="client.pem")


def test_numpy_numbers_are_accepted() -> None:
    with EncoderClient(timeout_seconds=np.float32(5), max_message_bytes=np.int64(2**20), channel_arguments={}):  # type: ignore[arg-type]
        pass
