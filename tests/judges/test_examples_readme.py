"""Runs the commands of clients/examples/go/README.md and clients/examples/javascript/README.md in order."""

import json
import re
import shutil
from pathlib import Path

import pytest
from certificates import make_certificates
from docs_text import code_blocks
from judging import DEBIAN_GO, ROOT, program, run, with_ports
from real_server import RealServer, real_server
from tiny_bundle import write_bundle
from tiny_heads import words

from encserve_server.callers.keys import make_key

pytestmark = pytest.mark.timeout(900)  # npm downloads packages

PROGRAMS = {"go": dict.fromkeys(("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"), DEBIAN_GO)}
PROGRAMS["javascript"] = {"node": "nodejs", "npm": "npm"}


@pytest.mark.parametrize("language", PROGRAMS)
def test_commands(language: str, minilm: RealServer, tmp_path: Path) -> None:
    """All blocks run in one shell, because later blocks use variables of the first block.

    The first two blocks call a server without TLS. The last block calls a server that requires TLS, a client
    certificate and a key. The test leaves out `apt-get`, because `apt-get` needs root. CI installs the packages before.
    """
    for name, package in PROGRAMS[language].items():
        program(name, package)
    folder = tmp_path / "clients/examples" / language
    shutil.copytree(ROOT / "clients/examples" / language, folder, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    install, query, encrypted = (code for _, code in code_blocks((folder / "README.md").read_text(), ""))
    install = re.sub(r"^apt-get (?:.*\\\n)*.*\n", "", install)

    made, key = make_certificates(folder), make_key()
    (tmp_path / "keys").write_text(key)
    write_bundle(tmp_path / "models", tokenizer=words())
    flags = ["--tls-cert-file", made.server.cert, "--tls-key-file", made.server.key, "--tls-client-ca-file", made.ca]
    flags += ["--api-key-file", tmp_path / "keys"]
    with real_server(tmp_path / "models", *map(str, flags)) as server:
        assert "encserve-…" in encrypted
        commands = with_ports(install + query, minilm) + with_ports(encrypted, server).replace("encserve-…", key)
        cache = {"GOCACHE": str(ROOT / ".cache/go")}
        bash = ["/bin/bash", "-euo", "pipefail", "-c", commands]
        printed = run(bash, cwd=folder, environment=cache, installs="npm install" in commands)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [(it["text"], len(it.get("vector", ()))) for it in found[:2] + found[4:]] == [
        ("I understand this", 384),
        ("and that", 384),
        ("I understand this", 8),
    ]
    assert [it["text"] for it in found[2:4]] == ["a cat", "a car"]
    assert found[2]["score"] > found[3]["score"]
