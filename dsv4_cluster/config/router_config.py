"""Settings of the router: limits at the edge and retries."""

from typing import Self

from pydantic import Field, model_validator

from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.config.base import Settings
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.responses_config import ResponsesConfig


class RouterConfig(Settings):
    """What one router replica accepts."""

    num_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.1, ge=0)
    max_ongoing_requests: int = Field(1024, ge=1, description="requests in flight per router; above it 429")
    max_body_bytes: int = Field(16 << 20, ge=1024, description="HTTP body limit")
    request_timeout_s: float = Field(600.0, gt=0, description="time from admission to the last token")
    max_attempts: int = Field(3, ge=1, le=10, description="prefill attempts per request, the first one included")
    api: ApiConfig = ApiConfig()
    responses: ResponsesConfig = ResponsesConfig()
    batches: BatchesConfig = BatchesConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_lines = self.batches.max_concurrent_lines
        if self.batches.dir is not None and num_lines >= self.max_ongoing_requests:
            raise ValueError(
                f"batches.max_concurrent_lines is {num_lines}, max_ongoing_requests {self.max_ongoing_requests}: "
                "batches would leave no room for anybody else"
            )
        return self
