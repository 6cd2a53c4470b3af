"""Checks a tokenizer.json against the model it is to feed."""

import dataclasses
import shutil
from pathlib import Path

from tokenizers import Tokenizer, normalizers

from encserve_export.ground.errors import TokenizerError
from encserve_export.source.weights import AGAIN

# Letters of scripts that hardly any vocabulary has, and a word that is longer than WordPiece looks up.
_UNKNOWN = "\U00012000 \ua66e " + "q" * 200


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json that loads.

    Attributes:
        path: The file.
        largest_id: The largest token id that it can give, of a text or around one.
        around_text: The ids that it puts around a text.
        lowercase: Whether a bundle's copy is to put texts into lower case first, which the file does not.
        made_of: The older file that it was made of, for errors; None for none.
    """

    path: Path
    largest_id: int
    around_text: tuple[int, ...]
    lowercase: bool = False
    made_of: Path | None = None

    def write(self, path: Path) -> Path:
        """Writes the bundle's copy: the file as it is, but for `lowercase`."""
        if not self.lowercase:
            return Path(shutil.copyfile(self.path, path))
        tokenizer = Tokenizer.from_file(str(self.path))
        given = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *given])
        tokenizer.save(str(path))
        return path

    def check_fits(self, vocab_size: int) -> None:
        """Refuses a tokenizer that gives ids the model has no embedding for.

        Raises:
            TokenizerError: The largest id is not below `vocab_size`.
        """
        if self.largest_id >= vocab_size:
            raise TokenizerError(
                f"{self.made_of or self.path} gives token ids up to {self.largest_id}; the model's vocab_size is "
                f"{vocab_size}: it is another model's, or got tokens that the model has no rows for. Put the one there "
                "that the model was trained with"
            )


def read_tokenizer(path: Path, *, lowercase: bool = False, made_of: Path | None = None) -> TokenizerFile:
    """Loads a tokenizer.json.

    Args:
        path: The file.
        lowercase: Whether texts are to be put into lower case whatever the file says.
        made_of: The older file that it was made of, if it was.

    Raises:
        TokenizerError: It is unreadable or empty, or fails for what its vocabulary does not have.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise TokenizerError(f"{path} is no readable tokenizer: {error}; {AGAIN}") from error
    # The file may ask for a fixed length; what stands around a text is asked without that.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise TokenizerError(f"{path} has an empty vocabulary")
    around_text = tuple(tokenizer.encode("").ids)
    try:
        tokenizer.encode(_UNKNOWN)
    except Exception as error:  # as above
        raise TokenizerError(
            f"{made_of or path} fails for texts with characters or words that it does not know: {error}. Give its "
            "model an unk_token that is in its vocabulary"
        ) from error
    return TokenizerFile(path, max([*ids, *around_text]), around_text, lowercase, made_of)
