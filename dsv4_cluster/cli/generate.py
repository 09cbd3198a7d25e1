"""`dsv4 generate`: in-process inference, no Ray."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4_cluster.cli.output import reports_errors

CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint directory.")]


@reports_errors
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 = always the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens of this total mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens; without it every run differs.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text; several allowed.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (exact) or fp8.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, with token ids.")] = False,
) -> None:
    """Continue prompts with the model in this process, without Ray.

    The prompt is raw text, not a chat: no template is applied.

    Example: dsv4 generate checkpoints/tiny --prompt "Once upon" --max-tokens 16 --temperature 0
    """
    from pydantic import ValidationError

    from dsv4_cluster import LLM, SamplingParams
    from dsv4_cluster.errors import ConfigError

    try:
        llm = LLM(checkpoint, dtype=dtype, kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]  # pydantic checks
    except ValidationError as err:
        raise ConfigError("; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in err.errors())) from err
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    for output in llm.generate(prompt, params):
        print(json.dumps(dataclasses.asdict(output)) if as_json else f"{output.prompt}{output.text}")
