"""Writes the Grafana dashboards: deploy/grafana/dashboards/*.json, or into another folder."""

import argparse
import json
from pathlib import Path

from dashboards import batching, latency, models, service
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parent.parent / "deploy/grafana/dashboards"
BOARDS = {"service": service.build, "latency": latency.build, "batching": batching.build, "models": models.build}


def main(folder: Path) -> None:
    """Writes every dashboard into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, build in BOARDS.items():
        text = json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    main(parser.parse_args().folder)
