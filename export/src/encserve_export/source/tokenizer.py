"""The tokenizer of a directory as its authors' libraries build it, and the file of it that a bundle holds.

transformers makes a tokenizer of the vocabulary in tokenizer.json or in older files, and of tokenizer_config.json,
which may contradict the rest of tokenizer.json. So a bundle holds the backend of the tokenizer that transformers has
built, as a file of the tokenizers library, and the ids of that file are compared with those of the tokenizer itself.
"""

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from encserve_export.ground.errors import TokenizerError, first_line
from encserve_export.source.texts import TEXTS, around_tokens
from encserve_export.source.weights import AGAIN
from encserve_proto.bundle.v1 import manifest_pb2

FILE = "tokenizer.json"
# What a tokenizer was written as before there was tokenizer.json.
OLDER_FILES = (
    *("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "prophetnet.tokenizer"),
)
_SPACE = "▁"  # as SentencePiece writes it
# Letters of scripts that hardly any vocabulary has, and a word that is longer than WordPiece looks up.
_UNKNOWN = "\U00012000 \ua66e " + "q" * 200
_NO_TOKENIZER = f"put a {FILE} there, or take the tokenizer's files away: the model then takes token ids only"


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json that loads.

    Attributes:
        path: The file.
        largest_id: The largest token id that it can give, of a text or around one.
        around_text: The ids that it puts around a text.
        split_special_tokens: Whether a special token that is written out in a text is tokenized like any other text.
        made_of: The file of the directory that it was made of, for errors; None where it is that file.
    """

    path: Path
    largest_id: int
    around_text: tuple[int, ...]
    split_special_tokens: bool = False
    made_of: Path | None = None

    def write(self, path: Path) -> Path:
        """Writes the bundle's copy."""
        return Path(shutil.copyfile(self.path, path))

    def check_fits(self, vocab_size: int) -> None:
        """Refuses a tokenizer that gives ids the model has no embedding for.

        Raises:
            TokenizerError: The largest id is not below `vocab_size`.
        """
        if self.largest_id >= vocab_size:
            largest = open_tokenizer(self.path).id_to_token(self.largest_id)
            raise TokenizerError(
                f"{self.made_of or self.path} gives token ids up to {self.largest_id} ({largest!r}); the model's "
                f"vocab_size is {vocab_size}: it is another model's, or got tokens that the model has no rows for. Put "
                "the one there that the model was trained with; where transformers adds a special token that the "
                'model does not have, say so in tokenizer_config.json, such as "mask_token": null'
            )


def read_tokenizer(path: Path, *, split_special_tokens: bool = False, made_of: Path | None = None) -> TokenizerFile:
    """Loads a tokenizer.json.

    Args:
        path: The file.
        split_special_tokens: Whether special tokens that are written out in a text are tokenized like any other text.
        made_of: The file of the directory that it was made of, if it was.

    Raises:
        TokenizerError: It is unreadable or empty, or fails for what its vocabulary does not have.
    """
    tokenizer = open_tokenizer(path, split_special_tokens=split_special_tokens)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise TokenizerError(f"{path} has an empty vocabulary")
    around_text = tuple(tokenizer.encode("").ids)
    try:
        tokenizer.encode(_UNKNOWN)
    except Exception as error:  # the library raises the bare class
        raise TokenizerError(
            f"{made_of or path} fails for texts with characters or words that it does not know: {error}. Give its "
            "model an unk_token that is in its vocabulary"
        ) from error
    return TokenizerFile(path, max([*ids, *around_text]), around_text, split_special_tokens, made_of)


def open_tokenizer(path: Path, *, split_special_tokens: bool = False) -> Tokenizer:
    """Loads a tokenizer.json as the server does: without the truncation and padding that the file asks for.

    Raises:
        TokenizerError: It is unreadable.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise TokenizerError(f"{path} is no readable tokenizer: {error}; {AGAIN}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    return tokenizer


class BundleTokenizer:
    """A bundle's tokenizer, as the server uses it."""

    def __init__(self, folder: Path, text: manifest_pb2.TextInput) -> None:
        """Loads the tokenizer of the bundle in a folder.

        Raises:
            TokenizerError: As of `open_tokenizer`.
        """
        self._tokenizer = open_tokenizer(folder / text.tokenizer_file, split_special_tokens=text.split_special_tokens)
        self._template = text.template if text.HasField("template") else None

    def ids(self, text: str, prompt: str = "", max_tokens: int | None = None) -> list[int]:
        """The ids of a text behind a prompt, those over `max_tokens` cut from its end."""
        if self._template is None:
            self._tokenizer.no_truncation() if max_tokens is None else self._tokenizer.enable_truncation(max_tokens)
            return list(self._tokenizer.encode(prompt + text).ids)
        ids: list[int] = self._tokenizer.encode(around(self._template, prompt) + text + self._template.after).ids
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        kept = min(self._template.after_tokens, max_tokens)
        return ids[: max_tokens - kept] + ids[len(ids) - kept :]

    def count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt, those that stand before every text included; as sentence-transformers counts them."""
        self._tokenizer.no_truncation()
        special = self._tokenizer.encode(prompt).special_tokens_mask
        return len(special) - bool(special and special[-1])


def around(template: manifest_pb2.TextTemplate, prompt: str) -> str:
    """What a template puts before a text, the prompt included."""
    return template.before_prompt + prompt + template.after_prompt if prompt else template.before


def tokenizer_source(directory: Path) -> Path | None:
    """The file that a directory's tokenizer is made of; None where there is none."""
    return next((path for name in (FILE, *OLDER_FILES) if (path := directory / name).is_file()), None)


def convert_tokenizer(directory: Path, path: Path, *, add_special_tokens: bool = True) -> TokenizerFile | None:
    """Writes the tokenizer that transformers builds of a directory.

    Args:
        directory: Where the encoder lies.
        path: The tokenizer.json to write, outside of `directory`.
        add_special_tokens: Whether the tokenizer puts its special tokens around a text, which is not so behind a chat
            template.

    Returns:
        The file; None where the directory has no tokenizer.

    Raises:
        TokenizerError: transformers makes no tokenizer of the directory's files, the tokenizer has no file of the
            tokenizers library, or that file gives other ids.
    """
    made_of = tokenizer_source(directory)
    if made_of is None:
        return None
    if made_of.name == FILE:
        open_tokenizer(made_of)  # transformers' error for an unreadable file names neither the file nor the cause
    tokenizer = load_tokenizer(directory)
    return write_tokenizer(tokenizer, path, made_of=made_of, add_special_tokens=add_special_tokens)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer that transformers builds of a directory, without any code of the directory's.

    Raises:
        TokenizerError: transformers makes none of the directory's files.
    """
    import transformers  # takes a second

    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a converter raises
        raise TokenizerError(
            f"transformers makes no tokenizer of the files in {directory}: {first_line(error)}; {_NO_TOKENIZER}"
        ) from error
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, _SPACE}:
        raise TokenizerError(
            f"transformers makes no tokenizer of the files in {directory}: it reads none of them, and has special "
            f"tokens alone; {_NO_TOKENIZER}"
        )
    return tokenizer


def write_tokenizer(tokenizer: Any, path: Path, *, made_of: Path, add_special_tokens: bool = True) -> TokenizerFile:
    """Writes the backend of a tokenizer of transformers', and compares its ids with the tokenizer's own.

    Args:
        tokenizer: A PreTrainedTokenizerBase, which stays as it is.
        path: The tokenizer.json to write.
        made_of: The file of the directory that it was made of, for errors.
        add_special_tokens: As of `convert_tokenizer`.

    Raises:
        TokenizerError: The tokenizer has no backend of the tokenizers library, or the file gives other ids for one of
            some 130 difficult texts and those with its special tokens.
    """
    own = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(own, Tokenizer):
        raise TokenizerError(
            f"{made_of}: its tokenizer is a {type(tokenizer).__name__}, which runs in Python alone and has no file of "
            f"the tokenizers library; {_NO_TOKENIZER}"
        )
    backend = Tokenizer.from_str(own.to_str())
    backend.no_truncation()
    backend.no_padding()
    if not add_special_tokens:
        backend.post_processor = None
    backend.save(str(path))
    file = read_tokenizer(path, split_special_tokens=bool(tokenizer.split_special_tokens), made_of=made_of)
    _compare_ids(tokenizer, file, difficult_texts(tokenizer), add_special_tokens)
    return file


def difficult_texts(tokenizer: Any) -> list[str]:
    """`TEXTS`, and texts with the special and the added tokens of a tokenizer of transformers' written out."""
    tokens = list(dict.fromkeys([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]))
    return [*TEXTS, *around_tokens(tokens)]


def _compare_ids(tokenizer: Any, file: TokenizerFile, texts: Sequence[str], add_special_tokens: bool) -> None:
    """Refuses a file whose ids are others than those of the tokenizer that it was made of."""
    ours = open_tokenizer(file.path, split_special_tokens=file.split_special_tokens)
    theirs = tokenizer(
        list(texts), padding=False, truncation=False, add_special_tokens=add_special_tokens, verbose=False
    )["input_ids"]
    for text, encoding, want in zip(texts, ours.encode_batch(list(texts)), theirs, strict=True):
        if encoding.ids != want:
            raise TokenizerError(
                f"{file.made_of or file.path}: for the text {shortened(text)} a file of the tokenizers library gives "
                f"the ids {listed_ids(encoding.ids)}, the tokenizer of transformers that it was made of "
                f"({type(tokenizer).__name__}) gives {listed_ids(want)}, so a bundle cannot hold it. Save the "
                "directory's tokenizer again with save_pretrained of a recent transformers, or take its files away: "
                "the model then takes token ids only"
            )


def shortened(text: str) -> str:
    """A text for an error, at most 60 characters of it, with control characters escaped."""
    return ascii(text) if len(text) <= 60 else f"{text[:60]!a}... ({len(text)} characters)"


def listed_ids(ids: Iterable[int]) -> str:
    """Ids for an error, at most 20 of them."""
    listed = [str(it) for it in ids]
    return f"[{', '.join([*listed[:20], '...'] if len(listed) > 20 else listed)}]"
