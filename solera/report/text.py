"""Token ids as text for a reader, with the tokenizer that the run used."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from solera.errors import one_line
from solera.folder.paths import MODEL
from solera.models.source import find
from solera.records import Sequence
from solera.report.run_folder import RunFolder

LONGEST = 8_000
"""Most characters of one piece of text in a page; of a longer one both ends are kept."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a sequence, all written by a policy or all given to it."""

    written: bool
    token_ids: list[int]


def pieces(sequence: Sequence) -> list[Piece]:
    """A sequence cut where the policy begins and ends to write, its prompt first."""
    token_ids, end, cut = sequence.token_ids_T.tolist(), 0, list[Piece]()
    for start, stop, _ in sequence.spans:
        if start > end or not cut:
            cut.append(Piece(False, token_ids[end:start]))
            cut.append(Piece(True, []))
        cut[-1].token_ids.extend(token_ids[start:stop])  # weights may change while a response is being written
        end = stop
    return [*cut, Piece(False, token_ids[end:])] if end < len(token_ids) or not cut else cut


@dataclass(frozen=True)
class TextReader:
    """Ids to text. `ends` are ids that mean no text where they end what was written."""

    decode: Callable[[list[int]], str]
    ends: Collection[int] = ()

    def __call__(self, piece: Piece) -> str:
        token_ids = piece.token_ids
        if piece.written and token_ids and token_ids[-1] in self.ends:
            token_ids = token_ids[:-1]
        return shortened(self.decode(token_ids))


def shortened(text: str) -> str:
    """Both ends of a text too long for a page.

    >>> len(shortened("a" * 10_000)), "2000 characters left out" in shortened("a" * 10_000)
    (8032, True)
    """
    half = LONGEST // 2
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


def text_reader(run: RunFolder) -> TextReader:
    """Of the run's own tokenizer; where it cannot be had, ids stay numbers and a note says so."""
    reasons = []
    for source in _sources(run):
        try:
            return _load(source if Path(source).is_dir() else find(source))
        except Exception as error:  # nothing narrower is raised by tokenizers; the reason goes onto the page
            reasons.append(f"{source}: {one_line(error)}")
    run.notes.append(f"Texts are shown as token ids, because no tokenizer could be loaded ({'; '.join(reasons)}).")
    return TextReader(lambda token_ids: " ".join(map(str, token_ids)))


def _sources(run: RunFolder) -> list[str]:
    """The finished model, the checkpoints from the last to the first, and what the run began with."""
    folders = [run.path / MODEL, *sorted(run.path.glob("checkpoints/step-*/model"), reverse=True)]
    return [*(str(folder) for folder in folders if folder.is_dir()), str(run.setting("model", "path"))]


def _load(source: str) -> TextReader:
    """The file alone where there is one: transformers takes seconds to import."""
    file = Path(source) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        special = {id_ for id_, token in fast.get_added_tokens_decoder().items() if token.special}
        return TextReader(lambda token_ids: fast.decode(token_ids, skip_special_tokens=False), special)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(source, local_files_only=True)
    return TextReader(lambda token_ids: slow.decode(token_ids, skip_special_tokens=False), set(slow.all_special_ids))
