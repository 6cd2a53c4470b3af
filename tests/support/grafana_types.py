"""Whether a dashboard's JSON is what Grafana's own models, those of grafana-foundation-sdk, declare."""

import enum
import itertools
import types
import typing
from collections.abc import Iterable
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models import dashboard as models

plugins.register_default_plugins()


def problems(board: Any) -> list[str]:
    """Fields that the models do not know, and values of another type than they declare; empty if there are none.

    Panels, their options and field settings, queries, variables and all else, each by the model of its own kind.
    """
    read = models.Dashboard.from_json(board)
    found = [*_wrong_fields(read, "dashboard"), *_lost(board, _as_json(read), "dashboard")]
    for outer in read.panels or []:
        for panel in outer.panels if isinstance(outer, models.RowPanel) else [outer]:
            if isinstance(panel.options, dict):
                found.append(f"{panel.title}: there is no model of {panel.type_val}")
            if any(isinstance(target, UnknownDataquery) for target in panel.targets or []):
                found.append(f"{panel.title}: there is no model of a query")
    return found


def _flat(found: Iterable[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(found))


def _wrong(value: Any, declared: Any, place: str) -> list[str]:
    """Where a value is not of the type that is declared."""
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if declared in (Any, object):  # an object of the panel's own type
        return _wrong_fields(value, place)
    if origin in (typing.Union, types.UnionType):
        tried = [_wrong(value, it, place) for it in inner]
        return [] if [] in tried else max(tried, key=lambda it: it[-1].count("."))  # the one that came furthest
    if origin is typing.Literal:
        return [] if value in inner else [f"{place}: {value!r} is none of {inner}"]
    if origin in (list, dict):
        if not isinstance(value, origin):
            return [f"{place}: {value!r} is no {origin.__name__}"]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return _flat(_wrong(it, inner[-1], f"{place}.{key}") for key, it in items)
    return _wrong_class(value, declared, place)


def _wrong_class(value: Any, declared: Any, place: str) -> list[str]:
    """The same for what is declared to be of a class."""
    if issubclass(declared, enum.Enum):
        return [] if value in [it.value for it in declared] else [f"{place}: {value!r} is no {declared.__name__}"]
    if isinstance(value, dict) and hasattr(declared, "from_json"):  # some are left as they were
        return _wrong_fields(declared.from_json(value), place) + _lost(
            value, _as_json(declared.from_json(value)), place
        )
    right = (int, float) if declared is float else declared
    if not isinstance(value, right) or (isinstance(value, bool) and declared is not bool):
        return [f"{place}: {value!r} is no {declared.__name__}"]
    return _wrong_fields(value, place)


def _wrong_fields(value: Any, place: str) -> list[str]:
    """The same for the fields of a model."""
    if not type(value).__module__.startswith("grafana_foundation_sdk") or isinstance(value, enum.Enum):
        return []
    declared = typing.get_type_hints(type(value))
    return _flat(_wrong(it, declared[name], f"{place}.{name}") for name, it in vars(value).items() if name in declared)


def _lost(had: Any, kept: Any, place: str) -> list[str]:
    """What a file has and the models do not. They may add what is there unless said otherwise."""
    if isinstance(had, dict) and isinstance(kept, dict):
        return _flat(_lost(it, kept.get(key), f"{place}.{key}") for key, it in had.items())
    if isinstance(had, list) and isinstance(kept, list) and len(had) == len(kept):
        return _flat(_lost(it, kept[i], f"{place}.{i}") for i, it in enumerate(had))
    return [] if had == kept else [f"{place}: {had!r} became {kept!r}"]


def _as_json(value: Any) -> Any:
    """A model as JSON has it."""
    if hasattr(value, "to_json"):
        return _as_json(value.to_json())
    if isinstance(value, dict):
        return {key: _as_json(it) for key, it in value.items()}
    return [_as_json(it) for it in value] if isinstance(value, list) else value
