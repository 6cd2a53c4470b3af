"""What the dashboards have in common: variables, and panels with the settings that all of them share."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# The one that deploy/grafana provisions; any other can be chosen.
DATASOURCE_UID = "encserve-prometheus"
# What every selector has, by the labels that its metric has.
INSTANCE = 'instance=~"$instance"'
MODEL = f'model=~"$model", {INSTANCE}'
GRPC = f'grpc_service=~"encserve.v1.EncoderService|inference.GRPCInferenceService", {INSTANCE}'
ENCODE = f'priority="interactive", {INSTANCE}'  # of encserve_answer_seconds: what somebody waits for
RATE = "[$__rate_interval]"
# As in deploy/prometheus/rules/recording.yml.
FAILED = 'grpc_code=~"Unknown|DeadlineExceeded|Internal|Unavailable|DataLoss"'
LATENCY_OBJECTIVE = "0.5"
BULK_OBJECTIVE = "10.0"

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_GREEN, _YELLOW, _RED = "green", "yellow", "red"

# From which value on which colour; None for whatever lies below the first.
Step = tuple[float | None, str]
AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel | table.Panel | statetimeline.Panel


@dataclass(frozen=True)
class Query:
    """An expression, and the name of what it gives, made of labels as in `{{model}}`."""

    expr: str
    legend: str = ""


def quantile(q: float, metric: str, selector: str, *by: str) -> str:
    """A quantile of a histogram."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}{RATE})))"


def quantiles(metric: str, selector: str, *by: str, of: Sequence[float] = (0.5, 0.95, 0.99)) -> list[Query]:
    """Several quantiles of a histogram, one query each, named by quantile and labels."""
    names = "".join(f" {{{{{label}}}}}" for label in by)
    return [Query(quantile(q, metric, selector, *by), f"p{q * 100:g}{names}") for q in of]


def rate(metric: str, selector: str, *by: str) -> str:
    """A counter's increase a second, summed."""
    return f"sum by ({', '.join(by)}) (rate({metric}{{{selector}}}{RATE}))"


def mean(metric: str, selector: str, *by: str) -> str:
    """The mean of a histogram."""
    return f"{rate(f'{metric}_sum', selector, *by)} / {rate(f'{metric}_count', selector, *by)}"


class Board:
    """A dashboard under construction. Panels flow from left to right in rows of 24 columns."""

    def __init__(self, name: str, title: str, description: str) -> None:
        """Begins with the three variables and with links to the other dashboards."""
        self._next_id = 0
        self._row: dashboard.Row | None = None
        self._board = (
            dashboard.Dashboard(title)
            .uid(f"encserve-{name}")
            .description(description)
            .tags(["encserve"])
            .time("now-1h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .readonly()
            .with_variable(
                dashboard.DatasourceVariable("datasource")
                .label("Datasource")
                .type("prometheus")
                .current(models.VariableOption(selected=True, text="Prometheus", value=DATASOURCE_UID))
            )
            .with_variable(_variable("model", "Model", "label_values(encserve_model_info, model)"))
            .with_variable(_variable("instance", "Instance", "label_values(encserve_build_info, instance)"))
            .link(
                dashboard.DashboardLink("encserve")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["encserve"])
                .include_vars(True)
                .keep_time(True)
                .icon("external link")
                .tooltip("The other dashboards of encserve")
            )
        )

    def build(self) -> models.Dashboard:
        """The dashboard."""
        self._close_row()
        return self._board.build()

    def row(self, title: str, *, collapsed: bool = False) -> None:
        """Begins a row; what follows is in it."""
        self._close_row()
        row = dashboard.Row(title).id(self._id()).collapsed(collapsed)
        if collapsed:
            self._row = row  # its panels are inside, and it is added when they are
        else:
            self._board.with_row(row)

    def number(
        self, title: str, description: str, unit: str, query: Query,
        steps: Sequence[Step] = (), *, width: int = 4, decimals: int | None = None, course: bool = True,
    ) -> None:  # fmt: skip
        """One number, and its course behind it, unless its window is so long that each point would cost too much."""
        panel = (
            stat.Panel()
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(common_models.BigValueGraphMode.AREA if course else common_models.BigValueGraphMode.NONE)
            .color_mode(common_models.BigValueColorMode.VALUE)
            .no_value("no data")
        )
        if decimals is not None:
            panel.decimals(decimals)
        self._add(panel, title, description, unit, (query,), steps, width, 5, instant=not course)

    def lines(
        self, title: str, description: str, unit: str, *queries: Query,
        steps: Sequence[Step] = (), stacked: bool = False, width: int = 8, most: float | None = None,
    ) -> None:  # fmt: skip
        """Lines over time; stacked where their sum means something."""
        panel = (
            timeseries.Panel()
            .line_width(1)
            .fill_opacity(30 if stacked else 8)
            .show_points(common_models.VisibilityMode.NEVER)
            .min(0)
            .legend(
                common.VizLegendOptions()
                .display_mode(common_models.LegendDisplayMode.TABLE)
                .placement(common_models.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["mean", "max", "lastNotNull"])
            )
            .tooltip(
                common.VizTooltipOptions()
                .mode(common_models.TooltipDisplayMode.MULTI)
                .sort(common_models.SortOrder.DESCENDING)
            )
        )
        if stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
        if steps:
            panel.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
            )
        if most is not None:
            panel.max(most)
        self._add(panel, title, description, unit, queries, steps, width, 8)

    def heat(self, title: str, description: str, unit: str, metric: str, selector: str, *, width: int = 8) -> None:
        """A histogram over time: how many observations fell into each bucket."""
        panel = (
            heatmap.Panel()
            .calculate(False)
            .color(
                heatmap.HeatmapColorOptions()
                .mode(heatmap_models.HeatmapColorMode.SCHEME)
                .scheme("Oranges")
                .fill("dark-orange")
                .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
                .exponent(0.5)
                .steps(64)
            )
            .y_axis(heatmap.YAxisConfig().unit(unit))
            .cell_values(heatmap.CellValues().unit("short"))
            .show_legend()
        )
        query = Query(f"sum by (le) (increase({metric}_bucket{{{selector}}}{RATE}))", "{{le}}")
        self._add(panel, title, description, unit, (query,), (), width, 8, PromQueryFormat.HEATMAP)

    def states(
        self, title: str, description: str, query: Query, names: dict[str, tuple[str, str]], *, width: int = 12
    ) -> None:
        """A bar for each series, coloured by its value; `names` gives each value its text and colour."""
        mapping = models.ValueMap(
            options={
                value: models.ValueMappingResult(text=text, color=color, index=i)
                for i, (value, (text, color)) in enumerate(names.items())
            }
        )
        panel = statetimeline.Panel().mappings([mapping]).show_value(common_models.VisibilityMode.AUTO)
        self._add(panel, title, description, "none", (query,), (), width, 8)

    def rows(self, title: str, description: str, query: Query, columns: dict[str, str], *, width: int = 24) -> None:
        """A table of label values as they are now; `columns` gives the labels that are shown, and their headings."""
        panel = (
            table.Panel()
            .show_header(True)
            .align(common_models.FieldTextAlignment.AUTO)
            .inspect(False)
            .with_transformation(
                models.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": dict.fromkeys({"Time", "Value", "__name__", "job"} - set(columns), True),
                        "indexByName": {name: i for i, name in enumerate(columns)},
                        "renameByName": columns,
                    },
                )
            )
        )
        self._add(panel, title, description, "none", (query,), (), width, 7, PromQueryFormat.TABLE, instant=True)

    def _add(
        self, panel: AnyPanel, title: str, description: str, unit: str, queries: Sequence[Query],
        steps: Sequence[Step], width: int, height: int,
        kind: PromQueryFormat = PromQueryFormat.TIME_SERIES, *, instant: bool = False,
    ) -> None:  # fmt: skip
        """Gives a panel what all have, and adds it."""
        panel.id(self._id()).title(title).description(description).datasource(_SOURCE).span(width).height(height)
        panel.unit(unit)
        panel.thresholds(
            dashboard.ThresholdsConfig()
            .mode(models.ThresholdsMode.ABSOLUTE)
            .steps([models.Threshold(value=value, color=color) for value, color in steps or rising()])
        )
        for i, query in enumerate(queries):
            target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + i)).format(kind).datasource(_SOURCE)
            if query.legend:
                target.legend_format(query.legend)
            if instant:
                target.instant()
            else:
                target.range()
            panel.with_target(target)
        if self._row is not None:
            self._row.with_panel(panel)
        else:
            self._board.with_panel(panel)

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _close_row(self) -> None:
        if self._row is not None:
            self._board.with_row(self._row)
            self._row = None


def rising(*bounds: float) -> list[Step]:
    """Thresholds of what is worse the more there is of it: one bound for red, or one for yellow and one for red."""
    colors = (_YELLOW, _RED)[2 - len(bounds) :]
    return [(None, _GREEN), *zip(bounds, colors, strict=True)]


def falling(*bounds: float) -> list[Step]:
    """Thresholds of what is worse the less there is of it: one bound for green, or one for yellow and one for green."""
    colors = (_YELLOW, _GREEN)[2 - len(bounds) :]
    return [(None, _RED), *zip(bounds, colors, strict=True)]


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable whose values Prometheus knows; any number may be chosen, at first all."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
