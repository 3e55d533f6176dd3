"""Models by name from the Hugging Face Hub: ``hf:OWNER/REPO[:QUANT]``.

Files lie in the Hub's own cache, where other programs find them too. Without a connection, or with
``HF_HUB_OFFLINE``, what is there already is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from anaphora.errors import ModelNotFoundError

PREFIX = "hf:"

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REFERENCE = re.compile(rf"hf:(?P<repo>{_NAME}/{_NAME})(?::(?P<quant>[A-Za-z0-9_.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)", re.IGNORECASE)
_USUAL = "Q4_K_M"
_PATIENCE = 5.0
"""Seconds the Hub may take to say what a repository holds."""


@dataclass(frozen=True, slots=True)
class HubModel:
    repo: str
    """``OWNER/REPO``."""
    quant: str | None = None
    """What a file's name must say, ``Q4_K_M`` for example."""

    @classmethod
    def parse(cls, reference: str) -> HubModel:
        """Raises :class:`~anaphora.errors.ModelNotFoundError` for what is no such reference."""
        match = _REFERENCE.fullmatch(reference)
        if match is None or ".." in reference or "--" in reference:
            raise ModelNotFoundError(
                f"{reference!r} names no model: use hf:OWNER/REPO or hf:OWNER/REPO:QUANT"
            )
        return cls(match["repo"], match["quant"])

    def __str__(self) -> str:
        return PREFIX + self.repo + (f":{self.quant}" if self.quant else "")


def fetch(model: HubModel) -> Path:
    """The model's file, downloaded if it isn't there; of a split model, the first part.

    A quant that is in the cache is taken from there without asking the Hub. The Hub's library
    shows its own progress on stderr.

    :raises ModelNotFoundError: no such repository or file, more than one file that could be
        meant, no connection, or a file that lies outside the repository's folder.
    """
    paths = (_cached(model) if model.quant else None) or _downloaded(model)
    for path in paths:
        if not path.resolve().is_relative_to(_folder(model.repo).resolve()):
            raise ModelNotFoundError(
                f"{path} leads out of the folder of {model.repo}: delete it and download it again"
            )
    return paths[0]


def choose(model: HubModel, names: Iterable[str]) -> list[str]:
    """The files to load: one, or all parts of a split model in order.

    Without a quant it is the only model there, else the usual one, Q4_K_M.
    Raises :class:`~anaphora.errors.ModelNotFoundError` where that doesn't single one out.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts and "\\" not in name
        if inside and name.lower().endswith(".gguf") and not _NO_MODEL.search(path.name):
            models.setdefault(_PART.sub(".gguf", name), []).append(name)
    if not models:
        raise ModelNotFoundError(f"{model.repo} holds no GGUF file: name a repository that does")
    found = _matching(models, model.quant) if model.quant else list(models)
    if not model.quant and len(found) > 1:
        found = _matching(models, _USUAL) or found
    if len(found) != 1:
        what = "holds several models" if found else f"has no {model.quant}"
        stems = [PurePosixPath(name).stem for name in models]
        raise ModelNotFoundError(
            f"{model.repo} {what}: use {PREFIX}{model.repo}:QUANT with a part of one of "
            f"{', '.join(stems[:12])}"
        )
    parts = models[found[0]]
    match = _PART.search(parts[0])
    if match and len(parts) != int(match[2]):
        raise ModelNotFoundError(f"{found[0]} of {model.repo} is not complete: parts are missing")
    return parts


def _matching(names: Iterable[str], quant: str) -> list[str]:
    """Names that say ``quant`` as a word of their own."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-./])", re.IGNORECASE)
    return [name for name in names if word.search(name)]


def _downloaded(model: HubModel) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # One attempt: the call that lists files alone would try for half a minute.
        found = HfApi().model_info(model.repo, timeout=_PATIENCE).siblings or ()
        names = choose(model, [sibling.rfilename for sibling in found])
        return [Path(hf_hub_download(model.repo, name)) for name in names]
    except ModelNotFoundError:
        raise
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{model.repo} asks for consent: give it on huggingface.co, then log in "
            "with 'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no repository {model.repo}, or it is private: check the name, or log in "
            "with 'hf auth login'"
        ) from error
    except Exception as error:  # whatever the Hub's HTTP library raises without a connection
        paths = _cached(model)
        if paths is None:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelNotFoundError(
                f"{model} is not in the cache and can't be downloaded: {why}"
            ) from error
        return paths


def _cached(model: HubModel) -> list[Path] | None:
    """The model's files in the cache's current snapshot; ``None`` where they are not all there."""
    folder = _folder(model.repo)
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
        return [snapshot / name for name in choose(model, names)]
    except (OSError, ValueError, ModelNotFoundError):
        return None


def _folder(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))
