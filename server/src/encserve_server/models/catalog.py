"""The served models by name and version."""

import logging
from collections.abc import Collection, Mapping, Sequence

from encserve_server.errors import (
    FieldPath,
    FingerprintMismatch,
    ModelNotFound,
    NotReady,
    PermissionDenied,
    RequestField,
    SpaceMismatch,
)
from encserve_server.models.served import ServedModel

logger = logging.getLogger(__name__)


class Catalog:
    """The served models by name and version. A name from a caller is never used as a file path.

    Attributes:
        stage: While models are prepared, the current stage; otherwise empty.
    """

    def __init__(self, aliases: Mapping[str, str] | None = None, *, accept_any_name: bool = False) -> None:
        """Create an empty catalog. Every call fails with NotReady until `publish`.

        Args:
            aliases: Other names of models: from an alias to NAME or NAME@VERSION.
            accept_any_name: Whether every unknown name means the model, if the server has only one model.
        """
        self._aliases = dict(aliases or {})
        self._accept_any_name = accept_any_name
        self._hub_names: dict[str, str] = {}
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._default_version: dict[str, str] = {}
        self._default_name = ""
        self.stage = ""

    def set_stage(self, stage: str) -> None:
        """Set the stage of the preparation of models, for callers that come too early. Any thread may call this."""
        self.stage = stage

    def publish(self, models: Sequence[ServedModel]) -> None:
        """Replace the served models.

        The first model is the default. Of models with the same name, the first is the default version.
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
        for alias, target in self._aliases.items():
            found, _, version = target.partition("@")
            if alias in self._default_version:
                logger.warning(
                    "--served-model-name has no effect: another model has this name",
                    extra={"alias": alias, "of": target},
                )
            if found not in self._default_version or (version and (found, version) not in self._models):
                logger.warning("no model for --served-model-name", extra={"alias": alias, "of": target})

    def check_use(self, name: str, caller: str, allowed: Collection[str]) -> None:
        """Check that a caller may use the model with this name. An empty name means the default model.

        The error shows the name that the caller sent, and not the model's own name.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: No model has this name.
            PermissionDenied: The caller may not use the model.
        """
        own = name or self._default_name
        if own not in self._default_version:
            own, _ = self._other_name(own, "", allowed)
        if own not in allowed:
            model = _quoted(name) if name else "the default model"
            problem = f"caller {caller} may not use {model}, only {', '.join(sorted(allowed))}"
            raise PermissionDenied(FieldPath(RequestField.MODEL), problem)

    def resolve(
        self,
        name: str,
        version: str,
        expected_fingerprint: str = "",
        expected_space_id: str = "",
        visible: Collection[str] | None = None,
    ) -> ServedModel:
        """Return the model of a name and version.

        Args:
            name: The name; empty for the default model.
            version: The version; empty for the default version of the name.
            expected_fingerprint: The fingerprint that the model must have; empty for any.
            expected_space_id: The space_id that the model must have; empty for any.
            visible: The models that errors may name; None for all.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: The model or version does not exist.
            FingerprintMismatch: The model has another fingerprint.
            SpaceMismatch: The model has another space_id, or none.
        """
        name = name or self._default_name
        if name not in self._default_version:
            name, version = self._other_name(name, version, visible)
        version = version or self._default_version[name]
        model = self._models.get((name, version))
        if model is None:
            versions = ", ".join(v for n, v in self._models if n == name)
            problem = f"no version {_quoted(version)} of {name}; the versions are {versions}"
            raise ModelNotFound(FieldPath(RequestField.MODEL_VERSION), problem)
        found, of = model.bundle, f"{name}@{version}"
        if expected_fingerprint and expected_fingerprint != found.fingerprint:
            raise FingerprintMismatch(
                "{field}: {expected} is expected, but {of} has {found}: the two are different bundles. Request the "
                "version with the expected fingerprint, or expect the space_id of your vectors instead",
                field=FieldPath(RequestField.FINGERPRINT),
                expected=_quoted(expected_fingerprint),
                of=of,
                found=found.fingerprint,
            )
        if expected_space_id and expected_space_id != found.space_id:
            raise SpaceMismatch(
                "{field}: {expected} is expected, but {of} has {found}: vectors of different spaces are not "
                "comparable. Request the version with the expected space_id, or encode all texts again",
                field=FieldPath(RequestField.SPACE_ID),
                expected=_quoted(expected_space_id),
                of=of,
                found=found.space_id or "none (export it again)",
            )
        return model

    def check_loaded(self) -> None:
        """Raise NotReady until the first models are published. The error names the stage of their preparation."""
        if not self._models:
            raise NotReady(f"the server is still {self.stage or 'loading its models'}")

    def _other_name(self, name: str, version: str, visible: Collection[str] | None) -> tuple[str, str]:
        """Return the name and version of the model behind an alias or a hub's name.

        Raises:
            NotReady: The models are still being loaded.
            ModelNotFound: No model has this name.
        """
        self.check_loaded()  # before the first models are published, every name arrives here
        found, _, alias_version = (self._aliases.get(name) or self._hub_names.get(name, "")).partition("@")
        if not found and self._accept_any_name and len(self._default_version) == 1:
            return self._default_name, ""
        if found not in self._default_version:
            names = dict.fromkeys([*self._default_version, *self._aliases, *self._hub_names])
            known = ", ".join(it for it in names if visible is None or self._target_of(it) in visible)
            there = f"the models are {known}" if known else "this caller may not use any model"
            raise ModelNotFound(FieldPath(RequestField.MODEL), f"no model {_quoted(name)}; {there}")
        return found, version or alias_version

    def _target_of(self, name: str) -> str:
        """Return the model's own name for an alias or a hub's name. Return other names unchanged."""
        return (self._aliases.get(name) or self._hub_names.get(name, name)).partition("@")[0]

    def names(self, model: ServedModel) -> list[str]:
        """Return the names of a model: its own name, its aliases, and its name on the Hugging Face hub.

        The own name is NAME for the default version, and NAME@VERSION for other versions.
        """
        name, version = model.key
        is_default = self.is_default_version(model)
        own = name if is_default else f"{name}@{version}"
        aliases = self._aliases
        others = [it for it in aliases if aliases[it] in {own, f"{name}@{version}"} and it not in self._default_version]
        others += [
            hub for hub, target in self._hub_names.items() if target == name and is_default and hub not in aliases
        ]
        return list(dict.fromkeys([own, *others]))

    def all(self) -> list[ServedModel]:
        """Return all models: first the default model, then the others by name and version."""
        return sorted(
            self._models.values(),
            key=lambda model: (not self.is_default(model), model.bundle.name, model.bundle.version),
        )

    def is_default(self, model: ServedModel) -> bool:
        """Return whether requests without a model name get this model."""
        return model.bundle.name == self._default_name and self.is_default_version(model)

    def is_default_version(self, model: ServedModel) -> bool:
        """Return whether requests with the model's name and no version get this model."""
        name, version = model.key
        return self._default_version.get(name) == version


def _quoted(text: str) -> str:
    """Return a caller's text in quotes, cut to 64 characters for errors."""
    return repr(text if len(text) <= 64 else text[:64] + "…")
