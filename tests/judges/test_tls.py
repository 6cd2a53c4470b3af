"""Real clients against TLS, mutual TLS and keys: who gets in, and who is refused or refuses."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates, Pair, make_certificates
from judging import JUDGES, ROOT, npm_folder, program, python_environment, run
from real_server import RealServer, real_server
from tiny_bundle import D_MODEL, write_bundle
from tiny_heads import words

from encserve_client import EncoderClient, RetryPolicy, ServerUnavailableError, Tls, UnauthenticatedError

pytestmark = pytest.mark.timeout(900)  # the first run installs the judges

VERSIONS = pytest.mark.parametrize("version", ["1.2", "1.3"])
WRONG = pytest.mark.parametrize("wrong", ["expired", "other_name", "stranger"])
# What a certificate needs to be there when the server starts, and to have expired when it is asked.
_SHORT_SECONDS = 20.0
# What curl ends with where the server ends the connection; 60 where an alert says that a certificate has expired.
REFUSED = (35, 52, 55, 56, 60)
KEY, WRONG_KEY = "encserve-the-right-key", "encserve-a-wrong-key"


@dataclass(frozen=True, slots=True)
class Servers:
    """One server for each of the certificates that a server may have.

    Attributes:
        made: All certificates.
        right: Needs certificates of its callers.
        keyed: Needs a key of its callers, and no certificate.
        wrong: By what is wrong; none of these needs any.
        plain: Without TLS.
    """

    made: Certificates
    right: RealServer
    keyed: RealServer
    wrong: dict[str, RealServer]
    plain: RealServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("tls")
    write_bundle(folder / "models", tokenizer=words())
    begun = time.monotonic()
    made = make_certificates(folder)
    short = made.authority.issue("short", days=_SHORT_SECONDS / 86400)
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
        time.sleep(max(begun + _SHORT_SECONDS + 2 - time.monotonic(), 0))
        yield Servers(made, right, keyed, {"expired": expired, "other_name": other_name, "stranger": stranger}, plain)


def tried(*command: Any, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """What a program says, whether it succeeds or not."""
    return subprocess.run(
        list(map(str, command)),
        input=text,
        capture_output=True,
        text=True,
        errors="replace",  # HTTP/2 is no text
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def shake(port: int | None, made: Certificates, version: str, shown: Pair | None, *alpn: str) -> str | None:
    """Which TLS a careful Python program gets; raises what its ssl raises."""
    context = ssl.create_default_context(cafile=made.ca)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[f"TLSv{version.replace('.', '_')}"]
    context.set_alpn_protocols(list(alpn))
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    with (
        socket.create_connection(("127.0.0.1", port or 0), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        encrypted.settimeout(0.2)
        with contextlib.suppress(TimeoutError):  # of TLS 1.3 a client certificate is refused after the handshake
            if not encrypted.recv(1):
                raise ConnectionError("the server has ended the connection")
        return encrypted.version()


def ports_of(server: RealServer) -> list[tuple[int | None, str]]:
    """Its ports, and what each speaks."""
    return [(server.grpc_port, "h2"), (server.http_port, "http/1.1"), (server.metrics_port, "http/1.1")]


@VERSIONS
def test_python(servers: Servers, version: str) -> None:
    """Python's ssl, on every port."""
    made, right = servers.made, servers.right
    for port, alpn in ports_of(right):
        assert shake(port, made, version, made.client, alpn) == f"TLSv{version}"
        for shown in (made.expired, made.stranger):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                shake(port, made, version, shown, alpn)
    for port, alpn in ports_of(right)[:2]:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            shake(port, made, version, None, alpn)
    assert shake(right.metrics_port, made, version, None) == f"TLSv{version}"  # probes have none
    words = {"expired": "certificate has expired", "other_name": "Hostname mismatch", "stranger": "local issuer"}
    for wrong, server in servers.wrong.items():
        for port, alpn in ports_of(server):
            with pytest.raises(ssl.SSLCertVerificationError, match=words[wrong]):
                shake(port, made, version, None, alpn)
    for port, alpn in ports_of(servers.plain):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            shake(port, made, version, None, alpn)


def said(command: str | Path, server: RealServer, *flags: str | Path, **environment: str) -> str:
    """What the command says of a call that fails, in one line."""
    target = f"localhost:{server.grpc_port}"
    done = tried(command, "--target", target, "--timeout", "5", *flags, "embed", "w3 w4", **environment)
    assert done.returncode == 1
    return " ".join(done.stderr.split())


def test_our_client_names_the_cause(servers: Servers) -> None:
    """Python and the command, of every connection that does not come about."""
    made, right = servers.made, servers.right
    command = Path(sys.executable).parent / "encserve"
    shown = Tls(ca=made.ca, cert=made.client.cert, key=made.client.key)
    with EncoderClient(f"localhost:{right.grpc_port}", tls=shown) as client:
        assert client.embed(["w3 w4"]).shape == (1, D_MODEL)
    cases: list[tuple[RealServer, Tls | None, str]] = [
        (right, None, "the server speaks TLS, this client plaintext"),
        (right, Tls(ca=made.ca), "the server wants a client certificate"),
        (servers.keyed, None, "the server speaks TLS, this client plaintext"),
        (servers.plain, Tls(ca=made.ca), "the server speaks plaintext, this client TLS"),
        (servers.wrong["expired"], Tls(ca=made.ca), "the server's certificate has expired"),
        (servers.wrong["other_name"], Tls(ca=made.ca), "is not for 'localhost', but for 'other.example'"),
        (servers.wrong["stranger"], Tls(ca=made.ca), f"is of an authority that is not in {made.ca}"),
        *(
            (right, Tls(ca=made.ca, cert=it.cert, key=it.key), f"does not take the client certificate of {it.cert}")
            for it in (made.expired, made.stranger)
        ),
    ]
    for server, tls, cause in cases:
        # The server's name, and an address beside one that nothing listens on, whose error is told last.
        for target in (f"localhost:{server.grpc_port}", f"ipv4:127.0.0.1:{server.grpc_port},127.0.0.1:1"):
            name = None if target.startswith("localhost") else "localhost"
            its = tls is not None and Tls(ca=tls.ca, cert=tls.cert, key=tls.key, server_name=name)
            with (
                EncoderClient(target, tls=its, retry=RetryPolicy(max_attempts=1)) as client,
                pytest.raises(ServerUnavailableError) as refused,
            ):
                client.embed(["w3 w4"])
            assert cause in str(refused.value), target
        flags = [] if tls is None else ["--ca", str(tls.ca)]
        flags += [] if tls is None or tls.cert is None else ["--cert", str(tls.cert), "--key", str(tls.key)]
        assert cause in said(command, server, *flags)


def test_our_client_and_keys(servers: Servers) -> None:
    made, keyed = servers.made, servers.keyed
    command, target = Path(sys.executable).parent / "encserve", f"localhost:{keyed.grpc_port}"
    with EncoderClient(target, tls=Tls(ca=made.ca), token=KEY) as client:
        assert client.embed(["w3 w4"]).shape == (1, D_MODEL)
    for key, cause in ((WRONG_KEY, "the key is not known here"), (None, "no key: send it as")):
        with (
            EncoderClient(target, tls=Tls(ca=made.ca), token=key) as client,
            pytest.raises(UnauthenticatedError, match=cause) as refused,
        ):
            client.embed(["w3 w4"])
        assert WRONG_KEY not in repr(refused.value)
        environment = {} if key is None else {"ENCSERVE_API_KEY": key}
        told = said(command, keyed, "--ca", made.ca, **environment)
        assert cause in told
        assert WRONG_KEY not in told
    for name in ("ENCSERVE_API_KEY", "ENCSERVE_TOKEN"):
        done = tried(command, "--target", target, "--ca", made.ca, "embed", "w3 w4", **{name: KEY})
        assert done.returncode == 0, done.stderr


def s_client(made: Certificates, port: int | None, version: str, shown: Pair | None, *more: str) -> tuple[int, str]:
    """The exit status of openssl s_client, and what came back of a request for /health."""
    done = tried(
        *(program("openssl", "openssl"), "s_client", "-connect", f"127.0.0.1:{port}", "-servername", "localhost"),
        *("-CAfile", made.ca, "-verify_return_error", "-verify_hostname", "localhost", "-ign_eof"),
        *(f"-tls{version.replace('.', '_')}", *more),
        *(() if shown is None else ("-cert", shown.cert, "-key", shown.key)),
        text="GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    return done.returncode, done.stdout + done.stderr


@VERSIONS
def test_openssl(servers: Servers, version: str) -> None:
    made, right = servers.made, servers.right
    status, said = s_client(made, right.http_port, version, made.client)
    assert status == 0, said
    assert "Verify return code: 0 (ok)" in said
    assert "HTTP/1.1 200 OK" in said
    assert f"TLSv{version}" in said
    for shown in (None, made.expired, made.stranger):
        status, said = s_client(made, right.http_port, version, shown)  # uvloop sends no alert
        assert status != 0
        assert "HTTP/1.1" not in said
    status, said = s_client(made, right.grpc_port, version, made.client, "-alpn", "h2", "-no_ign_eof")
    assert "Verify return code: 0 (ok)" in said
    assert "ALPN protocol: h2" in said
    status, said = s_client(made, servers.plain.http_port, version, made.client)
    assert status != 0
    assert "wrong version number" in said


@VERSIONS
@WRONG
def test_openssl_refuses(servers: Servers, version: str, wrong: str) -> None:
    words = {"expired": "certificate has expired", "other_name": "hostname mismatch", "stranger": "local issuer"}
    server = servers.wrong[wrong]
    for port, more in ((server.http_port, ()), (server.grpc_port, ("-alpn", "h2"))):
        status, said = s_client(servers.made, port, version, None, *more)
        assert status != 0
        assert words[wrong] in said.lower()
        assert "HTTP/1.1" not in said


def curl(made: Certificates, url: str, shown: Pair | None, version: str, *more: str) -> tuple[int, str]:
    """curl's exit status, and the HTTP status."""
    done = tried(
        *(program("curl", "curl"), "--silent", "--show-error", "--noproxy", "*", "--cacert", made.ca),
        *(f"--tlsv{version}", "--tls-max", version, "--output", os.devnull, "--write-out", "%{http_code}"),
        *(() if shown is None else ("--cert", shown.cert, "--key", shown.key)),
        *("--json", '{"input": "w3 w4"}', *more, url),
    )
    return done.returncode, done.stdout


@VERSIONS
def test_curl(servers: Servers, version: str) -> None:
    made, right = servers.made, servers.right
    url = f"https://localhost:{right.http_port}/v1/embeddings"
    assert curl(made, url, made.client, version) == (0, "200")
    for shown in (None, made.expired, made.stranger):
        status, code = curl(made, url, shown, version)
        assert (status in REFUSED, code) == (True, "000"), status
    assert curl(made, url.replace("https", "http"), None, version)[1] == "000"
    assert curl(made, f"https://localhost:{servers.plain.http_port}/v1/embeddings", None, version) == (35, "000")
    for server in servers.wrong.values():
        assert curl(made, f"https://localhost:{server.http_port}/v1/embeddings", None, version) == (60, "000")
    url = f"https://localhost:{servers.keyed.http_port}/v1/embeddings"
    for header in (f"authorization: Bearer {KEY}", f"api-key: {KEY}", f"x-api-key: {KEY}"):
        assert curl(made, url, None, version, "--header", header) == (0, "200")
        assert curl(made, url, None, version, "--header", header.replace(KEY, WRONG_KEY)) == (0, "401")
    assert curl(made, url, None, version) == (0, "401")


@VERSIONS
def test_curl_and_the_metrics_page(servers: Servers, version: str) -> None:
    """With an authority of callers /metrics needs a certificate, and /healthz none."""
    made = servers.made
    for path, shown, got in (
        ("/metrics", made.client, (0, "200")),
        ("/metrics", None, (0, "403")),
        ("/healthz", made.client, (0, "200")),
        ("/healthz", None, (0, "200")),
    ):
        url = f"https://localhost:{servers.right.metrics_port}{path}"
        assert curl(made, url, shown, version, "--request", "GET") == got
    url = f"https://localhost:{servers.right.metrics_port}/metrics"
    for wrong in (made.expired, made.stranger):
        status, code = curl(made, url, wrong, version, "--request", "GET")
        assert (status in REFUSED, code) == (True, "000"), status


def test_openai(servers: Servers) -> None:
    made = servers.made
    python = python_environment("clients") / "python"

    def ask(server: RealServer, *shown: Path, scheme: str = "https", **environment: str) -> str:
        url = f"{scheme}://localhost:{server.http_port}"
        return run([python, JUDGES / "openai_tls_judge.py", url, made.ca, *shown], environment=environment).strip()

    assert ask(servers.right, made.client.cert, made.client.key) == str(D_MODEL)
    assert ask(servers.keyed, OPENAI_API_KEY=KEY) == str(D_MODEL)
    assert ask(servers.keyed, OPENAI_API_KEY=WRONG_KEY) == "refused: 401 invalid_api_key"
    for refused in (
        ask(servers.right),
        ask(servers.right, made.stranger.cert, made.stranger.key),
        ask(servers.right, made.expired.cert, made.expired.key),
        ask(servers.right, scheme="http"),
        ask(servers.plain),
    ):
        assert refused.startswith("refused: ")
    words = {"expired": "certificate has expired", "other_name": "Hostname mismatch", "stranger": "local issuer"}
    for wrong, server in servers.wrong.items():
        assert words[wrong] in ask(server)


def of(made: Certificates, shown: Pair | None) -> dict[str, str]:
    """The environment of the examples."""
    files = {"ENCSERVE_CA": str(made.ca)}
    return files if shown is None else files | {"ENCSERVE_CERT": str(shown.cert), "ENCSERVE_KEY": str(shown.key)}


def test_javascript(servers: Servers) -> None:
    """grpc-js: a call with its certificate, and one without; a call with a key, and one with a wrong one."""
    made, target = servers.made, f"localhost:{servers.right.grpc_port}"
    script = npm_folder(ROOT / "clients/examples/javascript") / "encode.js"
    command = [program("node", "nodejs"), script, target, "w3 w4"]
    proto = {"ENCSERVE_PROTO": str(ROOT / "proto")}
    right = tried(*command, **proto, **of(made, made.client))
    assert '"vector"' in right.stdout, right.stderr
    wrong = tried(*command, **proto, **of(made, None))
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("UNAVAILABLE: ")
    command[2] = f"localhost:{servers.keyed.grpc_port}"
    right = tried(*command, **proto, **of(made, None), ENCSERVE_API_KEY=KEY)
    assert '"vector"' in right.stdout, right.stderr
    wrong = tried(*command, **proto, **of(made, None), ENCSERVE_API_KEY=WRONG_KEY)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("UNAUTHENTICATED: the key is not known here")


def test_go(servers: Servers, tmp_path: Path) -> None:
    """grpc-go: a call with its certificate, and one without; a call with a key, and one with a wrong one."""
    debian = "golang-go golang-google-grpc-dev protobuf-compiler-grpc protoc-gen-go-1-5"
    go = program("go", debian)
    build = tmp_path / "build"
    (build / "src").mkdir(parents=True)
    out = [f"--go_out={build}/src", f"--go-grpc_out={build}/src"]
    run([program("protoc", debian), "-I", ROOT / "proto", *out, "encserve/v1/encoder.proto"])
    shutil.copy(ROOT / "clients/examples/go/main.go", tmp_path)
    environment = {"GO111MODULE": "off", "GOPATH": f"{build}:/usr/share/gocode", "GOCACHE": str(ROOT / ".cache/go")}
    run([go, "build", "-o", tmp_path / "encode", "main.go"], cwd=tmp_path, environment=environment)
    command = [tmp_path / "encode", f"localhost:{servers.right.grpc_port}", "w3 w4"]
    right = tried(*command, **of(servers.made, servers.made.client))
    assert '"vector"' in right.stdout, right.stderr
    wrong = tried(*command, **of(servers.made, None))
    assert wrong.returncode == 1
    assert "Unavailable" in wrong.stderr
    command[1] = f"localhost:{servers.keyed.grpc_port}"
    right = tried(*command, **of(servers.made, None), ENCSERVE_API_KEY=KEY)
    assert '"vector"' in right.stdout, right.stderr
    wrong = tried(*command, **of(servers.made, None), ENCSERVE_API_KEY=WRONG_KEY)
    assert wrong.returncode == 1
    assert "Unauthenticated" in wrong.stderr
    assert "the key is not known here" in wrong.stderr
