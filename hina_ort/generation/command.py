"""`hina-ort generate`: its arguments, and what it reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hina_ort.bench.options import MAX_THREADS_PER_CPU
from hina_ort.doctor import usable_cpus
from hina_ort.files import UsageError, find_model
from hina_ort.generation.decoder import Decoder
from hina_ort.generation.experts import FOLDER_KEY, CountingModel, ExpertCounts, counting_model, draw_heat_map
from hina_ort.generation.loop import Generated, generate
from hina_ort.generation.sampling import Sampler
from hina_ort.generation.text import TextStream
from hina_ort.generation.tokens import Tokens
from hina_ort.session import session_options

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What was generated from so many `prompt_tokens`, and how fast; `finish` "context": the text is full."""

    model: str
    prompt_tokens: int
    text: str
    made: Generated
    finish: str
    seed: int | None
    experts: ExpertCounts | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are documented in docs/cli.md."""
        made = self.made
        return {
            "model": self.model,
            "text": self.text,
            "tokens": made.tokens,
            "finish": self.finish,
            "seed": self.seed,
            "prefill": _speed(self.prompt_tokens if made.prefill_seconds else 0, made.prefill_seconds),
            "decode": _speed(made.decode_steps, made.decode_seconds),
            "experts": None if self.experts is None else self.experts.to_dict(),
        }


def run_generate(
    model: Path,
    prompt: str | None,
    *,
    prompt_file: Path | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
    threads: int | None = None,
    experts_stats: bool = False,
    heatmap: Path | None = None,
    write: Tell = lambda text: None,
    warn: Tell = lambda text: None,
) -> Report:
    """Generate text after `prompt`; `write` gets it as it comes, `warn` what is to be known before.

    Raises UsageError for arguments that do not fit, ModelFileError when a file is missing or wrong or the model fails.
    """
    sampler = Sampler(temperature, top_k, top_p, seed)
    for option, count in (("--max-new-tokens", max_new_tokens), ("--threads", threads)):
        if count is not None and count < 1:
            raise UsageError(f"{option} is {count}, expected 1 or more")
    if threads is not None and threads > (most := MAX_THREADS_PER_CPU * usable_cpus()):
        raise UsageError(f"--threads is {threads}, expected {most} or less: {MAX_THREADS_PER_CPU} for each usable CPU")
    if heatmap is not None:
        _check_heat_map(heatmap, experts_stats)
    source = find_model(model)
    words = Tokens.read(source)
    tokens = words.encode(_prompt(prompt, prompt_file), chat=chat)
    room = max_new_tokens if words.context is None else words.context - len(tokens)
    if room < 1:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens, and the model takes {words.context} with the answer; shorten it"
        )
    most = min(room, max_new_tokens)
    counting = counting_model(source) if experts_stats else None
    decoder = _load(source, counting, threads, len(tokens) + most)
    if not decoder.has_cache:
        warn(
            f"{source} has no cache of keys and values, so that each token takes as long as reading the whole text; "
            "export it with the task text-generation-with-past"
        )
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        write(text)

    stream = TextStream(words.decode, tokens)
    made = generate(
        decoder,
        tokens,
        sampler,
        most=most,
        stop=words.stop,
        also=() if counting is None else counting.outputs,
        emit=lambda token: show(stream.push(token)),
    )
    show(stream.finish())
    finish = "context" if made.finish == "length" and room < max_new_tokens else made.finish
    experts = None
    if counting is not None and made.totals:
        experts = ExpertCounts(counting.layers, [total.tolist() for total in made.totals])
    if heatmap is not None and experts is not None:
        draw_heat_map(experts, heatmap)
    return Report(str(source), len(tokens), "".join(pieces), made, finish, sampler.seed, experts)


def _load(source: Path, counting: CountingModel | None, threads: int | None, most: int) -> Decoder:
    """The decoder `source`, or its `counting` model, for a text of `most` tokens."""
    options = session_options()
    options.log_severity_level = 4  # an error is an exception too, which becomes one sentence
    options.intra_op_num_threads = usable_cpus() if threads is None else threads
    if counting is None:
        return Decoder(source, str(source), options, most)
    options.add_session_config_entry(FOLDER_KEY, str(counting.folder))
    return Decoder(source, counting.model, options, most)


def _speed(tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if tokens else None}


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give one prompt: PROMPT, or --prompt-file FILE (- for standard input)")
    if file is None:
        return _decoded(prompt or "", "the prompt")
    if str(file) == "-" and sys.stdin is None:
        raise UsageError("--prompt-file - reads standard input, which is closed; name a file")
    content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    return _decoded(content, f"--prompt-file {file}").removesuffix("\n")


def _decoded(content: bytes | str, name: str) -> str:
    """The text of bytes; of an argument too, in which Python hides bytes that are no text."""
    try:
        return (content.encode(errors="surrogateescape") if isinstance(content, str) else content).decode()
    except UnicodeError as error:
        raise UsageError(f"{name} is no text in UTF-8: {error}") from error


def _check_heat_map(path: Path, counted: bool) -> None:
    from hina_ort.bench.command import check_files
    from hina_ort.bench.plot import import_matplotlib

    if not counted:
        raise UsageError("--heatmap needs --experts-stats")
    check_files({"--heatmap": path})
    import_matplotlib("--heatmap")
