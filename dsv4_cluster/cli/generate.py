"""`dsv4 generate`: in-process inference, no Ray."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError, InvalidRequestError

CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint directory.")]


@reports_errors
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 = always the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens of this total mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many most probable tokens; 0 = all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a share of the most probable token's.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="-2..2, once for a token that was generated.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2..2, for every time a token was generated.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="> 1: avoid tokens of prompt and answer.")] = 1.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add to a token's logit; several allowed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens; without it every run differs.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text; several allowed.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End it at this token id; several allowed.")] = None,
    min_tokens: Annotated[int, typer.Option(help="No end token before so many tokens.")] = 0,
    thinking_budget: Annotated[
        int | None, typer.Option(help="The prompt ends inside the thoughts: end them after so many tokens.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    num_draft_tokens: Annotated[
        str, typer.Option(metavar="0..4|auto", help="Tokens the MTP layer drafts per step; answers stay the same.")
    ] = "0",
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

    biases = _logit_bias(logit_bias or [])
    drafts = int(num_draft_tokens) if num_draft_tokens.isdigit() else num_draft_tokens
    try:
        llm = LLM(checkpoint, dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_draft_tokens=drafts)  # type: ignore[arg-type]  # pydantic checks
    except ValidationError as err:
        raise ConfigError("; ".join(f"{e['loc'][0]}: {e['msg']}" for e in err.errors())) from err
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=biases,
        seed=seed,
        n=n,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        min_tokens=min_tokens,
        thinking_budget=thinking_budget,
        ignore_eos=ignore_eos,
    )
    for output in llm.generate(prompt, params):
        if as_json:
            print(json.dumps(dataclasses.asdict(output)))
        else:
            print("\n".join(f"{output.prompt}{answer.text}" for answer in output.outputs))


def _logit_bias(entries: list[str]) -> dict[int, float]:
    """`ID=BIAS` texts as numbers. Raises: InvalidRequestError that quotes the entry."""
    result = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            result[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidRequestError(f"logit-bias {entry!r} is not of the form ID=BIAS, like 42=-1.5") from None
    return result
