"""Loads a directory's tokenizer with transformers, and writes the tokenizer.json of a bundle.

transformers reads the vocabulary from tokenizer.json or an older file, and settings from tokenizer_config.json. The
vocabulary and the settings may contradict each other. So the exporter does not copy tokenizer.json.

The exporter loads the tokenizer with transformers. The loaded tokenizer has a backend, an object of the tokenizers
library. The exporter writes this backend as a new tokenizer.json. `check.pipeline` compares the ids from the new file
with the ids from transformers.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from encserve_export.core.errors import TokenizerError, first_line
from encserve_export.source.weights import AGAIN

FILE = "tokenizer.json"
# The tokenizer files that older models have instead of tokenizer.json.
OLDER_FILES = (
    *("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "prophetnet.tokenizer"),
)
_SPACE = "▁"  # SentencePiece's mark for a space
# A text of unknown words: characters that few vocabularies have, and a word that is too long for WordPiece.
_UNKNOWN = "\U00012000 \ua66e " + "q" * 200
_ADVICE = (
    f"Add a {FILE} to the model's folder, or remove the tokenizer's files. Without a tokenizer, the model takes only "
    "token ids"
)


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json that was loaded and checked without errors.

    Attributes:
        path: The file.
        largest_id: The largest token id in the file.
        around_text: The ids of the special tokens that the file adds around a text.
        added_tokens: The added tokens by id. A text gets such an id only if the text contains the token.
        split_special_tokens: Whether a special token in a text is split into tokens like other text.
        made_of: The checkpoint's file from which `path` was made, for error messages; None if `path` is the
            checkpoint's file.
    """

    path: Path
    largest_id: int
    around_text: tuple[int, ...]
    added_tokens: Mapping[int, str]
    split_special_tokens: bool = False
    made_of: Path | None = None

    def write(self, path: Path) -> Path:
        """Copy the file to another path, and return this path."""
        return Path(shutil.copyfile(self.path, path))

    def check_fits(self, vocab_size: int) -> None:
        """Refuse a tokenizer with ids beyond the model's table of token embeddings.

        Raises:
            TokenizerError: A text without added tokens may get an id of `vocab_size` or more.
        """
        tokenizer = open_tokenizer(self.path)
        ids = set(tokenizer.get_vocab().values()) - self.added_tokens.keys()
        largest_id = max(ids.union(self.around_text), default=0)
        if largest_id >= vocab_size:
            raise TokenizerError(
                f"{self.made_of or self.path} gives token ids up to {largest_id} "
                f"({tokenizer.id_to_token(largest_id)!r}), but the model's vocab_size is {vocab_size}. The tokenizer "
                "belongs to another model. Replace this file by the model's own tokenizer"
            )

    def remark(self, vocab_size: int) -> str:
        """Return a remark that lists the added tokens with an id of `vocab_size` or more.

        Without such tokens, the remark is empty.
        """
        tokens = [repr(token) for i, token in sorted(self.added_tokens.items()) if i >= vocab_size]
        if not tokens:
            return ""
        listed = ", ".join([*tokens[:5], f"and {len(tokens) - 5} more"] if len(tokens) > 5 else tokens)
        return f"the model has no embedding for the added tokens {listed}: a text that contains one of them is refused"


def read_tokenizer(path: Path, *, split_special_tokens: bool = False, made_of: Path | None = None) -> TokenizerFile:
    """Load a tokenizer.json.

    Args:
        path: The file.
        split_special_tokens: Whether special tokens in a text are split into tokens like other text.
        made_of: The checkpoint's file from which `path` was made. None if `path` is the checkpoint's file.

    Raises:
        TokenizerError: The file is unreadable, its vocabulary is empty, its ids are random (BPE dropout), or it fails
            for unknown words.
    """
    tokenizer = open_tokenizer(path, split_special_tokens=split_special_tokens)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise TokenizerError(f"{path} has an empty vocabulary")
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise TokenizerError(
            f"{made_of or path}: its BPE model has dropout {dropout:g}, so the ids of a text are random. Write "
            '"dropout": null there'
        )
    around_text = tuple(tokenizer.encode("").ids)
    try:
        tokenizer.encode(_UNKNOWN)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"{made_of or path} fails for texts with unknown characters or words: {error}. Set the "
            "tokenizer's unk_token to a token of the vocabulary"
        ) from error
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    return TokenizerFile(path, max([*ids, *around_text]), around_text, added, split_special_tokens, made_of)


def open_tokenizer(path: Path, *, split_special_tokens: bool = False) -> Tokenizer:
    """Load a tokenizer.json without its settings for truncation and padding. The server ignores these settings too.

    Raises:
        TokenizerError: The file is unreadable.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is not a readable tokenizer: {error}; {AGAIN}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    return tokenizer


def import_transformers() -> Any:
    """Import transformers, and turn off its log and its progress bars.

    The import takes a second, so only functions that need transformers import it.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def tokenizer_source(directory: Path) -> Path | None:
    """Return the file from which a directory's tokenizer is loaded. Without a tokenizer, return None."""
    return next((path for name in (FILE, *OLDER_FILES) if (path := directory / name).is_file()), None)


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory with transformers, without running code from the directory.

    Returns:
        A PreTrainedTokenizerBase; None without a tokenizer.

    Raises:
        TokenizerError: transformers cannot load the tokenizer, or its vocabulary has only special tokens.
    """
    source = tokenizer_source(directory)
    if source is None:
        return None
    if source.name == FILE:
        open_tokenizer(source)  # raises an error with the file and the cause; transformers' error has neither
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the code that converts older files may raise any exception
        raise TokenizerError(
            f"transformers cannot make a tokenizer from the files in {directory}: {first_line(error)}. {_ADVICE}"
        ) from error
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, _SPACE}:
        raise TokenizerError(
            f"transformers cannot make a tokenizer from the files in {directory}: the vocabulary has only special "
            f"tokens. {_ADVICE}"
        )
    return tokenizer


def write_tokenizer(tokenizer: Any, path: Path, *, made_of: Path | None, add_special_tokens: bool) -> TokenizerFile:
    """Write the backend of a tokenizer as tokenizer.json.

    Args:
        tokenizer: A PreTrainedTokenizerBase, or a tokenizers.Tokenizer.
        path: The tokenizer.json to write.
        made_of: The checkpoint's file from which `tokenizer` was loaded. Error messages name this file.
        add_special_tokens: Whether the file adds special tokens around a text. False for a model with a chat template
            and for static embeddings.

    Raises:
        TokenizerError: The tokenizer has no backend, or `read_tokenizer` refuses the written file.
    """
    backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"{made_of}: its tokenizer is a {type(tokenizer).__name__}, which runs only in Python and cannot be "
            f"written as a {FILE}. {_ADVICE}"
        )
    written = Tokenizer.from_str(backend.to_str())
    written.no_truncation()
    written.no_padding()
    if not add_special_tokens:
        written.post_processor = None
    written.save(str(path))
    split = bool(getattr(tokenizer, "split_special_tokens", False))
    return read_tokenizer(path, split_special_tokens=split, made_of=made_of)
