"""Settings of one engine: precision, batch limits, threads."""

from typing import Literal

from pydantic import Field

from dsv4_cluster.config.base import Settings


class EngineConfig(Settings):
    """What the scheduler and the model runner may use."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute dtype; auto = bfloat16, float32 on a CPU without fast bf16"
    )
    device: str = Field("cpu", description="torch device of the rank, such as cpu or cuda")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sequences that run at the same time")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens per step, prompts and answers together")
    max_model_len: int | None = Field(
        None, ge=1, description="prompt + answer limit in tokens; default: the checkpoint's max_position_embeddings"
    )
    deterministic: bool | None = Field(
        None,
        description="a request's tokens and logprobs are the same bits alone or in any batch, chunked or whole; "
        "default: on where the native CPU kernels run, where it costs nothing; elsewhere on a CPU true computes "
        "row by row, which is slow",
    )
    memory_limit_bytes: int | None = Field(
        None, ge=1, description="device memory the engine may plan for; default: all of the device's"
    )
    num_threads: int = Field(1, ge=1, description="torch CPU threads of the worker process")
