"""A server works if its standard input, output or error is closed, or if no process reads its output."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from ports import free_port
from real_server import COMMAND
from tiny_bundle import write_bundle
from waiting import until

REQUEST = {"input": [[1, 2]], "pooling": "mean"}


async def serve_and_stop(folder: Path, shell: str, **streams: int) -> None:
    """Start a server with shell redirections, such as ">&-". Send a valid call, an invalid call and SIGTERM.

    The server answers, and ends with exit status 0.
    """
    write_bundle(folder)
    port = free_port()
    command = f'exec "$@" --access-log --grpc-port 0 --metrics-port 0 --http-port {port} --no-tune-batches {shell}'
    arguments = ["sh", "-c", command, "sh", COMMAND, "--model-repository", folder]
    process = await asyncio.create_subprocess_exec(*arguments, **streams)  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            async def is_healthy() -> bool:
                assert process.returncode is None
                try:
                    return (await client.get("/health")).is_success
                except httpx.TransportError:
                    return False

            await until(is_healthy)
            assert (await client.post("/v1/embeddings", json=REQUEST)).is_success
            assert (await client.post("/v1/embeddings", json=REQUEST | {"input": []})).is_client_error
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_the_server_works_with_closed_standard_streams(tmp_path: Path, shell: str) -> None:
    await serve_and_stop(tmp_path, shell)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_the_server_works_with_a_full_output_pipe(tmp_path: Path, stream: str) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
        await serve_and_stop(tmp_path, "", **{stream: writer})
    finally:
        os.close(reader)
        os.close(writer)
