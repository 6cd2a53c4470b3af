"""The map of all models that are served."""

import logging
from collections.abc import Collection, Mapping, Sequence

from encserve_server.errors import (
    FieldPath,
    FingerprintMismatch,
    ModelNotFound,
    NotReady,
    Part,
    PermissionDenied,
    SpaceMismatch,
)
from encserve_server.models.served import ServedModel

logger = logging.getLogger(__name__)


class Catalog:
    """The models by name and version. A name is only ever a key of this map, never a path."""

    def __init__(self, aliases: Mapping[str, str] | None = None, *, accept_any_name: bool = False) -> None:
        """Starts empty: every call gets NotReady until `publish`.

        Args:
            aliases: Other names of models: NAME or NAME@VERSION by alias.
            accept_any_name: Whether a name that is not known is taken for the default model's, where there is one
                model.
        """
        self._aliases = dict(aliases or {})
        self._accept_any_name = accept_any_name
        self._hub_names: dict[str, str] = {}
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._default_version: dict[str, str] = {}
        self._default_name = ""

    def publish(self, models: Sequence[ServedModel]) -> None:
        """Makes these models available, and no others.

        The first is the default, and the first of a name is that name's default version.
        """
        self._models = {model.key: model for model in models}
        self._default_name = models[0].bundle.name
        self._default_version = {}
        for name, version in self._models:
            self._default_version.setdefault(name, version)
        self._hub_names = {}
        for model in models:
            hub_name = model.bundle.repository
            if hub_name and hub_name not in self._default_version:
                self._hub_names.setdefault(hub_name, model.bundle.name)
        for alias, its in self._aliases.items():
            found, _, version = its.partition("@")
            if alias in self._default_version:
                logger.warning(
                    "--served-model-name is the name of another model, which is served under it",
                    extra={"alias": alias, "of": its},
                )
            if found not in self._default_version or (version and (found, version) not in self._models):
                logger.warning("no model for --served-model-name", extra={"alias": alias, "of": its})

    def check_use(self, name: str, caller: str, allowed: Collection[str]) -> None:
        """Refuses a name of a model that a caller may not use; empty for the default one.

        The error has the name that was sent. What model the name stands for, the caller is not told.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: It is no name of a model.
            PermissionDenied: The caller may not use the model.
        """
        self._check_loaded()
        own = name or self._default_name
        if own not in self._default_version:
            own, _ = self._other_name(own, "", allowed)
        if own not in allowed:
            what = _shown(name) if name else "the default model"
            problem = f"caller {caller} may not use {what}; it may use {', '.join(sorted(allowed))}"
            raise PermissionDenied(FieldPath(Part.MODEL), problem)

    def resolve(
        self,
        name: str,
        version: str,
        expected_fingerprint: str = "",
        expected_space_id: str = "",
        told: Collection[str] | None = None,
    ) -> ServedModel:
        """The model of a name and version, either empty for its default; an id that is empty expects nothing.

        `told` are the models that the caller may know of; None for all. Errors name no others.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: There is none.
            FingerprintMismatch: It has another fingerprint than expected.
            SpaceMismatch: It has another space_id than expected, or none.
        """
        self._check_loaded()
        name = name or self._default_name
        if name not in self._default_version:
            name, version = self._other_name(name, version, told)
        version = version or self._default_version[name]
        model = self._models.get((name, version))
        if model is None:
            versions = ", ".join(v for n, v in self._models if n == name)
            problem = f"no version {_shown(version)} of {name}; there are {versions}"
            raise ModelNotFound(FieldPath(Part.MODEL_VERSION), problem)
        found, of = model.bundle, f"{name}@{version}"
        if expected_fingerprint and expected_fingerprint != found.fingerprint:
            raise FingerprintMismatch(
                "{field}: {expected} is expected, but {of} has {found}: it is another bundle; name the version that "
                "has it, or expect the space_id that your vectors have",
                field=FieldPath(Part.FINGERPRINT),
                expected=_shown(expected_fingerprint),
                of=of,
                found=found.fingerprint,
            )
        if expected_space_id and expected_space_id != found.space_id:
            raise SpaceMismatch(
                "{field}: {expected} is expected, but {of} has {found}: its vectors do not belong into one space with "
                "those; name the version that has it, or encode all texts again",
                field=FieldPath(Part.SPACE_ID),
                expected=_shown(expected_space_id),
                of=of,
                found=found.space_id or "none (export it again)",
            )
        return model

    def _check_loaded(self) -> None:
        if not self._models:
            raise NotReady("the server is still loading its models")

    def _other_name(self, name: str, version: str, told: Collection[str] | None) -> tuple[str, str]:
        """The name and version of the model that an alias or a hub's name stands for.

        Raises:
            ModelNotFound: It is no name of a model.
        """
        found, _, its_version = (self._aliases.get(name) or self._hub_names.get(name, "")).partition("@")
        if not found and self._accept_any_name and len(self._default_version) == 1:
            return self._default_name, ""
        if found not in self._default_version:
            names = dict.fromkeys([*self._default_version, *self._aliases, *self._hub_names])
            there = ", ".join(it for it in names if told is None or self._meant(it) in told)
            there = there or "none that this caller may use"
            raise ModelNotFound(FieldPath(Part.MODEL), f"no model {_shown(name)}; there are {there}")
        return found, version or its_version

    def _meant(self, name: str) -> str:
        """The model's own name behind one of its names."""
        return (self._aliases.get(name) or self._hub_names.get(name, name)).partition("@")[0]

    def names(self, model: ServedModel) -> list[str]:
        """The names of a model: its own, with the version unless that is the default one, aliases, and the hub's."""
        name, version = model.key
        is_default = self.is_default_version(model)
        own = name if is_default else f"{name}@{version}"
        aliases = self._aliases
        others = [it for it in aliases if aliases[it] in {own, f"{name}@{version}"} and it not in self._default_version]
        others += [hub for hub, its in self._hub_names.items() if its == name and is_default and hub not in aliases]
        return list(dict.fromkeys([own, *others]))

    def all(self) -> list[ServedModel]:
        """Every model, the default one first, then by name and version."""
        return sorted(
            self._models.values(),
            key=lambda model: (not self.is_default(model), model.bundle.name, model.bundle.version),
        )

    def is_default(self, model: ServedModel) -> bool:
        """Whether requests that name no model get this one."""
        return model.bundle.name == self._default_name and self.is_default_version(model)

    def is_default_version(self, model: ServedModel) -> bool:
        """Whether requests that name the model but no version get this one."""
        name, version = model.key
        return self._default_version.get(name) == version


def _shown(text: str) -> str:
    """A caller's text, quoted and cut to what an error can hold."""
    return repr(text if len(text) <= 64 else text[:64] + "…")
