"""Silences other libraries while they load or export a model."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard warnings, log records and prints within the `with` block.

    No error is lost, because the libraries also raise their errors as exceptions.
    """
    level = logging.root.manager.disable
    logging.disable()
    discarded = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(discarded), contextlib.redirect_stdout(discarded):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
