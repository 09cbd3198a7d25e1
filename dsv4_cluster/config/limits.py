"""How long prompt and answer may be together: what engine, cache and checkpoint allow."""

from collections.abc import Iterable

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.errors import ConfigError


def max_model_len(config: ModelConfig, engine: EngineConfig, kv: KVConfig) -> int:
    """The explicit limit of one engine, or what context and cache both allow, in tokens.

    Raises: ConfigError when the explicit limit exceeds one of them.
    """
    cache_tokens = kv.num_pages * PAGE_TOKENS
    if engine.max_model_len is None:
        return min(config.max_position_embeddings, cache_tokens)
    if engine.max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len is {engine.max_model_len}, the checkpoint's max_position_embeddings is "
            f"{config.max_position_embeddings}"
        )
    if engine.max_model_len > cache_tokens:
        raise ConfigError(
            f"engine.max_model_len is {engine.max_model_len} tokens, but kv.num_pages {kv.num_pages} holds only "
            f"{cache_tokens}: raise kv.num_pages to at least {-(-engine.max_model_len // PAGE_TOKENS)}"
        )
    return engine.max_model_len


def shortest_max_model_len(config: ModelConfig, engines: Iterable[tuple[EngineConfig, KVConfig]]) -> int:
    """The limit of a sequence that passes through several engines, prefill and decode. Raises: ConfigError."""
    return min(max_model_len(config, engine, kv) for engine, kv in engines)


def check_drafter(config: ModelConfig, speculation: SpeculationConfig) -> None:
    """Raises: ConfigError when drafts are wanted and the checkpoint's config has no MTP layer to make them."""
    if speculation.max_draft_tokens > 0 and not config.has_mtp:
        found = "a DSpark drafter instead of an MTP layer" if config.has_dspark else "no MTP layer"
        wish = f"speculation.num_draft_tokens is {speculation.num_draft_tokens!r}"
        raise ConfigError(f"{wish}, but the checkpoint has {found}: set it to 0")


def check_headroom(speculation: SpeculationConfig, kv: KVConfig) -> None:
    """Raises: ConfigError when rejected drafts could overwrite a live row of a ring."""
    if speculation.max_draft_tokens > kv.speculation_headroom:
        raise ConfigError(
            f"speculation.num_draft_tokens is {speculation.num_draft_tokens!r}, up to {speculation.max_draft_tokens} "
            f"drafts per step, but kv.speculation_headroom is {kv.speculation_headroom}: raise it to at least that"
        )
