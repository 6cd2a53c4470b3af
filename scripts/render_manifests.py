"""Renders the Helm chart, and writes deploy/kubernetes/encserve.yaml, the chart's output with the default values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/encserve"
OUTPUT = ROOT / "deploy/kubernetes/encserve.yaml"


class ChartError(Exception):
    """The chart refuses the given values. The text of the error names the wrong value."""


def render(values: Mapping[str, Any], name: str = "encserve", namespace: str = "encserve") -> str:
    """Return the chart's resources as YAML, as `helm template NAME --namespace NAMESPACE` prints them.

    Args:
        values: The values that replace default values of values.yaml.
        name: The name of the release.
        namespace: The namespace of the release.

    Raises:
        ChartError: The chart refuses the values.
    """
    try:
        with helm_python.Chart.load(str(CHART)) as chart:
            chart.validate_schema(dict(values))
            files = chart.render(dict(values), name=name, namespace=namespace)
    except helm_python.HelmError as error:
        raise ChartError(str(error)) from error
    texts = {path: text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml")}
    return "".join(f"---\n{text}\n" for text in texts.values() if text)


def main() -> None:
    """Write the chart's output with the default values."""
    OUTPUT.write_text(f"# `make manifests` writes this file from deploy/helm/encserve.\n{render({})}", encoding="utf-8")


if __name__ == "__main__":
    main()
