"""Jobs embed the rows of many files into a folder of Parquet files.

A second run of the same job makes only the missing parts.

`embed_files` runs a whole job. An `EmbedJob` has a plan before the run, and can be stopped.
"""

from encserve_cli.files.reading import InputKind, ReadOptions
from encserve_cli.job.api import RayOptions, embed_files
from encserve_cli.job.job import Backend, EmbedJob
from encserve_cli.job.local import EngineOptions, LocalBackend
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan
from encserve_cli.job.run import JobSummary, LocalWorker, TooManyRejected, Worker
from encserve_cli.job.server import ServerBackend
from encserve_cli.job.types import Encoded, Encoder, InputFile, Part, Shard, Stopped
from encserve_cli.progress import JobProgress, OnProgress

__all__ = [
    "Backend",
    "EmbedJob",
    "Encoded",
    "Encoder",
    "EngineOptions",
    "InputFile",
    "InputKind",
    "JobProgress",
    "JobSummary",
    "LocalBackend",
    "LocalWorker",
    "MakeOptions",
    "ModelFacts",
    "OnProgress",
    "Part",
    "Plan",
    "RayOptions",
    "ReadOptions",
    "ServerBackend",
    "Shard",
    "Stopped",
    "TooManyRejected",
    "Worker",
    "embed_files",
]
