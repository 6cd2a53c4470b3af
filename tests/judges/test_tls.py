"""Tests TLS, client certificates and keys with curl, openssl, OpenAI's client, and clients in other languages.

tests/server/test_server_tls.py tests the server with Python's module ssl. tests/client/test_client_tls.py tests our
client.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates, Pair, make_certificates
from judging import JUDGES, ROOT, go_example, npm_folder, program, python_environment, run
from real_server import RealServer, real_server
from tiny_bundle import D_MODEL, write_bundle
from tiny_heads import words

pytestmark = pytest.mark.timeout(900)  # the first run installs the clients

VERSIONS = pytest.mark.parametrize("version", ["1.2", "1.3"])
# The lifetime of the certificate for the fault "expired". The server loads the certificate while it is valid. The
# tests run after it has expired.
SHORT_SECONDS = 20.0
# curl's exit statuses if the server ends the connection. The status 60 means that the server has sent the TLS alert
# "expired certificate".
CURL_REFUSED = (35, 52, 55, 56, 60)
# For each fault of a server's certificate: a text in the error messages of openssl and Python.
FAULTS = {"expired": "certificate has expired", "other_name": "hostname mismatch", "stranger": "local issuer"}
KEY, WRONG_KEY = "encserve-the-right-key", "encserve-a-wrong-key"


@dataclass(frozen=True, slots=True)
class Servers:
    """The running servers and their certificates.

    Attributes:
        made: All certificates.
        right: A server that requires client certificates.
        keyed: A server that requires a key.
        faulty: For each fault in FAULTS, a server whose certificate has the fault. These servers require neither a key
            nor a client certificate.
        plain: A server without TLS.
    """

    made: Certificates
    right: RealServer
    keyed: RealServer
    faulty: dict[str, RealServer]
    plain: RealServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("tls")
    write_bundle(folder / "models", tokenizer=words())
    issued = time.monotonic()
    made = make_certificates(folder)
    short = made.authority.issue("short", days=SHORT_SECONDS / 86400)
    (folder / "keys").write_text(f"{KEY}\n")

    def start(pair: Pair | None, *more: Any) -> Any:
        files = [] if pair is None else ["--tls-cert-file", pair.cert, "--tls-key-file", pair.key]
        return real_server(folder / "models", "--http-port", "0", *map(str, [*files, *more]))

    with (
        start(short) as expired,
        start(made.server, "--tls-client-ca-file", made.ca) as right,
        start(made.server, "--api-key-file", folder / "keys") as keyed,
        start(made.other_name) as other_name,
        start(made.stranger) as stranger,
        start(None) as plain,
    ):
        time.sleep(max(issued + SHORT_SECONDS + 2 - time.monotonic(), 0))
        yield Servers(made, right, keyed, {"expired": expired, "other_name": other_name, "stranger": stranger}, plain)


def execute(*command: Any, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with additional environment variables. Return the result, even if the program fails."""
    return subprocess.run(
        list(map(str, command)),
        input=text,
        capture_output=True,
        text=True,
        errors="replace",  # HTTP/2 frames are not text
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def test_our_command(servers: Servers) -> None:
    """Run `encserve embed` with certificates from flags and a key from a variable. The command returns vectors.

    Without a client certificate or with a wrong key, the command prints an error that does not contain the key.
    """
    made, command = servers.made, Path(sys.executable).parent / "encserve"

    def embed(server: RealServer, *flags: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        target = f"localhost:{server.grpc_port}"
        return execute(command, "--target", target, "--timeout", "5", *flags, "embed", "w3 w4", **environment)

    ca = ("--ca", made.ca)
    assert embed(servers.right, *ca, "--cert", made.client.cert, "--tls-key", made.client.key).returncode == 0
    assert "the server requires a client certificate" in " ".join(embed(servers.right, *ca).stderr.split())
    assert embed(servers.keyed, *ca, ENCSERVE_API_KEY=KEY).returncode == 0
    refused = embed(servers.keyed, *ca, ENCSERVE_API_KEY=WRONG_KEY)
    assert refused.returncode == 1
    assert "unknown or revoked key" in " ".join(refused.stderr.split())
    assert WRONG_KEY not in refused.stderr


def s_client(made: Certificates, port: int | None, version: str, pair: Pair | None, *more: str) -> tuple[int, str]:
    """Request /health with openssl s_client. Return the exit status and the output."""
    done = execute(
        *(program("openssl", "openssl"), "s_client", "-connect", f"127.0.0.1:{port}", "-servername", "localhost"),
        *("-CAfile", made.ca, "-verify_return_error", "-verify_hostname", "localhost", "-ign_eof"),
        *(f"-tls{version.replace('.', '_')}", *more),
        *(() if pair is None else ("-cert", pair.cert, "-key", pair.key)),
        text="GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    return done.returncode, done.stdout + done.stderr


@VERSIONS
def test_openssl(servers: Servers, version: str) -> None:
    made, right = servers.made, servers.right
    status, output = s_client(made, right.http_port, version, made.client)
    assert status == 0, output
    for part in ("Verify return code: 0 (ok)", "HTTP/1.1 200 OK", f"TLSv{version}"):
        assert part in output
    for pair in (None, made.expired, made.stranger):
        status, output = s_client(made, right.http_port, version, pair)
        assert (status != 0, "HTTP/1.1" in output) == (True, False)
    status, output = s_client(made, right.grpc_port, version, made.client, "-alpn", "h2", "-no_ign_eof")
    assert "Verify return code: 0 (ok)" in output
    assert "ALPN protocol: h2" in output
    status, output = s_client(made, servers.plain.http_port, version, made.client)
    assert (status != 0, "wrong version number" in output) == (True, True)
    for fault, server in servers.faulty.items():
        for port, more in ((server.http_port, ()), (server.grpc_port, ("-alpn", "h2"))):
            status, output = s_client(made, port, version, None, *more)
            assert (status != 0, FAULTS[fault] in output.lower(), "HTTP/1.1" in output) == (True, True, False)


def curl(made: Certificates, url: str, pair: Pair | None, version: str, *more: str) -> tuple[int, str]:
    """Send a request with curl. Return curl's exit status and the HTTP status code."""
    done = execute(
        *(program("curl", "curl"), "--silent", "--show-error", "--noproxy", "*", "--cacert", made.ca),
        *(f"--tlsv{version}", "--tls-max", version, "--output", os.devnull, "--write-out", "%{http_code}"),
        *(() if pair is None else ("--cert", pair.cert, "--key", pair.key)),
        *("--json", '{"input": "w3 w4"}', *more, url),
    )
    return done.returncode, done.stdout


@VERSIONS
def test_curl(servers: Servers, version: str) -> None:
    made, right = servers.made, servers.right
    url = f"https://localhost:{right.http_port}/v1/embeddings"
    assert curl(made, url, made.client, version) == (0, "200")
    for pair in (None, made.expired, made.stranger):
        status, code = curl(made, url, pair, version)
        assert (status in CURL_REFUSED, code) == (True, "000"), status
    assert curl(made, url.replace("https", "http"), None, version)[1] == "000"
    assert curl(made, f"https://localhost:{servers.plain.http_port}/v1/embeddings", None, version) == (35, "000")
    for server in servers.faulty.values():
        assert curl(made, f"https://localhost:{server.http_port}/v1/embeddings", None, version) == (60, "000")
    url = f"https://localhost:{servers.keyed.http_port}/v1/embeddings"
    for header in (f"authorization: Bearer {KEY}", f"api-key: {KEY}", f"x-api-key: {KEY}"):
        assert curl(made, url, None, version, "--header", header) == (0, "200")
        assert curl(made, url, None, version, "--header", header.replace(KEY, WRONG_KEY)) == (0, "401")
    assert curl(made, url, None, version) == (0, "401")


@VERSIONS
def test_curl_and_the_metrics_page(servers: Servers, version: str) -> None:
    """On a server that requires client certificates, /metrics requires a client certificate, but /healthz does not."""
    made = servers.made
    for path, pair, want in (
        ("/metrics", made.client, (0, "200")),
        ("/metrics", None, (0, "403")),
        ("/healthz", None, (0, "200")),
    ):
        url = f"https://localhost:{servers.right.metrics_port}{path}"
        assert curl(made, url, pair, version, "--request", "GET") == want
    url = f"https://localhost:{servers.right.metrics_port}/metrics"
    for pair in (made.expired, made.stranger):
        status, code = curl(made, url, pair, version, "--request", "GET")
        assert (status in CURL_REFUSED, code) == (True, "000"), status


def test_openai(servers: Servers) -> None:
    made, python = servers.made, python_environment("clients") / "python"

    def ask(server: RealServer, *pair: Path, scheme: str = "https", **environment: str) -> str:
        url = f"{scheme}://localhost:{server.http_port}"
        return run([python, JUDGES / "openai_tls_judge.py", url, made.ca, *pair], environment=environment).strip()

    assert ask(servers.right, made.client.cert, made.client.key) == str(D_MODEL)
    assert ask(servers.keyed, OPENAI_API_KEY=KEY) == str(D_MODEL)
    assert ask(servers.keyed, OPENAI_API_KEY=WRONG_KEY) == "refused: 401 invalid_api_key"
    for reply in (
        ask(servers.right),
        ask(servers.right, made.stranger.cert, made.stranger.key),
        ask(servers.right, scheme="http"),
        ask(servers.plain),
    ):
        assert reply.startswith("refused: ")
    for fault, server in servers.faulty.items():
        assert FAULTS[fault] in ask(server).lower()


@pytest.mark.parametrize("language", ["javascript", "go"])
def test_examples(servers: Servers, tmp_path: Path, language: str) -> None:
    """Run the examples in clients/examples, which use grpc-js and grpc-go.

    With a right certificate or key, an example prints a vector. With a wrong key or without a certificate, the example
    fails.
    """
    made = servers.made
    if language == "go":
        command: list[Any] = [go_example(tmp_path)]
        unavailable, unauthenticated = "Unavailable", "Unauthenticated"
    else:
        script = npm_folder(ROOT / "clients/examples/javascript") / "encode.js"
        command = [program("node", "nodejs"), script]
        unavailable, unauthenticated = "UNAVAILABLE", "UNAUTHENTICATED"
    files = {"ENCSERVE_CA": str(made.ca), "ENCSERVE_PROTO": str(ROOT / "proto")}
    pair = {"ENCSERVE_CERT": str(made.client.cert), "ENCSERVE_TLS_KEY": str(made.client.key)}

    def encode(server: RealServer, **environment: str) -> subprocess.CompletedProcess[str]:
        return execute(*command, f"localhost:{server.grpc_port}", "w3 w4", **files, **environment)

    for done in (encode(servers.right, **pair), encode(servers.keyed, ENCSERVE_API_KEY=KEY)):
        assert '"vector"' in done.stdout, done.stderr
    done = encode(servers.right)
    assert (done.returncode, unavailable in done.stderr) == (1, True)
    done = encode(servers.keyed, ENCSERVE_API_KEY=WRONG_KEY)
    assert (done.returncode, unauthenticated in done.stderr) == (1, True)
    assert "unknown or revoked key" in done.stderr
