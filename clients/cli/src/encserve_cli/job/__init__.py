"""Jobs: the rows of many files embedded into a folder of Parquet files, which a job that is run again completes.

`embed_files` does all of it; `EmbedJob` has the plan first, and can be stopped.
"""

from encserve_cli.job.api import RayOptions, embed_files
from encserve_cli.job.job import EmbedJob, Opened, Source
from encserve_cli.job.local import EngineOptions, LocalSource
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan
from encserve_cli.job.run import JobProgress, JobSummary, OnProgress, TooManyRejected
from encserve_cli.job.server import ServerSource
from encserve_cli.job.types import (
    Encoded,
    Encoder,
    InputFile,
    InputKind,
    Part,
    PartLimits,
    ReadOptions,
    Scan,
    Stopped,
)

__all__ = [
    "EmbedJob",
    "Encoded",
    "Encoder",
    "EngineOptions",
    "InputFile",
    "InputKind",
    "JobProgress",
    "JobSummary",
    "LocalSource",
    "MakeOptions",
    "ModelFacts",
    "OnProgress",
    "Opened",
    "Part",
    "PartLimits",
    "Plan",
    "RayOptions",
    "ReadOptions",
    "Scan",
    "ServerSource",
    "Source",
    "Stopped",
    "TooManyRejected",
    "embed_files",
]
