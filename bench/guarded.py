"""Measures what keys and TLS cost: three servers, asked in turns by 64 callers of one text each.

    python bench/guarded.py MODEL_REPOSITORY [--rounds 8] [--seconds 3]

One server lets everybody call, one has a callers file, and one has a callers file and TLS. Ratios are those within a
round: of calls a second, and of the calls that a server answers in a second of its own CPU time, which other work on
the machine disturbs less.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from certificates import make_certificates
from harness.machine import cpu_seconds
from harness.rounds import spread
from harness.workload import choose_lengths, open_tokenizer, read_newest, text_workload
from real_server import real_server

from encserve_cli.load import Request, make_text_calls
from encserve_cli.load.loops import closed_loop
from encserve_cli.load.senders import Connection
from encserve_client import EncoderClient, Tls
from encserve_server.callers.keys import digest_of, make_key

CALLERS, TEXTS = 64, 2000


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args(arguments)
    bundle = read_newest(options.model_repository, None)
    if bundle.tokenizer_file is None:
        parser.error(f"{bundle.name} has no tokenizer, so it takes no text")
    lengths = choose_lengths(TEXTS, seed=0, longest=bundle.max_sequence_tokens)
    texts = text_workload(lengths, open_tokenizer(bundle.tokenizer_file), seed=0).texts
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key, file, made = make_key(), folder / "callers.toml", make_certificates(folder)
        file.write_text(f'[[caller]]\nname = "bench"\nkey_sha256 = ["{digest_of(key).hex()}"]\n')
        with_keys = ("--callers", str(file))
        with_tls = (*with_keys, "--tls-cert-file", str(made.server.cert), "--tls-key-file", str(made.server.key))
        plain, keys, tls = (
            stack.enter_context(real_server(options.model_repository, *it)) for it in ((), with_keys, with_tls)
        )
        sides = {
            "open": (plain, Connection(target=plain.target)),
            "keys": (keys, Connection(target=keys.target, token=key)),
            "keys and TLS": (tls, Connection(target=f"localhost:{tls.grpc_port}", token=key, tls=Tls(ca=made.ca))),
        }
        with EncoderClient(plain.target) as client:
            calls = make_text_calls(texts, client.model(), Request(pooling="model", truncate=True))
        rates: dict[str, list[float]] = {name: [] for name in sides}
        of_cpu: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(options.rounds):
            for name in list(sides)[:: 1 if i % 2 else -1]:
                server, connection = sides[name]
                began = cpu_seconds(server.process.pid)
                result = closed_loop(
                    connection, calls, concurrency=CALLERS, seconds=options.seconds, warmup_seconds=0.5
                )
                rates[name].append(result.calls_per_second)
                answered = result.calls_per_second * result.seconds
                of_cpu[name].append(answered / (cpu_seconds(server.process.pid) - began))
    print(json.dumps({"calls_per_second": rates, "calls_per_cpu_second": of_cpu}))
    for what, found in (("calls a second", rates), ("calls a second of CPU", of_cpu)):
        for name in list(sides)[1:]:
            its = spread([it / base for it, base in zip(found[name], found["open"], strict=True)])
            print(f"{what}, {name}: {its.median:.3f} [{its.low:.3f}, {its.high:.3f}]")


if __name__ == "__main__":
    main()
