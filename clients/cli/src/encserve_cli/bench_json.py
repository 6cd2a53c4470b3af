"""The JSON of `encserve bench`; docs/bench.md says what its fields mean. Pure but for the environment."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import grpc

import encserve_client
from encserve_cli.load.samples import PERCENTILES, LoadResult, percentile
from encserve_cli.load.workload import Workload
from encserve_client import ModelInfo

FORMAT_VERSION = 1
_MODEL_FIELDS = ("name", "version", "fingerprint", "d_model", "max_sequence_tokens", "provider", "precision")


def document(
    settings: Any, started_at: datetime, info: ModelInfo, workload: Workload, results: Sequence[LoadResult]
) -> dict[str, Any]:
    """Everything, as what JSON can hold. `settings` is a dataclass."""
    return {
        "format_version": FORMAT_VERSION,
        "started_at": started_at.isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "environment": {
            "client_version": encserve_client.__version__,
            "grpc_version": grpc.__version__,
            "python_version": platform.python_version(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
        },
        "model": {name: getattr(info, name) for name in _MODEL_FIELDS},
        "workload": {
            "kind": workload.kind,
            "source": workload.source,
            "calls": len(workload.calls),
            "sequences": workload.sequences,
            "mean_tokens": workload.mean_tokens,
            "longest_tokens": workload.longest_tokens,
            "cut_sequences": workload.cut_sequences,
        },
        "runs": [run(result) for result in results],
    }


def run(result: LoadResult) -> dict[str, Any]:
    """One run."""
    latency = result.latency_seconds
    return {
        "mode": result.mode,
        "concurrency": result.concurrency,
        "rate_per_second": result.rate_per_second,
        "processes": result.processes,
        "stream": result.stream,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "calls": result.calls,
        "sequences": result.sequences,
        "tokens": result.tokens,
        "calls_per_second": result.calls_per_second,
        "sequences_per_second": result.sequences_per_second,
        "tokens_per_second": result.tokens_per_second,
        "latency_seconds": {
            "samples": len(latency),
            "mean": float(latency.mean()) if len(latency) else None,
            **{percentile_name(percent): percentile(latency, percent) for percent in PERCENTILES},
            "max": percentile(latency, 100),
        },
        "errors": [
            {"status": status, "count": count, "example": result.error_examples.get(status, "")}
            for status, count in result.errors.items()
        ],
        "error_latency_seconds": {
            "p50": percentile(result.error_latency_seconds, 50),
            "p99": percentile(result.error_latency_seconds, 99),
            "max": percentile(result.error_latency_seconds, 100),
        },
        "lateness_seconds": {
            "p99": percentile(result.lateness_seconds, 99),
            "max": percentile(result.lateness_seconds, 100),
        },
        "held_calls": result.held_calls,
        "generator_cpu_seconds": result.generator_cpu_seconds,
        "server": None if result.server is None else asdict(result.server),
        "server_missing": result.server_missing,
    }


def percentile_name(percent: float) -> str:
    """As a field: p50, p99_9."""
    return f"p{percent:g}".replace(".", "_")
