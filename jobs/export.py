"""`rlhf export`: what a run has learnt so far, as a directory that PEFT, transformers or vLLM loads."""

import tempfile
from pathlib import Path

from rlhf.checkpoint import CheckpointStore, Manifest
from rlhf.config import require
from rlhf.errors import CheckpointError
from rlhf.models.loading import load_tokenizer
from rlhf.resume import model_fingerprint, read_run
from rlhf.training.from_checkpoint import Trained


def export(source: Path, out: Path, *, merge: bool) -> str:
    """Writes the model of a run's newest whole checkpoint, or of a given one; returns a line on what it wrote.

    Of a run with adapters, the adapter; or its sum with the base, if ``merge``. ``out`` gets its name when all is
    written. Raises CheckpointError or ConfigError.
    """
    out = out.expanduser().resolve()
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"{out}: already exists and is not an empty directory; remove it, or name another one",
    )
    checkpoint = find_checkpoint(source.expanduser().resolve())
    state = read_run(checkpoint)
    trained = Trained.of(checkpoint, state["config"])
    require(
        trained.lora is not None or not merge,
        f"--merge: {checkpoint} holds a whole model and no adapters (learner.lora); leave it out",
    )
    tokenizer, base = load_tokenizer(trained.base), trained.base.path
    if model_fingerprint(base, "model.path") != state["fingerprints"]["model"]:
        raise CheckpointError(
            f"{checkpoint}: the config.json of model.path={base} is not the one that the run started from; put that "
            "model back"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
        directory = Path(aside) / "model"
        if trained.lora is None or merge:
            trained.write_model(directory)
        else:
            trained.write_adapter(directory)
        tokenizer.save_pretrained(directory)
        directory.rename(out)
    return f"{out}: {describe(trained, merge=merge)} of {checkpoint}"


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that ``source`` is, or the newest whole one of the run in that directory.

    Raises CheckpointError if there is none, or it is damaged.
    """
    if not (source / "checkpoints").is_dir():
        Manifest.read(source).check(source)
        return source
    newest = CheckpointStore(source, keep=1).find("auto")
    if newest is None:
        model = source / "model"
        also = f"; its final model is in {model} as transformers and vLLM load it" if model.is_dir() else ""
        raise CheckpointError(f"{source}: the run has no checkpoint{also}")
    return newest


def describe(trained: Trained, *, merge: bool) -> str:
    """What was written, in words."""
    dtype = str(trained.dtype).removeprefix("torch.")
    in_4_bits = trained.lora is not None and trained.lora.load_in_4bit
    if trained.lora is None:
        return f"the model ({dtype})"
    if merge:
        rounded = ", whose weights in 4 bits were made dense again" if in_4_bits else ""
        return f"the adapter added to {trained.base.path}{rounded} ({dtype})"
    rounded = ' in 4 bits, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")' if in_4_bits else ""
    return f"the adapter, for {trained.base.path}{rounded} ({dtype})"
