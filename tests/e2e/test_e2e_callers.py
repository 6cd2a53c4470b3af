"""Tests of a server whose callers file changes under load, and of a server whose reads of settings files hang."""

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from real_server import RealServer, real_server
from tiny_bundle import write_bundle

from encserve_client import EncoderClient, UnauthenticatedError
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub
from encserve_server.callers.keys import digest_of, make_key

EFFECT_SECONDS = 2.0


class Load(threading.Thread):
    """A thread that makes one gRPC call after another, and records the times of replies and refusals."""

    def __init__(self, server: RealServer, key: str) -> None:
        super().__init__(daemon=True)
        self.answered: list[float] = []
        self.refused: list[float] = []
        self._server = server
        self._key = key
        self._finished = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._finished.is_set():
            try:
                self._call()
            except UnauthenticatedError:
                self.refused.append(time.monotonic())
                time.sleep(0.01)

    def _call(self) -> None:
        """Make calls until `finish` is called. A refused call raises UnauthenticatedError."""
        with EncoderClient(self._server.target, api_key=self._key) as client:
            while not self._finished.is_set():
                client.token_vectors([[1, 2, 3]])
                self.answered.append(time.monotonic())

    def finish(self) -> None:
        self._finished.set()
        self.join(timeout=30)
        assert not self.is_alive()


class HttpLoad(Load):
    """A thread that makes HTTP calls instead of gRPC calls. After each refusal, the thread opens a new connection."""

    def _call(self) -> None:
        url, body = f"{self._server.url}/v1/embeddings", {"input": [1, 2, 3], "model": "tiny"}
        with httpx.Client(headers={"api-key": self._key}, trust_env=False) as client:
            while not self._finished.is_set():
                answer = client.post(url, json=body)
                if answer.status_code == 401:
                    raise UnauthenticatedError(answer.text)
                answer.raise_for_status()
                self.answered.append(time.monotonic())


class StreamLoad(Load):
    """A thread that sends requests in a gRPC stream. A refusal ends the stream; then the thread opens a new stream."""

    def _call(self) -> None:
        request = pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[1, 2, 3]))])
        may_send = threading.Semaphore(2)
        metadata = (("authorization", f"Bearer {self._key}"),)

        def requests() -> Iterator[pb.EncodeStreamRequest]:
            for number in itertools.count():
                may_send.acquire()
                if self._finished.is_set():
                    return
                yield pb.EncodeStreamRequest(request_id=str(number), request=request)

        with grpc.insecure_channel(self._server.target) as channel:
            try:
                for answer in EncoderServiceStub(channel).EncodeStream(requests(), metadata=metadata):
                    assert not answer.HasField("error"), answer.error
                    self.answered.append(time.monotonic())
                    may_send.release()
            except grpc.RpcError as error:
                raise UnauthenticatedError(str(error.details())) from error
            finally:
                may_send.release()


def file_of(*keys: str) -> str:
    entries = [f'[[caller]]\nname = "caller-{key[-8:]}"\nkey_sha256 = ["{digest_of(key).hex()}"]' for key in keys]
    return "\n".join(entries)


def test_a_key_is_revoked_under_load(tmp_path: Path) -> None:
    """The server refuses a revoked key within 2 s, and still accepts valid keys."""
    write_bundle(tmp_path / "models")
    valid, revoked = (make_key().replace("_", "a").replace("-", "b") for _ in range(2))
    file, link = tmp_path / "callers-1.toml", tmp_path / "callers.toml"
    file.write_text(file_of(valid, revoked))
    link.symlink_to(file)  # Kubernetes also mounts files as symbolic links
    with real_server(tmp_path / "models", "--http-port", "0", "--callers", str(link)) as server:
        kinds = (Load, HttpLoad, StreamLoad)
        kept, cut_off, wrong = ([kind(server, key) for kind in kinds] for key in (valid, revoked, "encserve-wrong"))
        time.sleep(1.0)
        (tmp_path / "callers-2.toml").write_text(file_of(valid))
        swapped = tmp_path / "next.toml"
        swapped.symlink_to(tmp_path / "callers-2.toml")
        began_at = time.monotonic()
        swapped.rename(link)
        revoked_at = time.monotonic()
        time.sleep(EFFECT_SECONDS + 1)
        for load in (*kept, *cut_off, *wrong):
            load.finish()
        for load in cut_off:
            assert load.answered
            assert max(load.answered) < revoked_at + EFFECT_SECONDS
            assert min(load.refused) > began_at
        for load in kept:
            assert load.answered[-1] > revoked_at + EFFECT_SECONDS
            assert not load.refused
        assert not any(load.answered for load in wrong)
        log = "".join(map(str, server.log))
    refusals = [line for line in server.log if line["message"] == "calls were refused, or failed"]
    assert sum(line["count"] for line in refusals) == sum(len(load.refused) for load in (*cut_off, *wrong))
    assert 3 <= len(refusals) <= 10  # the server logs a refusal at once, and then once per second
    assert valid not in log
    assert revoked not in log


# This program is encserve-server with one change: the second read of a file never returns, as on a network disk whose
# server is down.
HANGING = f"""#!{sys.executable}
import threading
from encserve_server.__main__ import main
from encserve_server.system import files, watched_files

read, reads = files.read_small, []

def read_once(path):
    if path in reads:
        threading.Event().wait()
    reads.append(path)
    return read(path)

files.read_small, watched_files.READ_SECONDS = read_once, 0.1
main()
"""


@pytest.mark.parametrize("setting", ["--callers", "--api-key-file"])
def test_calls_and_sigterm_work_while_a_read_hangs(tmp_path: Path, setting: str) -> None:
    """The log and a metric report a file whose read hangs. The server still answers calls, and ends after SIGTERM."""
    program = tmp_path / "encserve-server"
    program.write_text(HANGING)
    program.chmod(0o755)
    write_bundle(tmp_path / "models")
    file, key = tmp_path / "callers", make_key()
    file.write_text(file_of(key) if setting == "--callers" else key)
    with real_server(tmp_path / "models", "--drain-delay-seconds", "0", setting, str(file), program=program) as server:
        while not server.metric("encserve_callers_file_refused"):
            time.sleep(0.05)
        with EncoderClient(server.target, api_key=key) as client:
            client.token_vectors([[1, 2, 3]])
        server.terminate()
        assert server.wait() == 0
    problems = [line["message"] for line in server.log if "callers not loaded" in line["message"]]
    assert len(problems) == 1
    assert f"{setting} {file} could not be read in 0.1 s" in problems[0]
