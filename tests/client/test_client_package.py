"""The package: public names, imports, settings, encryption."""

import asyncio
import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from fake_encoder import FakeEncoder

import encserve_client
from encserve_client import (
    AsyncEncoderClient,
    EncoderClient,
    InvalidInputError,
    RetryPolicy,
    ServerUnavailableError,
    Tls,
)
from encserve_client._grpc.channel import channel_options
from encserve_proto.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.system
def test_importing_needs_only_what_is_declared() -> None:
    """Neither click nor rich nor a module of the server, even if they are installed."""
    unwanted = "{'click', 'rich', 'google.rpc', 'grpc_status', 'onnxruntime', 'torch', 'tokenizers'}"
    done = in_a_new_process(f"import sys, encserve_client; print(sorted({unwanted} & set(sys.modules)))")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_public_names_are_all_there() -> None:
    assert encserve_client.__all__ == sorted(encserve_client.__all__)
    assert all(hasattr(encserve_client, name) for name in encserve_client.__all__)
    assert (Path(encserve_client.__file__).parent / "py.typed").exists()


def test_every_exception_is_in_the_tree() -> None:
    """The tree in the docstring, the module and the public names have the same classes."""
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
    """The methods also have the same arguments and defaults."""

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    def parameters(kind: type, name: str) -> dict[str, tuple[Any, Any]]:
        found = inspect.signature(getattr(kind, name)).parameters.values()
        return {it.name: (it.kind, it.default) for it in found}

    assert public(EncoderClient) == public(AsyncEncoderClient)
    for name in public(EncoderClient) | {"__init__"}:
        assert parameters(EncoderClient, name) == parameters(AsyncEncoderClient, name), name


def test_channel_options() -> None:
    """The library raises gRPC's limits. The caller's options have precedence."""
    options = dict(
        channel_options("encoder:1", 5, Tls(server_name="encoder"), {"grpc.max_send_message_length": 7, "x": "y"})
    )
    assert options["grpc.max_receive_message_length"] == 5
    assert options["grpc.max_send_message_length"] == 7
    assert (options["grpc.ssl_target_name_override"], options["x"]) == ("encoder", "y")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"metadata": {"Upper": "x"}}, "a metadata key must be .* was 'Upper'"),
        ({"metadata": [("x", "ü")]}, "the metadata value of 'x' must be a str of printable ASCII"),
        ({"metadata": {"x": 5}}, "the metadata value of 'x' must be"),
        ({"token": "a\nb"}, "the metadata value of 'authorization' must be a str of printable ASCII$"),
    ],
)
@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
def test_metadata_that_cannot_be_sent_is_refused(client: Any, settings: dict[str, Any], text: str) -> None:
    """gRPC refuses such metadata only at the first call, and gives no reason."""
    with pytest.raises(ValueError, match=text):
        client(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"target": None}, "target must be a str such as 'localhost:50051', or a list of addresses; was NoneType"),
        ({"target": ""}, "target must be a str such as 'localhost:50051'; was empty"),
        ({"tls": "ca.pem"}, "tls must be a Tls or a bool; was str"),
        ({"credentials": "ca.pem"}, "credentials must be grpc.ChannelCredentials or None; was str"),
        ({"token": 5}, "token must be a str or None; was int"),
        ({"metadata": 5}, "metadata must be a dict or a list of pairs; was int"),
        ({"metadata": ["ab"]}, r"metadata must be of \(key, value\) pairs"),
        ({"metadata": {5: "x"}}, "a metadata key must be a str; was int"),
        ({"timeout_seconds": "5"}, "timeout_seconds must be a number; was str"),
        ({"timeout_seconds": None}, "timeout_seconds must be a number; was NoneType"),
        ({"max_message_bytes": 1e6}, "max_message_bytes must be an int; was float"),
        ({"max_concurrent_messages": True}, "max_concurrent_messages must be an int; was bool"),
        ({"retry": 3}, "retry must be a RetryPolicy; was int"),
        ({"retry": 0}, "retry must be a RetryPolicy; was int"),
        ({"channel_arguments": [("a", 1)]}, "channel_arguments must be a dict; was list"),
        ({"channel_arguments": {"a": None}}, r"channel_arguments\['a'\] must be a str or an int; was NoneType"),
    ],
)
@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
def test_settings_of_a_wrong_type_are_named(client: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        client(**settings)


def test_numbers_of_numpys_are_numbers() -> None:
    with EncoderClient(timeout_seconds=np.float32(5), max_message_bytes=np.int64(2**20), channel_arguments={}):  # type: ignore[arg-type]
        pass


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="cert and key go together"):
        Tls(cert="client.pem")
    with pytest.raises(ValueError, match="tls or credentials, not both"):
        EncoderClient(tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(InvalidInputError, match=r"^tls.ca cannot be read: .*/nowhere/ca.pem"):
        EncoderClient(tls=Tls(ca="/nowhere/ca.pem"))


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority, and of a certificate for the name "encoder" with its key."""

    authority: Path
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("tls")
    files = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    authority = trustme.CA()
    issued = authority.issue_cert("encoder")
    authority.cert_pem.write_to_path(files.authority)
    issued.cert_chain_pems[0].write_to_path(files.cert)
    issued.private_key_pem.write_to_path(files.key)
    return files


async def test_encryption(service: FakeEncoder, certificates: Certificates) -> None:
    """Mutual TLS with both clients. The server refuses plaintext and callers without a certificate."""
    ca, cert, key = certificates.authority, certificates.cert, certificates.key
    server = grpc.aio.server()
    add_EncoderServiceServicer_to_server(service, server)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())], ca.read_bytes(), True)
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    mutual = Tls(ca=ca, cert=cert, key=key, server_name="encoder")
    async with AsyncEncoderClient(target, tls=mutual) as client:
        assert len(await client.models()) == 1

    def ask(**settings: Any) -> int:
        with EncoderClient(target, retry=RetryPolicy(max_attempts=1), **settings) as client:
            return len(client.models())

    assert await asyncio.to_thread(ask, tls=mutual) == 1
    for wrong in (Tls(ca=ca, server_name="encoder"), Tls(ca=ca, cert=cert, key=key, server_name="other"), False):
        with pytest.raises(ServerUnavailableError):
            await asyncio.to_thread(ask, tls=wrong)
    await server.stop(None)
